// fork and direct I/O do not mix: while the kernel reads or writes a page by address, the parent's next store to it gets a
// copy, and the data lands in the child's (open(2), NOTES). So a fork waits until no block is in flight, and blocks wait
// until it is over. In the child nothing of the parent's queues is touched: its threads are not there. See Handle.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <set>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace ds {
namespace aio {

class Forkable {
 public:
  virtual void hold() = 0;    // returns when nothing is in flight, and nothing will be
  virtual void resume() = 0;

 protected:
  ~Forkable() = default;
};

class ForkGuard {
 public:
  static ForkGuard& get() {
    static ForkGuard& guard = *new ForkGuard();
    return guard;
  }

  // Guards what other parts keep by number. Held during a fork, so that a child finds it free and its contents whole.
  // Taken before the lock of `add` and `remove`, never after.
  std::mutex& registry() { return registry_; }

  // Rises in every child.
  int64_t generation() const { return generation_.load(std::memory_order_relaxed); }

  void add(Forkable* queue) {
    std::lock_guard<std::mutex> lock(*mutex_);
    queues_->insert(queue);
  }
  void remove(Forkable* queue) {
    std::lock_guard<std::mutex> lock(*mutex_);
    queues_->erase(queue);
  }

 private:
  ForkGuard() : mutex_(new std::mutex()), queues_(new std::set<Forkable*>()) {
#if !defined(_WIN32)
    pthread_atfork([] { get().before(); }, [] { get().in_parent(); }, [] { get().in_child(); });
#endif
  }

  void before() {
    registry_.lock();
    mutex_->lock();
    for (Forkable* queue : *queues_) queue->hold();
  }
  void in_parent() {
    for (Forkable* queue : *queues_) queue->resume();
    mutex_->unlock();
    registry_.unlock();
  }
  void in_child() {
    // The parent's mutex and set stay behind: threads that would unlock the one do not exist here.
    mutex_ = new std::mutex();
    queues_ = new std::set<Forkable*>();
    generation_.fetch_add(1, std::memory_order_relaxed);
    registry_.unlock();
  }

  std::mutex registry_;
  std::mutex* mutex_;
  std::set<Forkable*>* queues_;
  std::atomic<int64_t> generation_{0};
};

}  // namespace aio
}  // namespace ds
