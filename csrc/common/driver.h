// Launches kernels through the GPU driver alone: no CUDA header, no cudart, no libcuda at link time.
//
// TVM-FFI's own cubin launcher wants cuda_runtime.h and leaves cu* symbols undefined, which `-z now`, Windows and hosts
// without a driver do not forgive. This one opens the driver at first use and fills a table once. The exported names below
// are the driver's ABI (`_v2` where the 64-bit form has it) and are present in every driver that can load our parts.
//
// A kernel's code arrives through the TVM-FFI global function `deepspeed_ops.device_image`, which the Python side registers:
// it resolves the part for the very device (found, else compiled) and returns its bytes. What it raises reaches the caller.
//
// Contexts: every launch runs in the primary context of the given device (retained once, as the CUDA runtime and torch do),
// made current only for the launch. Streams are the caller's. Nothing here synchronises or allocates device memory.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#if defined(_WIN32)
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace ds {

struct Driver {
  using Handle = void*;
  int (*Init)(unsigned);
  int (*DriverGetVersion)(int*);
  int (*GetErrorName)(int, const char**);
  int (*GetErrorString)(int, const char**);
  int (*DeviceGet)(int*, int);
  int (*DeviceGetAttribute)(int*, int, int);
  int (*DevicePrimaryCtxRetain)(Handle*, int);
  int (*CtxGetCurrent)(Handle*);
  int (*CtxPushCurrent)(Handle);
  int (*CtxPopCurrent)(Handle*);
  int (*ModuleLoadData)(Handle*, const void*);
  int (*ModuleGetFunction)(Handle*, Handle, const char*);
  int (*FuncSetAttribute)(Handle, int, int);
  int (*LaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**);
  int version = 0;

  static const Driver& get() {
    static const Driver driver = open();
    return driver;
  }

  // Fills in a function that is not in the table. Throws DriverError where the driver lacks it.
  template <class Fn>
  static void find(const char* name, Fn* out) {
    get();
    bind(library(), name, out);
  }

  // Throws DriverError naming the call where `code` is not CUDA_SUCCESS.
  void check(int code, const char* call) const {
    if (code == 0) return;
    const char *name = nullptr, *text = nullptr;
    GetErrorName(code, &name);
    GetErrorString(code, &text);
    TVM_FFI_THROW(DriverError) << call << " failed with " << (name ? name : "error") << " (" << code << ")"
                               << (text ? std::string(": ") + text : std::string());
  }

 private:
  static void* library() {
#if defined(_WIN32)
    // The driver installs it there; nothing that lies in the current folder or beside the program may answer for it.
    return reinterpret_cast<void*>(LoadLibraryExA("nvcuda.dll", nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32));
#else
    // WSL keeps the driver outside the loader's path in distributions that do not list the folder.
    for (const char* name : {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"}) {
      if (void* handle = dlopen(name, RTLD_NOW | RTLD_GLOBAL)) return handle;
    }
    return nullptr;
#endif
  }

  template <class Fn>
  static void bind(void* lib, const char* name, Fn* out) {
#if defined(_WIN32)
    *out = reinterpret_cast<Fn>(reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(lib), name)));
#else
    *out = reinterpret_cast<Fn>(dlsym(lib, name));
#endif
    if (*out == nullptr) TVM_FFI_THROW(DriverError) << "the GPU driver has no function " << name << ": it is too old";
  }

  static Driver open() {
    void* lib = library();
    if (lib == nullptr) {
      TVM_FFI_THROW(DriverError) << "the NVIDIA driver library (libcuda.so.1, nvcuda.dll) cannot be opened on this host";
    }
    Driver d;
    bind(lib, "cuInit", &d.Init);
    bind(lib, "cuDriverGetVersion", &d.DriverGetVersion);
    bind(lib, "cuGetErrorName", &d.GetErrorName);
    bind(lib, "cuGetErrorString", &d.GetErrorString);
    bind(lib, "cuDeviceGet", &d.DeviceGet);
    bind(lib, "cuDeviceGetAttribute", &d.DeviceGetAttribute);
    bind(lib, "cuDevicePrimaryCtxRetain", &d.DevicePrimaryCtxRetain);
    bind(lib, "cuCtxGetCurrent", &d.CtxGetCurrent);
    bind(lib, "cuCtxPushCurrent_v2", &d.CtxPushCurrent);
    bind(lib, "cuCtxPopCurrent_v2", &d.CtxPopCurrent);
    bind(lib, "cuModuleLoadData", &d.ModuleLoadData);
    bind(lib, "cuModuleGetFunction", &d.ModuleGetFunction);
    bind(lib, "cuFuncSetAttribute", &d.FuncSetAttribute);
    bind(lib, "cuLaunchKernel", &d.LaunchKernel);
    d.check(d.Init(0), "cuInit");
    d.check(d.DriverGetVersion(&d.version), "cuDriverGetVersion");
    return d;
  }
};

