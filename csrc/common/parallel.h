// Threads for memory-bound loops over chunks: those of the OpenMP runtime that is in the process already (torch's), else a
// small pool of our own.
//
// Why (docs/why/0002-cpu-threads.md): OpenMP's workers keep spinning for a while after each of torch's operations, so
// workers of another pool would fight them for the same cores (a fifth of the speed on two cores); but that runtime does not
// survive fork, and may not be there. It is looked up, never linked. Rules kept here:
//   * fixed chunks: what a chunk holds does not depend on the number of threads, so results do not either;
//   * workers sleep between jobs, are started at the first job that needs them, and never more than the caller asked for,
//     its affinity mask allows, or its cgroup's CPU quota pays for;
//   * after fork the child starts its own workers (the parent's do not exist there);
//   * nothing is joined when the library is unloaded or the process exits: workers are detached and the pool leaks;
//   * a second caller while the pool is busy does its work alone, so there is nothing to deadlock on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#elif !defined(_WIN32)
#include <unistd.h>
#endif

namespace ds {

// CPUs that this thread is allowed to use and its cgroup pays for; at least 1.
inline int usable_cpus();

// The OpenMP runtime of this process, by the entry points that gcc's and LLVM's runtimes share.
class OpenMP {
 public:
  using Region = void (*)(void*);

  // Runs region(context) on a team of up to `threads`; false where there is no runtime, or this process is a fork of the one
  // that found it (its workers do not exist here).
  static bool run(int threads, Region region, void* context) {
#if defined(__linux__)
    if (found().parallel_ == nullptr || found().process_ != getpid()) return false;
    found().parallel_(region, context, static_cast<unsigned>(threads), 0);
    return true;
#else
    (void)threads, (void)region, (void)context;
    return false;
#endif
  }

#if defined(__linux__)
  static int team_size() { return found().size_(); }
  static int team_rank() { return found().rank_(); }

 private:
  // Looked up once: over the few hundred libraries of a torch process that takes tens of microseconds a name.
  static const OpenMP& found() {
    static const OpenMP runtime;
    return runtime;
  }

  OpenMP() {
    size_ = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
    rank_ = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    if (size_ == nullptr || rank_ == nullptr) return;
    parallel_ = reinterpret_cast<void (*)(Region, void*, unsigned, unsigned)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  }

  void (*parallel_)(Region, void*, unsigned, unsigned) = nullptr;
  int (*size_)() = nullptr;
  int (*rank_)() = nullptr;
  const pid_t process_ = getpid();
#else
  static int team_size() { return 1; }
  static int team_rank() { return 0; }
#endif
};

class Pool {
 public:
  using Body = void (*)(void* context, int64_t begin, int64_t end);

  // Calls body(context, begin, end) so that [0, chunks) is covered once, on at most `threads` threads, this one included;
  // `grain` chunks are worth waking a thread for. Returns how many threads took part.
  static int run(int threads, int64_t chunks, int64_t grain, Body body, void* context) {
    if (threads > chunks / grain) threads = static_cast<int>(chunks / grain);
    if (threads > 1) {
      const int cpus = usable_cpus();
      if (threads > cpus) threads = cpus;
    }
    if (threads > kMaxThreads) threads = kMaxThreads;
    Team team = {body, context, chunks, {1}};
    if (threads > 1 && OpenMP::run(threads, Team::region, &team)) return team.size.load();
    Pool* pool = threads > 1 ? current() : nullptr;
    if (pool == nullptr || !pool->caller_.try_lock()) {
      if (chunks > 0) body(context, 0, chunks);
      return 1;
    }
    const int took_part = pool->dispatch(threads, chunks, body, context);
    pool->caller_.unlock();
    return took_part;
  }

 private:
  static constexpr int kMaxThreads = 256;

  struct Job {
    Body body = nullptr;
    void* context = nullptr;
    int64_t chunks = 0;
    int parts = 0;
  };

  // One job on an OpenMP team, whatever size the runtime grants.
  struct Team {
    Body body;
    void* context;
    int64_t chunks;
    std::atomic<int> size;

    static void region(void* address) {
      Team& team = *static_cast<Team*>(address);
      const int size = OpenMP::team_size(), rank = OpenMP::team_rank();
      if (rank == 0) team.size.store(size);
      run_part({team.body, team.context, team.chunks, size}, rank);
    }
  };

