// cuFile (GPUDirect Storage), opened at run time: bytes move between file and GPU memory without host memory, or, in
// cuFile's own compatibility mode, through buffers of its own. Where the library or its driver does not answer, requests
// bounce through pinned memory as in async_io, and `cufile_state` says why.
//
// Never run on GPUDirect Storage hardware: what is tested is this code against a library that stands in for cuFile, and
// with NVIDIA's own in its compatibility mode.
// The structures are those of NVIDIA's cufile.h (release 1.0 and on).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "async_io/device_copy.h"

namespace ds {
namespace aio {

struct CuFile {
  struct Error {
    int code;      // 0: success; from 5000 on cuFile's own
    int cu_error;  // the driver's, where `code` says so
  };
  struct Descriptor {
    int type = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
    union {
      int fd;
      void* handle;
    } file = {};
    const void* operations = nullptr;
  };
  using Handle = void*;

  Error (*DriverOpen)() = nullptr;
  Error (*HandleRegister)(Handle*, Descriptor*) = nullptr;
  void (*HandleDeregister)(Handle) = nullptr;
  Error (*BufRegister)(const void*, size_t, int) = nullptr;
  Error (*BufDeregister)(const void*) = nullptr;
  int64_t (*Read)(Handle, void*, size_t, int64_t, int64_t) = nullptr;
  int64_t (*Write)(Handle, const void*, size_t, int64_t, int64_t) = nullptr;
  bool works = false;
  std::string why;

  static const CuFile& get() {
    static const CuFile library = open();
    return library;
  }

 private:
  static CuFile open() {
    CuFile c;
#if defined(__linux__)
    void* lib = nullptr;
    for (const char* name : {"libcufile.so.0", "libcufile.so"}) {
      lib = lib != nullptr ? lib : dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (lib == nullptr) {
      const char* text = dlerror();
      c.why = text != nullptr ? text : "libcufile.so.0 cannot be opened";
      return c;
    }
    const bool complete = bind(lib, "cuFileDriverOpen", &c.DriverOpen) && bind(lib, "cuFileHandleRegister", &c.HandleRegister) &&
                          bind(lib, "cuFileHandleDeregister", &c.HandleDeregister) &&
                          bind(lib, "cuFileBufRegister", &c.BufRegister) &&
                          bind(lib, "cuFileBufDeregister", &c.BufDeregister) && bind(lib, "cuFileRead", &c.Read) &&
                          bind(lib, "cuFileWrite", &c.Write);
    if (!complete) {
      c.why = "libcufile lacks a function of its first release";
      return c;
    }
    const Error opened = c.DriverOpen();
    c.works = opened.code == 0;
    c.why = c.works ? "cuFileDriverOpen works" : "cuFileDriverOpen: error " + std::to_string(opened.code);
#else
    c.why = "cuFile is Linux only";
#endif
    return c;
  }

#if defined(__linux__)
  template <class Fn>
  static bool bind(void* lib, const char* name, Fn* out) {
    *out = reinterpret_cast<Fn>(dlsym(lib, name));
    return *out != nullptr;
  }
#endif
};

// A lane's way to one GPU: cuFile where it takes the file, else the bounce.
class CuFileCopier : public CudaCopier {
 public:
  explicit CuFileCopier(int ordinal) : CudaCopier(ordinal) {}

  int64_t direct(File& file, bool write, char* device, int64_t bytes, int64_t offset, void* after) override {
#if defined(__linux__)
    const CuFile& c = CuFile::get();
    if (!c.works || !file.direct()) return kNotDirect;
    CurrentContext current(context_);
    if (!waits_for(after) || !went(copy_.StreamSynchronize(stream_), "cuStreamSynchronize")) return -EIO;
    // A registration a transfer: it costs microseconds, and a descriptor's number may name another file the next time.
    CuFile::Descriptor descriptor;
    descriptor.file.fd = file.direct_fd();
    CuFile::Handle handle = nullptr;
    if (c.HandleRegister(&handle, &descriptor).code != 0) return kNotDirect;
    int64_t moved = 0;
    while (moved < bytes) {
      const size_t left = static_cast<size_t>(bytes - moved);
      const int64_t n = write ? c.Write(handle, device + moved, left, offset + moved, 0)
                              : c.Read(handle, device + moved, left, offset + moved, 0);
      if (n < 0) {
        const int64_t code = n == -1 && errno != 0 ? errno : EIO;
        problem_ = std::string(write ? "cuFileWrite" : "cuFileRead") + ": " + std::to_string(n);
        moved = moved == 0 ? -code : moved;
        break;
      }
      if (n == 0) break;
      moved += n;
    }
    c.HandleDeregister(handle);
    return moved;
#else
    (void)file, (void)write, (void)device, (void)bytes, (void)offset, (void)after;
    return kNotDirect;
#endif
  }

  static std::unique_ptr<DeviceCopier> make(int ordinal, std::string* why) { return make_as<CuFileCopier>(ordinal, why); }
};

}  // namespace aio
}  // namespace ds
