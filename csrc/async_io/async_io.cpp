// async_io: files to memory and back, asynchronously, with direct I/O where the file system has it.
//
// Requests: any number of bytes at any position, from or to any memory, a GPU's included. The parts: file.h (descriptors
// and alignment), cut.h (a request as transfers), engine.h and its kin (backends), lane.h (rules of one thread), queue.h
// (requests and threads), export.h (what Python calls).
// Errors: see export.h; ValueError for a negative size in deepspeed_memcpy.
#include <cstdint>
#include <cstring>

#include "async_io/export.h"
#include "common/parallel.h"

namespace ds {
namespace aio {
namespace {

int64_t open_queue(int64_t address) { return open_queue_with(address, CudaCopier::make, false); }

constexpr int64_t kCopyChunk = 1 << 20;  // 50 to 100 us of one core: enough to make waking another worth it

struct Copy {
  char* to;
  const char* from;
  int64_t bytes;
};

void copy_chunks(void* context, int64_t begin, int64_t end) {
  const Copy& copy = *static_cast<const Copy*>(context);
  const int64_t first = begin * kCopyChunk, last = std::min(end * kCopyChunk, copy.bytes);
  std::memcpy(copy.to + first, copy.from + first, static_cast<size_t>(last - first));
}

// Copies `bytes` bytes between runs of host memory that do not overlap.
void copy_memory(int64_t to, int64_t from, int64_t bytes, int64_t threads) {
  if (bytes < 0) TVM_FFI_THROW(ValueError) << "deepspeed_memcpy: " << bytes << " bytes";
  Copy copy = {reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes};
  Pool::run(static_cast<int>(threads), (bytes + kCopyChunk - 1) / kCopyChunk, 1, copy_chunks, &copy);
}

}  // namespace
}  // namespace aio
}  // namespace ds

TVM_FFI_DLL_EXPORT_TYPED_FUNC(open_queue, ds::aio::open_queue)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_memory, ds::aio::copy_memory)
DS_EXPORT_IO()
