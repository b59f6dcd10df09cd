// pin_memory: page-aligned host memory that stays in RAM.
//
// A run of memory is mapped, asked for in huge pages from 2 MiB on (direct I/O then pins a page table entry where it would
// pin 512), and locked. Python owns it (src/deepspeed_ops/pin_memory.py): it unlocks and unmaps each run once.
// Errors: none are thrown; functions answer with 0 or an errno.
#include <tvm/ffi/tvm_ffi.h>

#include <cerrno>
#include <cstdint>

#if defined(_WIN32)
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ds {
namespace {

constexpr int64_t kHuge = 2 << 20;

// Filled by Python and by us; every field 8 bytes.
struct Run {
  int64_t bytes;      // in: asked for; out: of the whole mapping
  int64_t mapping;    // out: its address
  int64_t address;    // out: where the memory begins
  int64_t page;       // out: bytes of a page
};

int64_t lock(int64_t address, int64_t bytes) {
#if defined(_WIN32)
  // What may be locked is limited by the working set's minimum: raise it by as much.
  SIZE_T least = 0, most = 0;
  const HANDLE self = GetCurrentProcess();
  const SIZE_T more = static_cast<SIZE_T>(bytes) + (1 << 20);
  if (GetProcessWorkingSetSize(self, &least, &most)) SetProcessWorkingSetSize(self, least + more, most + more);
  return VirtualLock(reinterpret_cast<void*>(address), static_cast<SIZE_T>(bytes)) ? 0 : ENOMEM;
#else
  return mlock(reinterpret_cast<void*>(address), static_cast<size_t>(bytes)) == 0 ? 0 : errno;
#endif
}

int64_t unlock(int64_t address, int64_t bytes) {
#if defined(_WIN32)
  return VirtualUnlock(reinterpret_cast<void*>(address), static_cast<SIZE_T>(bytes)) ? 0 : EINVAL;
#else
  return munlock(reinterpret_cast<void*>(address), static_cast<size_t>(bytes)) == 0 ? 0 : errno;
#endif
}

int64_t unmap(int64_t mapping, int64_t bytes) {
#if defined(_WIN32)
  (void)bytes;
  return VirtualFree(reinterpret_cast<void*>(mapping), 0, MEM_RELEASE) ? 0 : EINVAL;
#else
  return munmap(reinterpret_cast<void*>(mapping), static_cast<size_t>(bytes)) == 0 ? 0 : errno;
#endif
}

// Maps memory, not locked yet. Contents: zero.
int64_t map(int64_t run_address) {
  Run& run = *reinterpret_cast<Run*>(run_address);
#if defined(_WIN32)
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  run.page = static_cast<int64_t>(info.dwPageSize);
  void* memory = VirtualAlloc(nullptr, static_cast<SIZE_T>(run.bytes), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
  if (memory == nullptr) return ENOMEM;
  run.mapping = run.address = reinterpret_cast<int64_t>(memory);
#else
  run.page = sysconf(_SC_PAGESIZE);
  const bool huge = run.bytes >= kHuge;
  const int64_t asked = run.bytes;
  run.bytes = (asked + run.page - 1) / run.page * run.page + (huge ? kHuge : 0);
  void* memory = mmap(nullptr, static_cast<size_t>(run.bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return errno;
  run.mapping = run.address = reinterpret_cast<int64_t>(memory);
  if (huge) run.address = (run.mapping + kHuge - 1) / kHuge * kHuge;
#if defined(MADV_HUGEPAGE)
  if (huge) madvise(reinterpret_cast<void*>(run.address), static_cast<size_t>(asked), MADV_HUGEPAGE);
#endif
#endif
  return 0;
}

}  // namespace
}  // namespace ds

TVM_FFI_DLL_EXPORT_TYPED_FUNC(map, ds::map)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unmap, ds::unmap)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lock, ds::lock)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unlock, ds::unlock)
