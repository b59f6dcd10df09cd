// A request: bytes of one file from or to one run of memory. And what is in flight of it: blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "async_io/cut.h"
#include "async_io/engine.h"
#include "async_io/file.h"

namespace ds {
namespace aio {

// Guarded by the queue's mutex, but for what does not change once it is queued (everything above `next`).
struct Request {
  std::shared_ptr<File> file;
  bool write = false;
  bool sync = false;          // flush the file to its device afterwards
  char* data = nullptr;       // host or device memory, `bytes` long
  int64_t bytes = 0, offset = 0;
  int device = -1;            // ordinal of a GPU, or -1
  std::shared_ptr<void> after;  // a GPU event that comes before the first copy

  int64_t next = 0;           // position of the first byte that nobody has taken
  int64_t out = 0;            // blocks that lanes hold
  int64_t moved = 0;          // bytes done
  Failure failure;            // the first one
  bool done = false;

  int64_t end() const { return offset + bytes; }
  bool exhausted() const { return next >= end() || static_cast<bool>(failure); }
};

// One transfer of a request, in the hands of one lane.
struct Block {
  Op op;
  Request* request = nullptr;
  Cut cut;
  char* stage = nullptr;
  int64_t moved = 0;  // of [cut.from, cut.to)
  int refusals = 0;   // EAGAIN in a row
  Failure failure;
};

}  // namespace aio
}  // namespace ds
