// Calls an op's host library through TVM-FFI's C ABI, without Python and without TVM-FFI's C++ classes: the same program on
// Windows (and wine) and on Linux, so that what both print can be compared line by line.
#pragma once

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace proof {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "error: %s\n", what.c_str());
  std::exit(1);
}

class Library {
 public:
  explicit Library(const char* path) : path_(path) {
#if defined(_WIN32)
    handle_ = reinterpret_cast<void*>(LoadLibraryA(path));
    if (handle_ == nullptr) fail(path_ + " does not load, Windows error " + std::to_string(GetLastError()));
#else
    handle_ = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (handle_ == nullptr) fail(dlerror());
#endif
  }

  template <class Fn>
  Fn* find(const std::string& name) const {
#if defined(_WIN32)
    void* found = reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(handle_), name.c_str()));
#else
    void* found = dlsym(handle_, name.c_str());
#endif
    if (found == nullptr) fail(path_ + " has no " + name);
    return reinterpret_cast<Fn*>(found);
  }

 private:
  std::string path_;
  void* handle_ = nullptr;
};

inline TVMFFIAny integer(int64_t value) {
  TVMFFIAny any;
  std::memset(&any, 0, sizeof(any));
  any.type_index = kTVMFFIInt;
  any.v_int64 = value;
  return any;
}

inline TVMFFIAny text(const char* value) {
  TVMFFIAny any;
  std::memset(&any, 0, sizeof(any));
  any.type_index = kTVMFFIRawStr;
  any.v_c_str = value;
  return any;
}

inline std::string to_text(const TVMFFIAny& any) {
  if (any.type_index == kTVMFFISmallStr) return std::string(any.v_bytes, any.small_str_len);
  if (any.type_index != kTVMFFIStr) fail("a result is no text but of type " + std::to_string(any.type_index));
  const auto* bytes = reinterpret_cast<const TVMFFIByteArray*>(reinterpret_cast<const char*>(any.v_obj) + sizeof(TVMFFIObject));
  return std::string(bytes->data, bytes->size);
}

// An op's functions by name. The runtime is loaded first, as Python's import does: the op finds it by its bare name.
class Op {
 public:
  Op(const char* runtime, const char* op) : runtime_(runtime), op_(op) {}

  // Empty where the call went well, else "<kind>: <first line of the message>" of the error that it raised.
  std::string try_call(const std::string& name, const std::vector<TVMFFIAny>& args, TVMFFIAny* result) const {
    *result = integer(0);
    auto* call = op_.find<int(void*, const TVMFFIAny*, int32_t, TVMFFIAny*)>("__tvm_ffi_" + name);
    if (call(nullptr, args.data(), static_cast<int32_t>(args.size()), result) == 0) return "";
    void* raised = nullptr;
    runtime_.find<void(void**)>("TVMFFIErrorMoveFromRaised")(&raised);
    if (raised == nullptr) fail(name + " failed and raised nothing");
    const auto* cell = reinterpret_cast<const TVMFFIErrorCell*>(static_cast<const char*>(raised) + sizeof(TVMFFIObject));
    const std::string message(cell->message.data, cell->message.size);
    return std::string(cell->kind.data, cell->kind.size) + ": " + message.substr(0, message.find('\n'));
  }

  TVMFFIAny call(const std::string& name, const std::vector<TVMFFIAny>& args) const {
    TVMFFIAny result;
    const std::string error = try_call(name, args, &result);
    if (!error.empty()) fail(name + ": " + error);
    return result;
  }

  bool has(const std::string& name) const { return op_.find<void>("__tvm_ffi_" + name) != nullptr; }

 private:
  Library runtime_, op_;
};

// FNV-1a, 64 bits: which bytes a buffer holds, in 16 digits.
inline uint64_t digest(const void* data, size_t bytes, uint64_t seed = 0xcbf29ce484222325u) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) seed = (seed ^ p[i]) * 0x100000001b3u;
  return seed;
}

// The same numbers on every system: a linear congruential generator's high bits, in [-1, 1).
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) / 2147483648.0f;
  }

 private:
  uint64_t state_;
};

}  // namespace proof
