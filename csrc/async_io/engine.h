// The contract of a backend, written once, and the backend that every system has: plain positioned reads and writes.
//
// A backend moves bytes between memory and an open file. It gets whole transfers (`Op`), may finish each with fewer bytes
// than asked for, and never blocks but in `reap(..., wait = true)`. What a short count, EINTR, EAGAIN or an edge that is not
// aligned means is decided by its caller (lane.h), once for all backends. An engine belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "async_io/file.h"

namespace ds {
namespace aio {

enum class Backend : int64_t { automatic = 0, threads = 1, libaio = 2, io_uring = 3 };

inline const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::automatic: return "auto";
    case Backend::threads: return "threads";
    case Backend::libaio: return "libaio";
    case Backend::io_uring: return "io_uring";
  }
  return "unknown";
}

// One transfer. Its owner keeps it where it is until it comes back from `reap`.
struct Op {
  Descriptor fd = kNoDescriptor;
  bool write = false;
  char* data = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;   // in the file
  int64_t result = 0;   // bytes moved, or a negative errno
  uint32_t slot = 0;    // the engine's own
};

class Engine {
 public:
  virtual ~Engine() = default;
  // Most transfers in flight at once.
  virtual int depth() const = 0;
  // An errno where it can do nothing at all, now or later.
  virtual int broken() const { return 0; }
  // Takes transfers in order; returns how many, not always as many as it could hold (`batch_of`). A negative errno tells why
  // the first one was not taken: with -EAGAIN it is to be offered again after a `reap`, with any other it has failed.
  virtual int submit(Op* const* ops, int count) = 0;
  // Starts what was taken and not started yet; gives back finished transfers, at least one if `wait` and one is in flight.
  // A negative errno: the engine itself is broken.
  virtual int reap(Op** finished, int room, bool wait) = 0;
};

// How many of the transfers one system call is to carry: 512 KiB of them, and a quarter of the depth at most. The kernel
// merges what lies side by side within a call, so that a whole queue of blocks reaches the device as one or two requests,
// one after the other; and since these come back together, the queue is filled by the next call as a whole again.
constexpr int64_t kBatchBytes = 512 << 10;

inline int batch_of(Op* const* ops, int count, int depth) {
  const int most = depth / 4 < count ? depth / 4 : count;
  int64_t bytes = 0;
  int n = 0;
  while (n < most && (bytes += ops[n]->bytes) <= kBatchBytes) ++n;
  return n > 0 || count == 0 ? n : 1;
}

// Every transfer is done while it is submitted. Concurrency comes from threads, one engine each.
class SynchronousEngine : public Engine {
 public:
  int depth() const override { return 1; }

  int submit(Op* const* ops, int count) override {
    if (count == 0 || finished_ != nullptr) return count == 0 ? 0 : -EAGAIN;
    Op& op = **ops;
    op.result = transfer_once(op.fd, op.write, op.data, op.bytes, op.offset);
    finished_ = &op;
    return 1;
  }

  int reap(Op** finished, int room, bool) override {
    if (finished_ == nullptr || room == 0) return 0;
    *finished = finished_;
    finished_ = nullptr;
    return 1;
  }

 private:
  Op* finished_ = nullptr;
};

}  // namespace aio
}  // namespace ds