// Makes a context current for a scope, and does nothing where it is current already (the usual case under torch).
class CurrentContext {
 public:
  explicit CurrentContext(Driver::Handle context) {
    Driver::Handle now = nullptr;
    const Driver& d = Driver::get();
    d.check(d.CtxGetCurrent(&now), "cuCtxGetCurrent");
    if (now == context) return;
    d.check(d.CtxPushCurrent(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~CurrentContext() {
    Driver::Handle popped;
    if (pushed_) Driver::get().CtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// The kernels of one op on every device they were asked for. One static object an op; never destroyed before the process
// ends, since unloading code at exit races with the driver's own shutdown.
class DeviceCode {
 public:
  explicit DeviceCode(const char* op) : op_(op) {}

  // Loads the op's part for a device, so that no later launch (inside a stream capture, say) has to.
  void prepare(int ordinal) {
    std::lock_guard<std::mutex> guard(mutex_);
    device(ordinal);
  }

  // Args: block and grid in threads and blocks, shared memory in bytes, `args` the addresses of the kernel's parameters.
  void launch(int ordinal, const char* kernel, unsigned grid, unsigned block, unsigned shared_bytes, void* stream,
              void** args) {
    const Driver& d = Driver::get();
    Driver::Handle context, function;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      Device& dev = device(ordinal);
      context = dev.context;
      function = lookup(dev, kernel, shared_bytes);
    }
    CurrentContext current(context);
    const int code = d.LaunchKernel(function, grid, 1, 1, block, 1, 1, shared_bytes, stream, args, nullptr);
    if (code != 0) d.check(code, (std::string("cuLaunchKernel of ") + kernel).c_str());
  }

 private:
  struct Device {
    Driver::Handle context = nullptr, module = nullptr;
    std::map<std::string, std::pair<Driver::Handle, unsigned>> kernels;  // name: function, granted shared bytes
  };

  Device& device(int ordinal) {
    auto found = devices_.find(ordinal);
    if (found != devices_.end()) return found->second;
    const Driver& d = Driver::get();
    int handle = 0, major = 0, minor = 0, integrated = 0;
    d.check(d.DeviceGet(&handle, ordinal), "cuDeviceGet");
    d.check(d.DeviceGetAttribute(&major, 75, handle), "cuDeviceGetAttribute");       // COMPUTE_CAPABILITY_MAJOR
    d.check(d.DeviceGetAttribute(&minor, 76, handle), "cuDeviceGetAttribute");       // COMPUTE_CAPABILITY_MINOR
    d.check(d.DeviceGetAttribute(&integrated, 18, handle), "cuDeviceGetAttribute");  // INTEGRATED: Tegra
    Device dev;
    d.check(d.DevicePrimaryCtxRetain(&dev.context, handle), "cuDevicePrimaryCtxRetain");
    static const auto image = tvm::ffi::Function::GetGlobalRequired("deepspeed_ops.device_image");
    static const auto refuse = tvm::ffi::Function::GetGlobalRequired("deepspeed_ops.refuse_image");
    CurrentContext current(dev.context);
    for (;;) {  // ends: a refused image is not handed out again, and where none is left device_image raises
      const auto bytes = image(op_, ordinal, major, minor, d.version, integrated != 0).template cast<tvm::ffi::Bytes>();
      const int code = d.ModuleLoadData(&dev.module, bytes.data());
      if (code == 0) break;
      const char* name = nullptr;
      d.GetErrorName(code, &name);
      refuse(op_, ordinal, std::string("cuModuleLoadData: ") + (name ? name : "error ") + std::to_string(code));
    }
    return devices_.emplace(ordinal, std::move(dev)).first->second;
  }

  Driver::Handle lookup(Device& dev, const char* kernel, unsigned shared_bytes) {
    auto found = dev.kernels.find(kernel);
    const Driver& d = Driver::get();
    if (found == dev.kernels.end()) {
      CurrentContext current(dev.context);
      Driver::Handle function;
      d.check(d.ModuleGetFunction(&function, dev.module, kernel), (std::string("cuModuleGetFunction ") + kernel).c_str());
      found = dev.kernels.emplace(kernel, std::make_pair(function, 48u * 1024u)).first;
    }
    if (shared_bytes > found->second.second) {
      // More than 48 KiB of dynamic shared memory is opt-in; attribute 8 is MAX_DYNAMIC_SHARED_SIZE_BYTES.
      CurrentContext current(dev.context);
      d.check(d.FuncSetAttribute(found->second.first, 8, static_cast<int>(shared_bytes)), "cuFuncSetAttribute");
      found->second.second = shared_bytes;
    }
    return found->second.first;
  }

  const char* op_;
  std::mutex mutex_;
  std::map<int, Device> devices_;
};

}  // namespace ds
