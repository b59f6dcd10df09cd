// Which backend serves a handle, why not the others, and engines of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "async_io/engine.h"
#include "async_io/libaio.h"
#include "async_io/uring.h"

namespace ds {
namespace aio {

// Whether a backend works here, tried by making a small engine; `why` says what was found either way.
struct Availability {
  bool works = false;
  std::string why;
};

inline std::unique_ptr<Engine> create_engine(Backend backend, int depth, int* code) {
#if defined(__linux__)
  if (backend == Backend::io_uring) return UringEngine::create(depth, code);
  if (backend == Backend::libaio) return LibaioEngine::create(depth, code);
#endif
  (void)depth;
  *code = 0;
  return std::unique_ptr<Engine>(new SynchronousEngine());
}

inline Availability try_backend(Backend backend) {
  if (backend == Backend::threads) return {true, "positioned reads and writes work everywhere"};
#if defined(__linux__)
  // A success is remembered: taking a kernel AIO context away again waits 40 ms for the kernel's own housekeeping.
  static std::atomic<bool> worked[4] = {};
  std::atomic<bool>& known = worked[static_cast<int64_t>(backend)];
  int code = 0;
  if (backend == Backend::libaio && Libaio::get().found.empty()) return {false, Libaio::get().why};
  if (known.load() || create_engine(backend, 1, &code)) {
    known.store(true);
    return {true, backend == Backend::libaio ? Libaio::get().found + " opens, io_setup works" : "io_uring_setup works"};
  }
  std::string why = backend == Backend::libaio ? "io_setup" : "io_uring_setup";
  why += std::string(": ") + std::strerror(code);
  if (backend == Backend::io_uring && code == EPERM) why += " (kernel.io_uring_disabled, or a container's seccomp filter)";
  if (backend == Backend::io_uring && code == ENOSYS) why += " (a kernel of 5.6 or newer has what is needed)";
  if (backend == Backend::libaio && code == EAGAIN) why += " (fs.aio-max-nr is used up)";
  return {false, why};
#else
  return {false, std::string(name_of(backend)) + " is Linux only"};
#endif
}

// In the order of preference.
constexpr Backend kBackends[] = {Backend::io_uring, Backend::libaio, Backend::threads};

// A line a backend: `name: yes|no: what was found`.
inline std::string describe_backends() {
  std::string text;
  for (const Backend backend : kBackends) {
    const Availability found = try_backend(backend);
    text += std::string(name_of(backend)) + (found.works ? ": yes: " : ": no: ") + found.why + "\n";
  }
  return text;
}

// Stands in for an engine that was forced and cannot be made: every transfer fails with the reason.
class BrokenEngine : public Engine {
 public:
  explicit BrokenEngine(int code) : code_(code) {}
  int depth() const override { return 1; }
  int broken() const override { return code_; }
  int submit(Op* const*, int) override { return -code_; }
  int reap(Op**, int, bool) override { return 0; }

 private:
  const int code_;
};

class Chosen {
 public:
  Chosen(Backend asked, int64_t depth) : asked_(asked), depth_(static_cast<int>(std::min<int64_t>(depth, kMostDepth))) {
    if (asked != Backend::automatic) {
      backend_ = asked;
      const Availability found = try_backend(asked);
      works_ = found.works;
      note(asked, found.works ? "chosen: asked for; " + found.why : "asked for and does not work: " + found.why);
    } else {
      for (const Backend backend : kBackends) {
        const Availability found = try_backend(backend);
        if (!found.works) {
          note(backend, "not chosen: " + found.why);
        } else if (backend_ == Backend::automatic) {
          backend_ = backend;
          note(backend, "chosen: the first that works; " + found.why);
        } else {
          note(backend, "not chosen: it works too, the one above comes first; " + found.why);
        }
      }
    }
    if (depth_ == 1 && backend_ != Backend::threads && works_) {
      note(backend_, "queue depth 1: a transfer at a time, done by positioned reads and writes, which cost less");
    }
    if (depth_ < depth) note(backend_, "queue depth " + std::to_string(depth) + " is cut to " + std::to_string(depth_));
  }

  Backend backend() const { return backend_; }
  // False where a backend was asked for that does not work here.
  bool works() const { return works_; }

  std::string trace() {
    std::lock_guard<std::mutex> lock(mutex_);
    return trace_;
  }

  // A new engine: as deep as asked for, or as the kernel grants. With one transfer in flight at a time, there is nothing to
  // queue, and a positioned call has less to do than a queue of one.
  std::unique_ptr<Engine> make() {
    if (depth_ == 1 && works_) return std::unique_ptr<Engine>(new SynchronousEngine());
    std::lock_guard<std::mutex> lock(mutex_);
    int code = 0;
    for (int depth = depth_; depth >= 1; depth /= 2) {
      std::unique_ptr<Engine> engine = create_engine(backend_, depth, &code);
      if (!engine) continue;
      if (backend_ != Backend::threads && engine->depth() < depth_ && granted_ != engine->depth()) {
        granted_ = engine->depth();
        note(backend_, "queue depth " + std::to_string(granted_) + " in place of " + std::to_string(depth_) +
                           ": more than the kernel grants");
      }
      return engine;
    }
    if (!told_) note(backend_, std::string("gives no engine now: ") + std::strerror(code));
    told_ = true;
    if (asked_ != Backend::automatic) return std::unique_ptr<Engine>(new BrokenEngine(code));
    return std::unique_ptr<Engine>(new SynchronousEngine());
  }

 private:
  static constexpr int64_t kMostDepth = 32768;  // IORING_MAX_ENTRIES; fs.aio-max-nr is 65536 by default

  void note(Backend backend, const std::string& text) { trace_ += std::string(name_of(backend)) + ": " + text + "\n"; }

  const Backend asked_;
  const int depth_;
  Backend backend_ = Backend::automatic;
  bool works_ = true;
  std::mutex mutex_;
  std::string trace_;
  int granted_ = 0;
  bool told_ = false;
};

}  // namespace aio
}  // namespace ds
