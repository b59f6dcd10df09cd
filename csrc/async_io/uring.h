// Linux io_uring by its three system calls, without liburing (docs/why/0006-io-backends.md): what would be called there is
// mostly inline in its headers, its structures differ between its releases, and the kernel's ABI below does not.
//
// Asked of the kernel: one mapping for both rings (5.4), completions that are never dropped (5.5), plain reads and writes
// (5.6). Memory order: the tail that we publish is a release, the tail that the kernel publishes an acquire.
#pragma once

#if defined(__linux__)

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "async_io/engine.h"

namespace ds {
namespace aio {

namespace uring {

// include/uapi/linux/io_uring.h
struct SubmissionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_address;
};
struct CompletionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  uint64_t user_address;
};
struct Parameters {
  uint32_t sq_entries, cq_entries, flags, thread_cpu, thread_idle, features, wq_fd, reserved[3];
  SubmissionOffsets sq;
  CompletionOffsets cq;
};
static_assert(sizeof(Parameters) == 120, "the kernel's struct io_uring_params");
struct Submission {
  uint8_t opcode, flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset, address;
  uint32_t bytes, rw_flags;
  uint64_t data, more[3];
};
static_assert(sizeof(Submission) == 64, "the kernel's struct io_uring_sqe");
struct Completion {
  uint64_t data;
  int32_t result;
  uint32_t flags;
};

constexpr long kSetup = 425, kEnter = 426;  // the same on every architecture
constexpr uint8_t kRead = 22, kWrite = 23;
constexpr uint32_t kClamp = 1u << 4, kCooperative = 1u << 8;  // IORING_SETUP_CLAMP, _COOP_TASKRUN
constexpr uint32_t kNeeded = (1u << 0) | (1u << 1) | (1u << 3);  // SINGLE_MMAP, NODROP, RW_CUR_POS (5.6)
constexpr unsigned kGetEvents = 1;
constexpr off_t kRingOffset = 0, kEntriesOffset = 0x10000000;

}  // namespace uring

class UringEngine : public Engine {
 public:
  static std::unique_ptr<Engine> create(int depth, int* code) {
    std::unique_ptr<UringEngine> engine(new UringEngine());
    *code = engine->open(static_cast<uint32_t>(depth));
    return *code == 0 ? std::unique_ptr<Engine>(engine.release()) : nullptr;
  }

