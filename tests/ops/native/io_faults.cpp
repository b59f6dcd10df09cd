// A storage that misbehaves: preloaded, it makes pread, pwrite, kernel AIO and io_uring return short counts, EINTR, EAGAIN
// and EIO at random. It is preloaded under libaio's name, so that whoever opens libaio gets these functions.
//
//   io_faults_set(seed, short, interrupted, again, broken, full)   chances in 1,000 of each kind; all 0: an honest storage
//   io_faults_count(kind)                                          how often a kind happened, in the order above
//
// A short count of AIO and io_uring is made by asking the kernel for less, by whole sectors of 512 bytes.
#include <cerrno>
#include <cstdint>
#include <cstring>

#include <atomic>
#include <initializer_list>

#include <sys/syscall.h>

extern "C" int* __errno_location() noexcept;

namespace {

long raw(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  long result;
  asm volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
  return result;
#elif defined(__aarch64__)
  register long x8 asm("x8") = number;
  register long x0 asm("x0") = a;
  register long x1 asm("x1") = b;
  register long x2 asm("x2") = c;
  register long x3 asm("x3") = d;
  register long x4 asm("x4") = e;
  register long x5 asm("x5") = f;
  asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
#endif
}

long answer(long result) {
  if (result < 0 && result > -4096) {
    errno = static_cast<int>(-result);
    return -1;
  }
  return result;
}

enum Kind { kShort, kInterrupted, kAgain, kBroken, kFull, kKinds };
const int kCodes[] = {0, EINTR, EAGAIN, EIO, ENOSPC};
std::atomic<int> chance[kKinds];
std::atomic<long> counts[kKinds];
std::atomic<uint64_t> state{88172645463325252ull};

uint64_t draw() {  // splitmix64
  uint64_t z = state.fetch_add(0x9e3779b97f4a7c15ull) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

bool happens(Kind kind) {
  const int p = chance[kind].load(std::memory_order_relaxed);
  if (p == 0 || static_cast<int>(draw() % 1000) >= p) return false;
  counts[kind].fetch_add(1);
  return true;
}

// The errno of a failure that happens now, or 0.
int failure(bool write) {
  for (const Kind kind : {kInterrupted, kAgain, kBroken}) {
    if (happens(kind)) return kCodes[kind];
  }
  return write && happens(kFull) ? ENOSPC : 0;
}

uint64_t shortened(uint64_t bytes, uint64_t unit) {
  if (bytes <= unit || !happens(kShort)) return bytes;
  return unit * (1 + draw() % ((bytes - 1) / unit));
}

long transfer(long number, bool write, long fd, long data, unsigned long bytes, long offset) {
  if (const int code = failure(write)) return answer(-code);
  return answer(raw(number, fd, data, static_cast<long>(shortened(bytes, 1)), offset, 0, 0));
}

// ---- io_uring ----

struct Ring {
  std::atomic<int> fd{-1};
  char* ring = nullptr;
  char* entries = nullptr;
  uint32_t p[30];  // struct io_uring_params
};
constexpr int kRings = 64;
Ring rings[kRings];

Ring* ring_of(int fd) {
  for (Ring& ring : rings) {
    if (ring.fd.load() == fd) return &ring;
  }
  return nullptr;
}

void* map(void* at, unsigned long bytes, int protection, int flags, int fd, long offset) {
  const long result = answer(raw(SYS_mmap, reinterpret_cast<long>(at), static_cast<long>(bytes), protection, flags, fd, offset));
  Ring* ring = fd >= 0 ? ring_of(fd) : nullptr;
  if (ring != nullptr && result != -1) (offset == 0 ? ring->ring : ring->entries) = reinterpret_cast<char*>(result);
  return reinterpret_cast<void*>(result);
}

uint32_t* word(Ring& ring, int place) { return reinterpret_cast<uint32_t*>(ring.ring + ring.p[place]); }

// Offsets in struct io_uring_params, in words: sq_off at 10 (head, tail, ring_mask), cq_off at 20 (the same, cqes at 25).
long enter(Ring& ring, long fd, long submit, long least, long flags) {
  if (happens(kInterrupted)) return answer(-EINTR);
  if (happens(kAgain)) return answer(-EAGAIN);
  const uint32_t mask = *word(ring, 12), head = __atomic_load_n(word(ring, 10), __ATOMIC_ACQUIRE), tail = *word(ring, 11);
  for (uint32_t i = head; i != tail; ++i) {
    uint32_t* bytes = reinterpret_cast<uint32_t*>(ring.entries + 64 * (i & mask) + 24);
    *bytes = static_cast<uint32_t>(shortened(*bytes, 512));
  }
  const uint32_t before = __atomic_load_n(word(ring, 21), __ATOMIC_ACQUIRE);
  const long result = raw(426, fd, submit, least, flags, 0, 0);
  const uint32_t after = __atomic_load_n(word(ring, 21), __ATOMIC_ACQUIRE), wide = *word(ring, 22);
  for (uint32_t i = before; i != after; ++i) {
    int32_t* done = reinterpret_cast<int32_t*>(ring.ring + ring.p[25] + 16 * (i & wide) + 8);
    if (const int code = failure(false)) *done = -code;
  }
  return answer(result);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void io_faults_set(uint64_t seed, int shorter, int interrupted, int again, int broken, int full) {
  state.store(seed * 0x2545f4914f6cdd1dull + 1);
  const int all[] = {shorter, interrupted, again, broken, full};
  for (int i = 0; i < kKinds; ++i) chance[i].store(all[i]);
}
EXPORT long io_faults_count(int kind) { return counts[kind].load(); }

EXPORT long pread(int fd, void* data, unsigned long n, long at) { return transfer(SYS_pread64, false, fd, reinterpret_cast<long>(data), n, at); }
EXPORT long pread64(int fd, void* data, unsigned long n, long at) { return pread(fd, data, n, at); }
EXPORT long pwrite(int fd, const void* data, unsigned long n, long at) { return transfer(SYS_pwrite64, true, fd, reinterpret_cast<long>(data), n, at); }
EXPORT long pwrite64(int fd, const void* data, unsigned long n, long at) { return pwrite(fd, data, n, at); }
EXPORT void* mmap(void* a, unsigned long n, int p, int f, int fd, long at) { return map(a, n, p, f, fd, at); }
EXPORT void* mmap64(void* a, unsigned long n, int p, int f, int fd, long at) { return map(a, n, p, f, fd, at); }

EXPORT long syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number == 425) {
    const long fd = raw(number, a, b, 0, 0, 0, 0);
    if (fd >= 0) {
      for (Ring& ring : rings) {
        int none = -1;
        if (ring.fd.compare_exchange_strong(none, -2)) {
          ring.ring = ring.entries = nullptr;
          std::memcpy(ring.p, reinterpret_cast<void*>(b), sizeof(ring.p));
          ring.fd.store(static_cast<int>(fd));
          break;
        }
      }
    }
    return answer(fd);
  }
  Ring* ring = number == 426 ? ring_of(static_cast<int>(a)) : nullptr;
  if (ring != nullptr && ring->ring != nullptr && ring->entries != nullptr) return enter(*ring, a, b, c, d);
  return answer(raw(number, a, b, c, d, e, f));
}

EXPORT int close(int fd) {
  if (Ring* ring = ring_of(fd)) ring->fd.store(-1);
  return static_cast<int>(answer(raw(SYS_close, fd, 0, 0, 0, 0, 0)));
}

// ---- libaio: a negative errno is the result ----

struct Event {
  uint64_t data, iocb;
  int64_t result, second;
};

EXPORT int io_setup(int depth, void** context) { return static_cast<int>(raw(SYS_io_setup, depth, reinterpret_cast<long>(context), 0, 0, 0, 0)); }
EXPORT int io_destroy(void* context) { return static_cast<int>(raw(SYS_io_destroy, reinterpret_cast<long>(context), 0, 0, 0, 0, 0)); }
EXPORT int io_submit(void* context, long count, char** blocks) {
  if (happens(kInterrupted)) return -EINTR;
  if (happens(kAgain)) return -EAGAIN;
  if (count > 1 && happens(kShort)) count = 1 + static_cast<long>(draw() % static_cast<uint64_t>(count));
  for (long i = 0; i < count; ++i) {
    uint64_t* bytes = reinterpret_cast<uint64_t*>(blocks[i] + 32);
    *bytes = shortened(*bytes, 512);
  }
  return static_cast<int>(raw(SYS_io_submit, reinterpret_cast<long>(context), count, reinterpret_cast<long>(blocks), 0, 0, 0));
}
EXPORT int io_getevents(void* context, long least, long most, Event* events, void* timeout) {
  if (happens(kInterrupted)) return -EINTR;
  const long got = raw(SYS_io_getevents, reinterpret_cast<long>(context), least, most, reinterpret_cast<long>(events), reinterpret_cast<long>(timeout), 0);
  for (long i = 0; i < got; ++i) {
    if (const int code = failure(false)) events[i].result = -code;
  }
  return static_cast<int>(got);
}
