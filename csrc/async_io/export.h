// The functions of a library that does I/O, the same for `async_io` and `gds`. Python fills the structures below
// (src/deepspeed_ops/aio_native.py); every field is 8 bytes and addresses are integers. Queues and files are named by
// numbers that are never used twice, so what was closed cannot be used by mistake, from whatever thread.
// What goes wrong with a file is not thrown but told in `Outcome`: Python raises it with path, offset and length.
// Errors: UsageError for a number that names nothing (any more).
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "async_io/device_copy.h"
#include "async_io/queue.h"

namespace ds {
namespace aio {

struct QueueArgs {
  int64_t block, depth, lanes, single_submit, backend;  // bytes; transfers in flight a lane; threads; 0 or 1; Backend
};

struct OutcomeArgs {
  int64_t code;  // 0, an errno, or kShortFile
  int64_t at;    // position in the file, -1: none
  int64_t moved;
  char call[256];
};

struct FileArgs {
  int64_t path;        // UTF-8, ends with a NUL; 0: the descriptor
  int64_t descriptor;  // the system's
  int64_t write, direct;
  int64_t file;        // out: its number
  int64_t is_direct, alignment, memory_alignment;  // out
  OutcomeArgs outcome;  // out
};

struct RequestArgs {
  int64_t queue, file, write, data, bytes, offset, sync;
  int64_t device, stream;  // ordinal of a GPU or -1; the stream whose work comes before the copy
  OutcomeArgs outcome;     // out
};

// Things by number.
template <class T>
class Numbered {
 public:
  int64_t add(std::shared_ptr<T> item) {
    std::lock_guard<std::mutex> lock(ForkGuard::get().registry());
    items_[++last_] = std::move(item);
    return last_;
  }
  std::shared_ptr<T> get(int64_t number, const char* what) {
    std::lock_guard<std::mutex> lock(ForkGuard::get().registry());
    auto found = items_.find(number);
    if (found == items_.end()) TVM_FFI_THROW(UsageError) << what << " " << number << " is closed";
    return found->second;
  }
  // What has that number, or null; it has it no more.
  std::shared_ptr<T> take(int64_t number) {
    std::lock_guard<std::mutex> lock(ForkGuard::get().registry());
    auto found = items_.find(number);
    if (found == items_.end()) return nullptr;
    std::shared_ptr<T> item = std::move(found->second);
    items_.erase(found);
    return item;
  }

 private:
  std::map<int64_t, std::shared_ptr<T>> items_;
  int64_t last_ = 0;
};

// A queue that a child of fork replaces by a new one at its first use. The parent's is left as it is, for good: its threads,
// its locks and its kernel contexts belong to the parent.
class Handle {
 public:
  explicit Handle(const Queue::Options& options) : options_(options) { renew(); }
  ~Handle() {
    if (generation_ != ForkGuard::get().generation()) new std::shared_ptr<Queue>(std::move(queue_));
  }

  std::shared_ptr<Queue> queue() {
    std::lock_guard<std::mutex> lock(ForkGuard::get().registry());
    if (generation_ != ForkGuard::get().generation()) {
      new std::shared_ptr<Queue>(std::move(queue_));
      renew();
    }
    return queue_;
  }

 private:
  void renew() {
    generation_ = ForkGuard::get().generation();
    queue_ = std::make_shared<Queue>(options_);
  }

