// Buffers between user memory and the file: page-aligned host memory, and pinned memory beside a GPU.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "async_io/file.h"

namespace ds {
namespace aio {

// Copies between host and one GPU, for one thread. Failures are an errno and a text.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  virtual char* allocate(int64_t bytes) = 0;  // pinned; null where the driver gives none
  virtual void release(char* memory) = 0;
  // Both return when the copy is done, and start after the event `after` (null: at once). False: see `problem()`.
  virtual bool to_host(char* host, const char* device, int64_t bytes, void* after) = 0;
  virtual bool to_device(char* device, const char* host, int64_t bytes, void* after) = 0;
  // Between file and GPU without host memory: bytes moved, a negative errno, or kNotDirect where this cannot be done.
  static constexpr int64_t kNotDirect = INT64_MIN;
  virtual int64_t direct(File&, bool /*write*/, char* /*device*/, int64_t /*bytes*/, int64_t /*offset*/, void* /*after*/) {
    return kNotDirect;
  }
  const std::string& problem() const { return problem_; }

 protected:
  std::string problem_;
};

// Equal buffers, allocated when first needed and kept; one thread's own.
class Staging {
 public:
  Staging(int64_t bytes, int64_t count, DeviceCopier* copier) : bytes_(bytes), left_(count), copier_(copier) {}
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() {
    for (char* memory : all_) release(memory);
  }

  bool available() const { return !free_.empty() || left_ > 0; }
  int64_t bytes() const { return bytes_; }

  // Null where no memory is to be had.
  char* take() {
    if (free_.empty()) {
      char* memory = allocate();
      if (memory == nullptr) return nullptr;
      --left_;
      all_.push_back(memory);
      return memory;
    }
    char* memory = free_.back();
    free_.pop_back();
    return memory;
  }
  void give(char* memory) { free_.push_back(memory); }

 private:
  char* allocate() {
    if (copier_ != nullptr) return copier_->allocate(bytes_);
#if defined(_WIN32)
    return static_cast<char*>(VirtualAlloc(nullptr, static_cast<size_t>(bytes_), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
#else
    void* memory = nullptr;
    if (posix_memalign(&memory, static_cast<size_t>(page_bytes()), static_cast<size_t>(bytes_)) != 0) return nullptr;
    return static_cast<char*>(memory);
#endif
  }

  void release(char* memory) {
    if (copier_ != nullptr) {
      copier_->release(memory);
      return;
    }
#if defined(_WIN32)
    VirtualFree(memory, 0, MEM_RELEASE);
#else
    std::free(memory);
#endif
  }

  const int64_t bytes_;
  int64_t left_;
  DeviceCopier* const copier_;
  std::vector<char*> free_, all_;
};

}  // namespace aio
}  // namespace ds
