// long: one class, whose lock is the subject
// Requests in order, and the threads that work on them.
//
// A lane (lane.h) belongs to one thread. Workers, started when there is work for them, take blocks of the oldest request
// that has some left. A synchronous request is worked on by its caller as well, with a lane taken from the spare ones: a
// request of one lane never changes threads. All state that threads share is guarded by one mutex, which is never held
// during I/O or copies.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

#include "async_io/backends.h"
#include "async_io/fork.h"
#include "async_io/lane.h"

namespace ds {
namespace aio {

class Queue : private Forkable {
 public:
  struct Options {
    int64_t block = 1 << 20;
    int64_t depth = 128;
    int64_t lanes = 1;
    bool single_submit = false;
    Backend backend = Backend::automatic;
    Lane::MakeCopier make_copier = nullptr;
    bool device_direct = false;  // the copier may move data between file and GPU itself, one block at a time
  };

  // What became of a request.
  struct Outcome {
    bool known = false;
    int64_t moved = 0;
    Failure failure;
  };

  explicit Queue(const Options& options) : options_(options), chosen_(options.backend, options.depth) {
    // Where blocks are done one after the other in a thread, threads make the depth.
    threads_ = std::max(options.lanes, std::min<int64_t>(options.depth, kMostThreads));
    ForkGuard::get().add(this);
  }

  // Finishes what was asked for.
  ~Queue() {
    ForkGuard::get().remove(this);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      stopping_ = true;
      work_.notify_all();
      wait(done_, lock, [this] { return unfinished_ == 0; });
    }
    for (std::thread& worker : workers_) worker.join();
  }

  Backend backend() const { return chosen_.backend(); }
  std::string trace() { return chosen_.trace(); }

  // Starts a request and returns its number, for `finish`.
  int64_t start(std::shared_ptr<Request> request) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t id = ++last_id_;
    known_[id] = request;
    enqueue(request, lanes_for(*request), false, lock);
    return id;
  }

  // Whether a request is finished; false too for a number that is not known.
  bool finished(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = known_.find(id);
    return found != known_.end() && found->second->done;
  }

