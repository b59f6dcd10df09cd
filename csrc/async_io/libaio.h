// Linux kernel AIO through libaio, opened at run time. Asynchronous for direct I/O only, which is all it is given.
//
// The structures are the kernel's ABI (include/uapi/linux/aio_abi.h) in its little-endian form.
#pragma once

#if defined(__linux__)

#include <dlfcn.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "async_io/engine.h"

namespace ds {
namespace aio {

struct Iocb {
  uint64_t data;
  uint32_t key, rw_flags;
  uint16_t opcode;  // 0 pread, 1 pwrite
  int16_t priority;
  uint32_t fd;
  uint64_t buffer, bytes;
  int64_t offset;
  uint64_t reserved;
  uint32_t flags, event_fd;
};
static_assert(sizeof(Iocb) == 64, "the kernel's struct iocb");

struct IoEvent {
  uint64_t data, iocb;
  int64_t result, second;
};

// The library's functions; they return a negative errno.
struct Libaio {
  using Context = void*;
  int (*setup)(int, Context*) = nullptr;
  int (*destroy)(Context) = nullptr;
  int (*submit)(Context, long, Iocb**) = nullptr;
  int (*events)(Context, long, long, IoEvent*, void*) = nullptr;
  std::string found, why;  // the file that answered, or why none did

  static const Libaio& get() {
    static const Libaio library = open();
    return library;
  }

 private:
  static Libaio open() {
    Libaio library;
    // The second name is that of Debian's and Ubuntu's packages since the 64-bit time transition.
    for (const char* name : {"libaio.so.1", "libaio.so.1t64", "libaio.so"}) {
      void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle == nullptr) {
        if (library.why.empty()) {
          const char* text = dlerror();
          library.why = text != nullptr ? text : "libaio.so.1 cannot be opened";
        }
        continue;
      }
      library.setup = reinterpret_cast<int (*)(int, Context*)>(dlsym(handle, "io_setup"));
      library.destroy = reinterpret_cast<int (*)(Context)>(dlsym(handle, "io_destroy"));
      library.submit = reinterpret_cast<int (*)(Context, long, Iocb**)>(dlsym(handle, "io_submit"));
      library.events = reinterpret_cast<int (*)(Context, long, long, IoEvent*, void*)>(dlsym(handle, "io_getevents"));
      if (library.setup != nullptr && library.destroy != nullptr && library.submit != nullptr && library.events != nullptr) {
        library.found = name;
        library.why.clear();
        return library;
      }
      library.why = std::string(name) + " lacks io_setup, io_destroy, io_submit or io_getevents";
      dlclose(handle);
    }
    return library;
  }
};

class LibaioEngine : public Engine {
 public:
  // Null and an errno where the kernel gives no context of this depth.
  static std::unique_ptr<Engine> create(int depth, int* code) {
    const Libaio& library = Libaio::get();
    if (library.found.empty()) return *code = ENOSYS, nullptr;
    Libaio::Context context = nullptr;
    const int rc = library.setup(depth, &context);
    if (rc < 0) return *code = -rc, nullptr;
    return std::unique_ptr<Engine>(new LibaioEngine(depth, context));
  }

  ~LibaioEngine() override { library_.destroy(context_); }

  int depth() const override { return depth_; }

  int submit(Op* const* ops, int count) override {
    count = batch_of(ops, count, depth_);
    int filled = 0;
    for (; filled < count && !free_.empty(); ++filled) {
      Op& op = *ops[filled];
      op.slot = free_.back();
      free_.pop_back();
      Iocb& block = blocks_[op.slot];
      block = Iocb{};
      block.data = reinterpret_cast<uint64_t>(&op);
      block.opcode = op.write ? 1 : 0;
      block.fd = static_cast<uint32_t>(op.fd);
      block.buffer = reinterpret_cast<uint64_t>(op.data);
      block.bytes = static_cast<uint64_t>(op.bytes);
      block.offset = op.offset;
      batch_[static_cast<size_t>(filled)] = &block;
    }
    if (filled == 0) return count == 0 ? 0 : -EAGAIN;
    int taken;
    do {
      taken = library_.submit(context_, filled, batch_.data());
    } while (taken == -EINTR);
    for (int i = filled - 1; i >= (taken > 0 ? taken : 0); --i) free_.push_back(ops[i]->slot);
    in_flight_ += taken > 0 ? taken : 0;
    return taken == 0 ? -EAGAIN : taken;
  }

  int reap(Op** finished, int room, bool wait) override {
    if (in_flight_ == 0 || room == 0) return 0;
    struct {
      int64_t seconds, nanoseconds;
    } now = {0, 0};
    int got;
    do {
      got = library_.events(context_, wait ? 1 : 0, room < depth_ ? room : depth_, events_.data(), wait ? nullptr : &now);
    } while (got == -EINTR || (got == 0 && wait));
    for (int i = 0; i < got; ++i) {
      Op* op = reinterpret_cast<Op*>(events_[static_cast<size_t>(i)].data);
      op->result = events_[static_cast<size_t>(i)].result;
      free_.push_back(op->slot);
      finished[i] = op;
    }
    in_flight_ -= got > 0 ? got : 0;
    return got;
  }

 private:
  LibaioEngine(int depth, Libaio::Context context)
      : depth_(depth), context_(context), blocks_(static_cast<size_t>(depth)), batch_(static_cast<size_t>(depth)),
        events_(static_cast<size_t>(depth)) {
    for (int i = depth - 1; i >= 0; --i) free_.push_back(static_cast<uint32_t>(i));
  }

  const Libaio& library_ = Libaio::get();
  const int depth_;
  const Libaio::Context context_;
  int in_flight_ = 0;
  std::vector<Iocb> blocks_;
  std::vector<Iocb*> batch_;
  std::vector<IoEvent> events_;
  std::vector<uint32_t> free_;
};

}  // namespace aio
}  // namespace ds

#endif  // __linux__