  ~UringEngine() override {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (ring_ != nullptr) munmap(ring_, ring_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  int depth() const override { return depth_; }

  // Starts the batch before this one; the last is started by `reap`, in the call that waits. What the kernel says against it
  // is told by `reap` too.
  int submit(Op* const* ops, int count) override {
    if (count > 0 && unstarted_ > 0 && enter(0) < 0) return -EAGAIN;
    const int room = depth_ - in_flight_ - static_cast<int>(unstarted_);
    if (room == 0) return count == 0 ? 0 : -EAGAIN;
    const int taken = batch_of(ops, count < room ? count : room, depth_);
    for (int i = 0; i < taken; ++i) {
      Op& op = *ops[i];
      uring::Submission& entry = entries_[tail_ & mask_];
      entry = uring::Submission{};
      entry.opcode = op.write ? uring::kWrite : uring::kRead;
      entry.fd = op.fd;
      entry.offset = static_cast<uint64_t>(op.offset);
      entry.address = reinterpret_cast<uint64_t>(op.data);
      entry.bytes = static_cast<uint32_t>(op.bytes);
      entry.data = reinterpret_cast<uint64_t>(&op);
      ++tail_;
    }
    unstarted_ += static_cast<uint32_t>(taken);
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
    return taken;
  }

  int reap(Op** finished, int room, bool wait) override {
    int got = unstarted_ == 0 ? collect(finished, room) : 0;
    if (got != 0 || (unstarted_ == 0 && (!wait || in_flight_ == 0))) return got;
    for (;;) {
      const bool block = wait && in_flight_ + static_cast<int>(unstarted_) > 0;
      const long rc = enter(block ? 1 : 0);
      if (rc < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return -errno;
      got = collect(finished, room);
      if (got != 0 || (!wait && (unstarted_ == 0 || rc < 0))) return got;
      if (in_flight_ + static_cast<int>(unstarted_) == 0) return 0;
      if (rc < 0 && errno != EINTR) usleep(50);  // the kernel is short of memory for requests
    }
  }

 private:
  UringEngine() = default;

  int open(uint32_t depth) {
    uring::Parameters p;
    for (const uint32_t flags : {uring::kClamp | uring::kCooperative, uring::kClamp}) {
      std::memset(&p, 0, sizeof(p));
      p.flags = flags;
      fd_ = static_cast<int>(syscall(uring::kSetup, depth, &p));
      if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0) return errno;
    if ((p.features & uring::kNeeded) != uring::kNeeded) return ENOSYS;
    const size_t sq = p.sq.array + p.sq_entries * sizeof(uint32_t);
    const size_t cq = p.cq.cqes + p.cq_entries * sizeof(uring::Completion);
    ring_bytes_ = sq > cq ? sq : cq;
    void* ring = mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, uring::kRingOffset);
    if (ring == MAP_FAILED) return errno;
    ring_ = static_cast<char*>(ring);
    entries_bytes_ = p.sq_entries * sizeof(uring::Submission);
    void* entries = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, uring::kEntriesOffset);
    if (entries == MAP_FAILED) return errno;
    entries_ = static_cast<uring::Submission*>(entries);
    // A child of fork has no business in the parent's ring.
    madvise(ring_, ring_bytes_, MADV_DONTFORK);
    madvise(entries_, entries_bytes_, MADV_DONTFORK);
    mask_ = word(p.sq.ring_mask);
    sq_tail_ = &word(p.sq.tail);
    cq_head_ = &word(p.cq.head);
    cq_tail_ = &word(p.cq.tail);
    cq_mask_ = word(p.cq.ring_mask);
    completions_ = reinterpret_cast<uring::Completion*>(ring_ + p.cq.cqes);
    tail_ = *sq_tail_;
    uint32_t* const array = &word(p.sq.array);
    for (uint32_t i = 0; i < p.sq_entries; ++i) array[i] = i;  // entry i always sits in place i
    depth_ = static_cast<int>(depth < p.sq_entries ? depth : p.sq_entries);
    return 0;
  }

  // Starts what is not started, and waits for `events` completions: how many were started, or -1 and errno.
  long enter(unsigned events) {
    const long rc = syscall(uring::kEnter, fd_, unstarted_, events, events > 0 ? uring::kGetEvents : 0, nullptr, 0);
    if (rc > 0) {
      unstarted_ -= static_cast<uint32_t>(rc);
      in_flight_ += static_cast<int>(rc);
    }
    return rc;
  }

  uint32_t& word(uint32_t offset) { return *reinterpret_cast<uint32_t*>(ring_ + offset); }

  int collect(Op** finished, int room) {
    uint32_t head = *cq_head_;
    const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    int got = 0;
    for (; head != tail && got < room; ++head, ++got) {
      const uring::Completion& done = completions_[head & cq_mask_];
      Op* op = reinterpret_cast<Op*>(done.data);
      op->result = done.result;
      finished[got] = op;
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    in_flight_ -= got;
    return got;
  }

  int fd_ = -1, depth_ = 0, in_flight_ = 0;
  uint32_t unstarted_ = 0, tail_ = 0, mask_ = 0, cq_mask_ = 0;
  char* ring_ = nullptr;
  size_t ring_bytes_ = 0, entries_bytes_ = 0;
  uring::Submission* entries_ = nullptr;
  uring::Completion* completions_ = nullptr;
  uint32_t *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
};

}  // namespace aio
}  // namespace ds

#endif  // __linux__