  // Waits for a request and forgets it.
  Outcome finish(int64_t id) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = known_.find(id);
    if (found == known_.end()) return Outcome();
    const std::shared_ptr<Request> request = found->second;
    wait(done_, lock, [&] { return request->done; });
    known_.erase(id);
    return {true, request->moved, request->failure};
  }

  // Does a request in this thread, with the help of workers where more than one lane is allowed.
  Outcome run(const std::shared_ptr<Request>& request) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t lanes = lanes_for(*request);
    if (lanes > 1 && request->bytes > options_.block) {
      enqueue(request, lanes - 1, true, lock);
    } else {
      ++unfinished_;
      if (request->exhausted()) settle(request.get(), lock);
    }
    std::unique_ptr<Lane> lane;
    if (!spare_.empty()) {
      lane = std::move(spare_.back());
      spare_.pop_back();
    }
    lock.unlock();
    if (!lane) lane.reset(new Lane(lane_options()));
    drive(*lane, request.get());
    lock.lock();
    wait(done_, lock, [&] { return request->done; });
    spare_.push_back(std::move(lane));
    return {true, request->moved, request->failure};
  }

 private:
  static constexpr int64_t kMostThreads = 16;

  // condition_variable::wait without a limit is a symbol of libstdc++ 12: with one, gcc 11's library (RHEL 9) will do.
  template <class Predicate>
  static void wait(std::condition_variable& event, std::unique_lock<std::mutex>& lock, Predicate predicate) {
    while (!event.wait_for(lock, std::chrono::hours(24), predicate)) {
    }
  }

  Lane::Options lane_options() {
    Lane::Options o;
    o.block = options_.block;
    // A staging buffer holds any alignment unit; more than a block is never used of it.
    o.stage = std::min<int64_t>(std::max<int64_t>(options_.block, kMostAlignment), 1 << 20);
    o.stage -= o.stage % kMostAlignment;
    o.stages = std::min<int64_t>(std::max<int64_t>(options_.depth, 2), 32);
    o.single_submit = options_.single_submit;
    o.make_engine = [](void* chosen) { return static_cast<Chosen*>(chosen)->make(); };
    o.context = &chosen_;
    o.make_copier = options_.make_copier;
    return o;
  }

  bool one_by_one(const Request& request) const {
    return chosen_.backend() == Backend::threads || !request.file->direct() || (request.device >= 0 && options_.device_direct);
  }

  int64_t lanes_for(const Request& request) const { return one_by_one(request) ? threads_ : options_.lanes; }

  // `attended`: the caller works on it too.
  void enqueue(const std::shared_ptr<Request>& request, int64_t lanes, bool attended, std::unique_lock<std::mutex>& lock) {
    ++unfinished_;
    if (request->exhausted()) return settle(request.get(), lock);  // nothing to move
    queue_.push_back(request);
    const int64_t blocks = (request->bytes + options_.block - 1) / options_.block;
    const int64_t wanted = std::min(lanes, blocks);
    for (int64_t i = idle_; i < wanted && static_cast<int64_t>(workers_.size()) < lanes; ++i) {
      try {
        workers_.emplace_back([this] {
          Lane lane(lane_options());
          drive(lane, nullptr);
        });
      } catch (const std::system_error&) {
        break;  // the system gives no more threads
      }
    }
    if (workers_.empty() && !attended) {  // not even one: nobody would ever do it
      request->failure.code = EAGAIN;
      request->failure.call = "starting a thread";
      queue_.pop_back();
      return settle(request.get(), lock);
    }
    work_.notify_all();
  }

  // One thread's work: blocks of `own` until all of them are taken and ours are done, or of every request until the end.
  void drive(Lane& lane, Request* own) {
    std::vector<Block*> taken, finished;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      taken.clear();
      finished.clear();
      claim(lane, own, &taken);
      active_ += static_cast<int64_t>(taken.size());
      if (taken.empty() && lane.busy() == 0) {
        if (own != nullptr ? own->exhausted() : stopping_ && queue_.empty()) return;
        ++idle_;
        work_.wait_for(lock, std::chrono::hours(24));
        --idle_;
        continue;
      }
      const bool alone = own != nullptr && own->exhausted() && lane.busy() == 1 && taken.size() == 1 && chosen_.works();
      lock.unlock();
      if (alone) {
        lane.finish_alone(taken[0], &finished);
      } else {
        lane.start(taken, &finished);
        if (finished.empty()) lane.collect(&finished);
      }
      lock.lock();
      retire(lane, finished, lock);
    }
  }

  // Takes blocks for a lane, in order, as many as it has room for, and leaves other lanes their share.
  void claim(Lane& lane, Request* own, std::vector<Block*>* taken) {
    if (held_) return;
    if (own != nullptr) {
      claim_from(lane, *own, taken);
      return;
    }
    while (!queue_.empty()) {
      if (queue_.front()->exhausted()) {
        queue_.pop_front();
      } else if (!claim_from(lane, *queue_.front(), taken)) {
        return;
      }
    }
  }

  // False where the lane can take no more now.
  bool claim_from(Lane& lane, Request& request, std::vector<Block*>* taken) {
    if (request.exhausted()) return true;
    const Layout layout = lane.layout(request);
    const int64_t lanes = lanes_for(request);
    int64_t quota = lanes == 1 ? INT64_MAX : std::max<int64_t>(1, (request.end() - request.next) / (layout.block * lanes));
    while (!request.exhausted()) {
      const Cut cut = next_cut(layout, request.next, request.end());
      if (lane.busy() > 0) {
        if (quota <= 0 || lane.busy() >= (cut.direct ? lane.depth() : 1)) return false;
        if (cut.staged && !lane.can_stage(request.device)) return false;
      }
      taken->push_back(lane.take(&request, cut));
      request.next = cut.end;
      ++request.out;
      --quota;
      if (!cut.direct) return false;  // done one by one: others can take the next
    }
    return true;
  }

  void retire(Lane& lane, const std::vector<Block*>& finished, std::unique_lock<std::mutex>& lock) {
    active_ -= static_cast<int64_t>(finished.size());
    if (held_ && active_ == 0) done_.notify_all();
    for (Block* block : finished) {
      Request* request = block->request;
      if (!block->failure) {
        request->moved += block->cut.end - block->cut.begin;
      } else if (!request->failure) {
        request->failure = block->failure;
      }
      lane.give(block);
      --request->out;
      if (request->exhausted() && request->out == 0) settle(request, lock);
    }
  }

  // The last block of a request is done. Flushes and closes its file without the lock: nobody else touches it any more.
  void settle(Request* request, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    int code = 0;
    if (request->sync && !request->failure) code = request->file->sync();
    request->file.reset();
    request->after.reset();
    lock.lock();
    if (code != 0) {
      request->failure.code = code;
      request->failure.call = "fsync";
    }
    request->done = true;
    --unfinished_;
    done_.notify_all();
  }

  void hold() override {
    std::unique_lock<std::mutex> lock(mutex_);
    held_ = true;
    wait(done_, lock, [this] { return active_ == 0; });
  }

  void resume() override {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = false;
    work_.notify_all();
  }

  const Options options_;
  Chosen chosen_;
  int64_t threads_ = 1;

  std::mutex mutex_;
  std::condition_variable work_;  // something to take
  std::condition_variable done_;  // a request is done, or nothing is in flight
  std::deque<std::shared_ptr<Request>> queue_;
  std::unordered_map<int64_t, std::shared_ptr<Request>> known_;
  std::vector<std::unique_ptr<Lane>> spare_;
  std::vector<std::thread> workers_;
  int64_t last_id_ = 0, unfinished_ = 0, active_ = 0, idle_ = 0;
  bool stopping_ = false, held_ = false;
};

}  // namespace aio
}  // namespace ds
