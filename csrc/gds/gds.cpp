// gds: async_io whose GPU memory goes through cuFile (cufile.h). Everything else is async_io's.
// Errors: see async_io/export.h.
#include <cstdint>

#include "async_io/export.h"
#include "gds/cufile.h"

namespace ds {
namespace aio {
namespace {

int64_t open_queue(int64_t address) { return open_queue_with(address, CuFileCopier::make, CuFile::get().works); }

// `yes: ` or `no: ` and what was found.
tvm::ffi::String cufile_state() { return (CuFile::get().works ? "yes: " : "no: ") + CuFile::get().why; }

// Registers GPU memory with cuFile, so that it need not do so in every transfer: 0, or cuFile's error. 0 too where cuFile
// does not work: there is nothing to register with.
int64_t register_memory(int64_t address, int64_t bytes) {
  const CuFile& c = CuFile::get();
  return c.works ? c.BufRegister(reinterpret_cast<const void*>(address), static_cast<size_t>(bytes), 0).code : 0;
}
int64_t deregister_memory(int64_t address) {
  const CuFile& c = CuFile::get();
  return c.works ? c.BufDeregister(reinterpret_cast<const void*>(address)).code : 0;
}

}  // namespace
}  // namespace aio
}  // namespace ds

TVM_FFI_DLL_EXPORT_TYPED_FUNC(open_queue, ds::aio::open_queue)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cufile_state, ds::aio::cufile_state)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_memory, ds::aio::register_memory)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(deregister_memory, ds::aio::deregister_memory)
DS_EXPORT_IO()
