// Copies between pinned host memory and a GPU through the driver alone (common/driver.h), in the primary context of the
// device, on a stream of the lane's own that waits for what the caller's stream had before the request.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "async_io/staging.h"
#include "common/driver.h"

namespace ds {
namespace aio {

// The driver's functions that copying needs beside those of a launch.
struct CopyDriver {
  int (*MemHostAlloc)(void**, size_t, unsigned);
  int (*MemFreeHost)(void*);
  int (*MemcpyDtoHAsync)(void*, uint64_t, size_t, void*);
  int (*MemcpyHtoDAsync)(uint64_t, const void*, size_t, void*);
  int (*StreamCreate)(void**, unsigned);
  int (*StreamDestroy)(void*);
  int (*StreamSynchronize)(void*);
  int (*StreamWaitEvent)(void*, void*, unsigned);
  int (*EventCreate)(void**, unsigned);
  int (*EventRecord)(void*, void*);
  int (*EventDestroy)(void*);

  static const CopyDriver& get() {
    static const CopyDriver driver = open();
    return driver;
  }

 private:
  static CopyDriver open() {
    Driver::get();
    CopyDriver d;
    Driver::find("cuMemHostAlloc", &d.MemHostAlloc);
    Driver::find("cuMemFreeHost", &d.MemFreeHost);
    Driver::find("cuMemcpyDtoHAsync_v2", &d.MemcpyDtoHAsync);
    Driver::find("cuMemcpyHtoDAsync_v2", &d.MemcpyHtoDAsync);
    Driver::find("cuStreamCreate", &d.StreamCreate);
    Driver::find("cuStreamDestroy_v2", &d.StreamDestroy);
    Driver::find("cuStreamSynchronize", &d.StreamSynchronize);
    Driver::find("cuStreamWaitEvent", &d.StreamWaitEvent);
    Driver::find("cuEventCreate", &d.EventCreate);
    Driver::find("cuEventRecord", &d.EventRecord);
    Driver::find("cuEventDestroy_v2", &d.EventDestroy);
    return d;
  }
};

// The primary context of a device: retained once, never released, as torch does.
inline Driver::Handle context_of(int ordinal) {
  static std::mutex& mutex = *new std::mutex();
  static std::map<int, Driver::Handle>& contexts = *new std::map<int, Driver::Handle>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = contexts.find(ordinal);
  if (found != contexts.end()) return found->second;
  const Driver& d = Driver::get();
  int device = 0;
  Driver::Handle context = nullptr;
  d.check(d.DeviceGet(&device, ordinal), "cuDeviceGet");
  d.check(d.DevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  contexts[ordinal] = context;
  return context;
}

// An event behind all that `stream` has been given.
inline std::shared_ptr<void> event_after(int ordinal, void* stream) {
  const Driver& d = Driver::get();
  const CopyDriver& c = CopyDriver::get();
  const Driver::Handle context = context_of(ordinal);
  CurrentContext current(context);
  void* event = nullptr;
  d.check(c.EventCreate(&event, 2), "cuEventCreate");  // CU_EVENT_DISABLE_TIMING
  std::shared_ptr<void> owner(event, [context](void* e) {
    CurrentContext there(context);
    CopyDriver::get().EventDestroy(e);
  });
  d.check(c.EventRecord(event, stream), "cuEventRecord");
  return owner;
}

class CudaCopier : public DeviceCopier {
 public:
  explicit CudaCopier(int ordinal) : context_(context_of(ordinal)) {
    CurrentContext current(context_);
    driver_.check(copy_.StreamCreate(&stream_, 1), "cuStreamCreate");  // CU_STREAM_NON_BLOCKING
  }
  ~CudaCopier() override {
    CurrentContext current(context_);
    copy_.StreamDestroy(stream_);
  }

  char* allocate(int64_t bytes) override {
    CurrentContext current(context_);
    void* memory = nullptr;
    return copy_.MemHostAlloc(&memory, static_cast<size_t>(bytes), 1) == 0 ? static_cast<char*>(memory) : nullptr;  // portable
  }
  void release(char* memory) override {
    CurrentContext current(context_);
    copy_.MemFreeHost(memory);
  }

  bool to_host(char* host, const char* device, int64_t bytes, void* after) override {
    CurrentContext current(context_);
    return waits_for(after) &&
           went(copy_.MemcpyDtoHAsync(host, reinterpret_cast<uint64_t>(device), static_cast<size_t>(bytes), stream_), "cuMemcpyDtoHAsync") &&
           went(copy_.StreamSynchronize(stream_), "cuStreamSynchronize");
  }
  bool to_device(char* device, const char* host, int64_t bytes, void* after) override {
    CurrentContext current(context_);
    return waits_for(after) &&
           went(copy_.MemcpyHtoDAsync(reinterpret_cast<uint64_t>(device), host, static_cast<size_t>(bytes), stream_), "cuMemcpyHtoDAsync") &&
           went(copy_.StreamSynchronize(stream_), "cuStreamSynchronize");
  }

  static std::unique_ptr<DeviceCopier> make(int ordinal, std::string* why) {
    return make_as<CudaCopier>(ordinal, why);
  }

 protected:
  template <class Copier>
  static std::unique_ptr<DeviceCopier> make_as(int ordinal, std::string* why) {
    try {
      return std::unique_ptr<DeviceCopier>(new Copier(ordinal));
    } catch (const tvm::ffi::Error& error) {
      *why = error.message();
      return nullptr;
    }
  }

  bool waits_for(void* after) { return after == nullptr || went(copy_.StreamWaitEvent(stream_, after, 0), "cuStreamWaitEvent"); }

  bool went(int code, const char* call) {
    if (code == 0) return true;
    const char* name = nullptr;
    driver_.GetErrorName(code, &name);
    problem_ = std::string(call) + ": " + (name != nullptr ? name : std::to_string(code));
    return false;
  }

  const Driver& driver_ = Driver::get();
  const CopyDriver& copy_ = CopyDriver::get();
  const Driver::Handle context_;
  void* stream_ = nullptr;
};

}  // namespace aio
}  // namespace ds