  static Pool* current() {
    static std::atomic<Pool*> shared{nullptr};
    Pool* pool = shared.load(std::memory_order_acquire);
    if (pool != nullptr && pool->process_ == process_id()) return pool;
    // First use in this process. Two threads can race here: one pool wins, the loser's (no workers yet) is dropped.
    Pool* fresh = new Pool();
    if (shared.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
    delete fresh;
    return pool;
  }

  static int64_t process_id() {
#if defined(_WIN32)
    return 0;  // no fork
#else
    return static_cast<int64_t>(getpid());
#endif
  }

  int dispatch(int parts, int64_t chunks, Body body, void* context) {
    grow(parts - 1);
    parts = workers_ + 1 < parts ? workers_ + 1 : parts;
    follow_affinity();
    {
      std::lock_guard<std::mutex> guard(mutex_);
      job_ = {body, context, chunks, parts};
      pending_ = parts - 1;
      ++generation_;
    }
    wake_.notify_all();
    run_part(job_, 0);
    std::unique_lock<std::mutex> guard(mutex_);
    wait(done_, guard, [this] { return pending_ == 0; });
    return parts;
  }

  static void run_part(const Job& job, int part) {
    const int64_t begin = job.chunks * part / job.parts, end = job.chunks * (part + 1) / job.parts;
    if (begin < end) job.body(job.context, begin, end);
  }

  // condition_variable::wait without a limit is a symbol of libstdc++ 12: with one, gcc 11's library (RHEL 9) will do.
  template <class Predicate>
  static void wait(std::condition_variable& event, std::unique_lock<std::mutex>& guard, Predicate predicate) {
    while (!event.wait_for(guard, std::chrono::hours(24), predicate)) {
    }
  }

  void grow(int wanted) {
    while (workers_ < wanted) {
      const int part = workers_ + 1;
      try {
        std::thread worker(&Pool::serve, this, part, generation_);
#if defined(__linux__)
        handles_[workers_] = worker.native_handle();
#endif
        worker.detach();
      } catch (const std::exception&) {
        return;  // the system gives no more threads: go on with those we have
      }
      ++workers_;
    }
  }

  void serve(int part, uint64_t seen) {
    for (;;) {
      Job job;
      {
        std::unique_lock<std::mutex> guard(mutex_);
        wait(wake_, guard, [&] { return generation_ != seen; });
        seen = generation_;
        job = job_;
      }
      if (part >= job.parts) continue;
      run_part(job, part);
      std::lock_guard<std::mutex> guard(mutex_);
      if (--pending_ == 0) done_.notify_one();
    }
  }

  // Workers keep the mask they were born with; a caller that was pinned later takes them along.
  void follow_affinity() {
#if defined(__linux__)
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;
    if (placed_ == workers_ && CPU_EQUAL(&mask, &mask_)) return;
    for (int i = 0; i < workers_; ++i) pthread_setaffinity_np(handles_[i], sizeof(mask), &mask);
    mask_ = mask;
    placed_ = workers_;
#endif
  }

  const int64_t process_ = process_id();
  std::mutex caller_;  // held by the thread whose job the workers do
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job job_;
  uint64_t generation_ = 0;
  int pending_ = 0;
  int workers_ = 0;
#if defined(__linux__)
  pthread_t handles_[kMaxThreads] = {};
  cpu_set_t mask_ = {};
  int placed_ = 0;
#endif
};

// The cgroup's CPU quota in CPUs, rounded up, or 0 where there is none. Read once: quotas are set at start.
inline int cgroup_cpus() {
#if defined(__linux__)
  static const int cpus = [] {
    long long quota = -1, period = 0;
    if (std::FILE* v2 = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
      if (std::fscanf(v2, "%lld %lld", &quota, &period) != 2) quota = -1;  // "max 100000": no quota
      std::fclose(v2);
    } else {
      if (std::FILE* q = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re")) {
        if (std::fscanf(q, "%lld", &quota) != 1) quota = -1;
        std::fclose(q);
      }
      if (std::FILE* p = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "re")) {
        if (std::fscanf(p, "%lld", &period) != 1) period = 0;
        std::fclose(p);
      }
    }
    if (quota <= 0 || period <= 0) return 0;
    return static_cast<int>((quota + period - 1) / period);
  }();
  return cpus;
#else
  return 0;
#endif
}

inline int usable_cpus() {
  int cpus = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) cpus = CPU_COUNT(&mask);
#endif
  const int quota = cgroup_cpus();
  if (quota > 0 && quota < cpus) cpus = quota;
  return cpus > 0 ? cpus : 1;
}

}  // namespace ds
