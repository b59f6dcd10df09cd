// Host side of an op whose kernels take their parameters as plain structures: one function that launches, for every op the
// same. What to launch is put together in Python (src/deepspeed_ops/launch.py), where the tensors and the scalars are.
// Errors: DriverError for what the driver refuses.
#pragma once

#include <cstdint>

#include <tvm/ffi/tvm_ffi.h>

#include "common/driver.h"
#include "common/tensor_list.h"

namespace ds {

// One launch; every field 8 bytes, addresses as integers.
struct LaunchArgs {
  int64_t ordinal, stream;
  int64_t kernel;        // name of the entry point, ends with a NUL
  int64_t grid, block;   // blocks, threads of a block
  int64_t shared_bytes;
  int64_t count;         // parameters
  int64_t parameters;    // void* [count]: where each parameter lies
};

inline void launch_at(DeviceCode& code, int64_t address) {
  const LaunchArgs& a = *reinterpret_cast<const LaunchArgs*>(address);
  if (a.grid == 0) return;
  code.launch(static_cast<int>(a.ordinal), reinterpret_cast<const char*>(a.kernel), static_cast<unsigned>(a.grid),
              static_cast<unsigned>(a.block), static_cast<unsigned>(a.shared_bytes), reinterpret_cast<void*>(a.stream),
              reinterpret_cast<void**>(a.parameters));
}

}  // namespace ds

// The functions of an op's host library: `launch` (arg: address of LaunchArgs), `prepare_device` (loads the op's GPU part,
// so that no launch inside a stream capture has to) and `collect_addresses`.
#define DS_EXPORT_LAUNCHER(op)                                                   \
  namespace ds {                                                                 \
  namespace {                                                                    \
  DeviceCode& code() {                                                           \
    static DeviceCode& kernels = *new DeviceCode(op);                            \
    return kernels;                                                              \
  }                                                                              \
  void launch(int64_t address) { launch_at(code(), address); }                   \
  void prepare_device(int64_t ordinal) { code().prepare(static_cast<int>(ordinal)); } \
  }                                                                              \
  }                                                                              \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch, ds::launch)                              \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_device, ds::prepare_device)              \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(collect_addresses, ds::collect_addresses)
