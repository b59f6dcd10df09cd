// call_fused_adam RUNTIME OP: what of fused_adam needs no GPU: a wrong argument is a typed error, and so, on a Windows
// without nvcuda.dll (wine), is the missing driver: nothing crashes, nothing was looked for when the library was loaded.
#include "ffi_call.h"

int main(int argc, char** argv) {
  if (argc != 3) proof::fail("call_fused_adam RUNTIME OP");
  const proof::Op op(argv[1], argv[2]);
  TVMFFIAny result;
  const std::string error = op.try_call("prepare_device", {proof::text("no number")}, &result);
  std::printf("prepare_device of a text: %s\n", error.substr(0, error.find(':')).c_str());
  if (error.empty()) proof::fail("a text was taken for a number");
#if defined(_WIN32)
  if (LoadLibraryExA("nvcuda.dll", nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32) == nullptr) {
    const std::string refused = op.try_call("prepare_device", {proof::integer(0)}, &result);
    if (refused.rfind("DriverError: the NVIDIA driver library", 0) != 0) proof::fail("no DriverError but: " + refused);
  }
#endif
}