  const Queue::Options options_;
  std::shared_ptr<Queue> queue_;
  int64_t generation_ = 0;
};

inline Numbered<Handle>& handles() {
  static Numbered<Handle>& all = *new Numbered<Handle>();
  return all;
}
inline Numbered<File>& files() {
  static Numbered<File>& all = *new Numbered<File>();
  return all;
}

inline void tell(const Failure& failure, int64_t moved, OutcomeArgs* outcome) {
  outcome->code = failure.code;
  outcome->at = failure.at;
  outcome->moved = moved;
  const size_t n = std::min(failure.call.size(), sizeof(outcome->call) - 1);
  std::memcpy(outcome->call, failure.call.data(), n);
  outcome->call[n] = '\0';
}

inline int64_t open_queue_with(int64_t address, Lane::MakeCopier make_copier, bool device_direct) {
  const QueueArgs& a = *reinterpret_cast<const QueueArgs*>(address);
  Queue::Options options;
  options.block = a.block;
  options.depth = a.depth;
  options.lanes = a.lanes;
  options.single_submit = a.single_submit != 0;
  options.backend = static_cast<Backend>(a.backend);
  options.make_copier = make_copier;
  options.device_direct = device_direct;
  return handles().add(std::make_shared<Handle>(options));
}

// Waits for what is in flight; false for a number that is closed already.
inline bool close_queue(int64_t queue) { return handles().take(queue) != nullptr; }

inline tvm::ffi::String queue_backend(int64_t queue) {
  return name_of(handles().get(queue, "queue")->queue()->backend());
}
inline tvm::ffi::String queue_trace(int64_t queue) { return handles().get(queue, "queue")->queue()->trace(); }
inline tvm::ffi::String backends() { return describe_backends(); }

inline void open_file(int64_t address) {
  FileArgs& a = *reinterpret_cast<FileArgs*>(address);
  Failure failure;
  std::shared_ptr<File> file =
      a.path != 0 ? File::open(reinterpret_cast<const char*>(a.path), a.write != 0, a.direct != 0, &failure)
                  : File::of_descriptor(static_cast<Descriptor>(a.descriptor), a.write != 0, a.direct != 0, &failure);
  tell(failure, 0, &a.outcome);
  if (!file) return;
  a.is_direct = file->direct() ? 1 : 0;
  a.alignment = file->alignment();
  a.memory_alignment = file->memory_alignment();
  a.file = files().add(std::move(file));
}

// Closes it once nothing uses it any more; false for a number that is closed already.
inline bool close_file(int64_t file) { return files().take(file) != nullptr; }

inline int64_t file_size(int64_t file) { return files().get(file, "file")->size(); }

// The request, or null and why it cannot be started.
inline std::shared_ptr<Request> request_of(const RequestArgs& a, Failure* failure) {
  auto request = std::make_shared<Request>();
  request->file = files().get(a.file, "file");
  request->write = a.write != 0;
  request->sync = a.sync != 0;
  request->data = reinterpret_cast<char*>(a.data);
  request->bytes = a.bytes;
  request->offset = request->next = a.offset;
  request->device = static_cast<int>(a.device);
  if (!request->write && a.bytes > 0) {
    const int64_t size = request->file->size();
    if (size < 0 || a.offset > size - a.bytes) {
      failure->code = size < 0 ? -size : kShortFile;
      failure->at = size < 0 ? -1 : size;
      failure->call = size < 0 ? "fstat" : "pread";
      return nullptr;
    }
  }
  if (a.device >= 0 && a.bytes > 0) request->after = event_after(static_cast<int>(a.device), reinterpret_cast<void*>(a.stream));
  return request;
}

// Starts a request: its ticket, or 0 and the outcome.
inline int64_t start_request(int64_t address) {
  RequestArgs& a = *reinterpret_cast<RequestArgs*>(address);
  Failure failure;
  std::shared_ptr<Request> request = request_of(a, &failure);
  tell(failure, 0, &a.outcome);
  return request ? handles().get(a.queue, "queue")->queue()->start(std::move(request)) : 0;
}

// Does a request.
inline void run_request(int64_t address) {
  RequestArgs& a = *reinterpret_cast<RequestArgs*>(address);
  Failure failure;
  const std::shared_ptr<Request> request = request_of(a, &failure);
  if (!request) return tell(failure, 0, &a.outcome);
  const Queue::Outcome outcome = handles().get(a.queue, "queue")->queue()->run(request);
  tell(outcome.failure, outcome.moved, &a.outcome);
}

// Waits for a ticket; false for one that is not in flight.
inline bool finish_request(int64_t queue, int64_t ticket, int64_t address) {
  const Queue::Outcome outcome = handles().get(queue, "queue")->queue()->finish(ticket);
  if (outcome.known) tell(outcome.failure, outcome.moved, reinterpret_cast<OutcomeArgs*>(address));
  return outcome.known;
}

inline bool request_is_finished(int64_t queue, int64_t ticket) {
  return handles().get(queue, "queue")->queue()->finished(ticket);
}

}  // namespace aio
}  // namespace ds

#define DS_EXPORT_IO()                                                                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(close_queue, ds::aio::close_queue)                    \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(queue_backend, ds::aio::queue_backend)                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(queue_trace, ds::aio::queue_trace)                    \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(backends, ds::aio::backends)                          \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(open_file, ds::aio::open_file)                        \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(close_file, ds::aio::close_file)                      \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(file_size, ds::aio::file_size)                        \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(start_request, ds::aio::start_request)                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_request, ds::aio::run_request)                    \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(finish_request, ds::aio::finish_request)              \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(request_is_finished, ds::aio::request_is_finished)
