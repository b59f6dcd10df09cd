// call_fused_adam RUNTIME OP: what of fused_adam needs no GPU, and, under wine, that a machine without nvcuda.dll gets a
// typed error and not a crash.
#include "ffi_call.h"

int main(int argc, char** argv) {
  if (argc != 3) proof::fail("call_fused_adam RUNTIME OP");
  const proof::Op op(argv[1], argv[2]);
  for (int64_t format = 0; format < 4; ++format) {
    const TVMFFIAny elements = op.call("chunk_elements", {proof::integer(format)});
    std::printf("chunk_elements(%d) %lld\n", static_cast<int>(format), static_cast<long long>(elements.v_int64));
  }
#if defined(_WIN32)
  if (LoadLibraryExA("nvcuda.dll", nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32) == nullptr) {
    TVMFFIAny result;
    const std::string error = op.try_call("prepare_device", {proof::integer(0)}, &result);
    if (error.rfind("DriverError: the NVIDIA driver library", 0) != 0) proof::fail("no DriverError but: " + error);
  }
#endif
}
