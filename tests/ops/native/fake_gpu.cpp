// Stands in for libcuda.so.1 and libcufile.so.0: a GPU whose memory is memory of the host, which only the copies of this
// file may touch. "Device" addresses are those of the host plus kFar, so that a copy that goes another way crashes.
//
//   fake_gpu_count(kind)  0: copies to the host, 1: copies to the device, 2: cuFileRead, 3: cuFileWrite, 4: pinned runs alive,
//                         5: streams alive, 6: events alive, 7: registered buffers, 8: registered files
//   fake_gpu_fail(n)      the n-th copy from now on fails (0: none)
//   fake_cufile(code)     what cuFileDriverOpen answers
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

namespace {
constexpr uint64_t kFar = 1ull << 60;
std::atomic<long> counts[9];
std::atomic<long> fail_in{0};
std::atomic<int> cufile_code{0};
void* const kContext = reinterpret_cast<void*>(0x1000);
thread_local void* current = nullptr;

bool fails() { return fail_in.load() > 0 && fail_in.fetch_sub(1) == 1; }
int in_context() { return current == kContext ? 0 : 201; }  // CUDA_ERROR_INVALID_CONTEXT

void* host(uint64_t device) { return reinterpret_cast<void*>(device - kFar); }
}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT long fake_gpu_count(int kind) { return counts[kind].load(); }
EXPORT void fake_gpu_fail(long n) { fail_in.store(n); }
EXPORT void fake_cufile(int code) { cufile_code.store(code); }

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
EXPORT int cuGetErrorName(int code, const char** name) { return *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR", 0; }
EXPORT int cuGetErrorString(int, const char** text) { return *text = "it was asked to", 0; }
EXPORT int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? 0 : 101; }
EXPORT int cuDeviceGetAttribute(int* value, int, int) { return *value = 9, 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) { return *context = kContext, 0; }
EXPORT int cuCtxGetCurrent(void** context) { return *context = current, 0; }
EXPORT int cuCtxPushCurrent_v2(void* context) { return current = context, 0; }
EXPORT int cuCtxPopCurrent_v2(void** context) { return *context = current, current = nullptr, 0; }
EXPORT int cuModuleLoadData(void**, const void*) { return 0; }
EXPORT int cuModuleGetFunction(void**, void*, const char*) { return 0; }
EXPORT int cuFuncSetAttribute(void*, int, int) { return 0; }
EXPORT int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) { return 0; }

EXPORT int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  counts[4]++;
  return posix_memalign(memory, 4096, bytes) == 0 ? in_context() : 2;
}
EXPORT int cuMemFreeHost(void* memory) { return counts[4]--, std::free(memory), in_context(); }
EXPORT int cuStreamCreate(void** stream, unsigned) { return counts[5]++, *stream = std::malloc(1), in_context(); }
EXPORT int cuStreamDestroy_v2(void* stream) { return counts[5]--, std::free(stream), in_context(); }
EXPORT int cuStreamSynchronize(void*) { return in_context(); }
EXPORT int cuStreamWaitEvent(void*, void* event, unsigned) { return event != nullptr ? in_context() : 1; }
EXPORT int cuEventCreate(void** event, unsigned) { return counts[6]++, *event = std::malloc(1), in_context(); }
EXPORT int cuEventRecord(void*, void*) { return in_context(); }
EXPORT int cuEventDestroy_v2(void* event) { return counts[6]--, std::free(event), in_context(); }
EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  if (fails()) return 700;
  counts[0]++;
  return std::memcpy(to, host(from), bytes), in_context();
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  if (fails()) return 700;
  counts[1]++;
  return std::memcpy(host(to), from, bytes), in_context();
}

struct Error {
  int code, cu_error;
};
struct Descriptor {
  int type;
  union {
    int fd;
    void* handle;
  } file;
  const void* operations;
};

EXPORT Error cuFileDriverOpen() { return {cufile_code.load(), 0}; }
EXPORT Error cuFileHandleRegister(void** handle, Descriptor* d) {
  if (d->type != 1) return {5022, 0};
  counts[8]++;
  *handle = new int(d->file.fd);
  return {0, 0};
}
EXPORT void cuFileHandleDeregister(void* handle) { counts[8]--, delete static_cast<int*>(handle); }
EXPORT Error cuFileBufRegister(const void*, size_t, int) { return counts[7]++, Error{0, 0}; }
EXPORT Error cuFileBufDeregister(const void*) { return counts[7]--, Error{0, 0}; }

// The real one takes any position and size; its way is direct where it can be. Here a bounce of its own does it.
static int64_t moves(void* handle, char* device, size_t bytes, int64_t offset, bool write) {
  const int fd = *static_cast<int*>(handle);
  char* memory = static_cast<char*>(host(reinterpret_cast<uint64_t>(device)));
  const int64_t down = offset & ~4095ll, up = (offset + static_cast<int64_t>(bytes) + 4095) & ~4095ll;
  void* room = nullptr;
  if (posix_memalign(&room, 4096, static_cast<size_t>(up - down)) != 0) return -5001;
  std::memset(room, 0, static_cast<size_t>(up - down));
  int64_t moved = -1;
  if (write) {
    if (down != offset || up != offset + static_cast<int64_t>(bytes)) {
      errno = EINVAL;
    } else {
      std::memcpy(room, memory, bytes);
      moved = pwrite(fd, room, bytes, offset);
    }
  } else {
    moved = pread(fd, room, static_cast<size_t>(up - down), down) - (offset - down);
    if (moved > static_cast<int64_t>(bytes)) moved = static_cast<int64_t>(bytes);
    if (moved > 0) std::memcpy(memory, static_cast<char*>(room) + (offset - down), static_cast<size_t>(moved));
  }
  std::free(room);
  return moved;
}
EXPORT int64_t cuFileRead(void* handle, void* device, size_t bytes, int64_t offset, int64_t) {
  if (in_context() != 0) return -5000;
  return counts[2]++, moves(handle, static_cast<char*>(device), bytes, offset, false);
}
EXPORT int64_t cuFileWrite(void* handle, const void* device, size_t bytes, int64_t offset, int64_t) {
  if (in_context() != 0) return -5000;
  return counts[3]++, moves(handle, static_cast<char*>(const_cast<void*>(device)), bytes, offset, true);
}
