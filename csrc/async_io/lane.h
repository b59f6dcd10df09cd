// What one thread does I/O with: an engine, staging buffers, and the rules that are the same for every backend:
//   * a short count goes on where it stopped; 0 bytes of a read mean that the file ends; 0 bytes of a write are an error;
//   * EINTR is tried again at once, EAGAIN with growing pauses for ten seconds;
//   * a direct transfer refused with EINVAL, and what a short count left unaligned, is done through the page cache, and the
//     file is not asked for direct I/O again in the former case;
//   * what is not direct is done at once, with pread and pwrite: no backend does it better, since kernel AIO blocks on it
//     and io_uring hands it to threads.
#pragma once

#include <cerrno>
#include <cstddef>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "async_io/engine.h"
#include "async_io/request.h"
#include "async_io/staging.h"

namespace ds {
namespace aio {

constexpr int kRefusals = 10000;  // of 1 ms at most, after the first hundred: ten seconds

inline void pause_after(int refusals) {
  if (refusals > 1) std::this_thread::sleep_for(std::chrono::microseconds(refusals < 100 ? 10 * refusals : 1000));
}

// Moves all of [offset, offset + bytes) by positioned calls: true, or false and what failed.
inline bool transfer_all(Descriptor fd, bool write, char* data, int64_t bytes, int64_t offset, Failure* failure) {
  int refusals = 0;
  for (int64_t moved = 0; moved < bytes;) {
    const int64_t n = transfer_once(fd, write, data + moved, bytes - moved, offset + moved);
    if (n > 0) {
      moved += n;
      refusals = 0;
    } else if (n == -EINTR || (n == -EAGAIN && ++refusals < kRefusals)) {
      pause_after(refusals);
    } else {
      failure->code = n < 0 ? -n : write ? EIO : kShortFile;
      failure->at = offset + moved;
      failure->call = write ? "pwrite" : "pread";
      return false;
    }
  }
  return true;
}

class Lane {
 public:
  using MakeEngine = std::unique_ptr<Engine> (*)(void* context);
  using MakeCopier = std::unique_ptr<DeviceCopier> (*)(int ordinal, std::string* why);

  struct Options {
    int64_t block = 1 << 20, stage = 1 << 20, stages = 32;
    bool single_submit = false;
    MakeEngine make_engine = nullptr;
    void* context = nullptr;
    MakeCopier make_copier = nullptr;
  };

  explicit Lane(const Options& options) : options_(options), host_(options.stage, options.stages, nullptr) {}

  int64_t busy() const { return busy_; }
  int64_t depth() { return engine().depth(); }

  Layout layout(const Request& request) const {
    Layout l;
    l.write = request.write;
    l.direct = request.file->direct();
    l.device = request.device >= 0;
    l.alignment = request.file->alignment();
    l.memory_alignment = request.file->memory_alignment();
    l.address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(request.data)) - request.offset;
    // No more than the kernel moves at once; whole alignment units where it matters.
    const int64_t a = l.direct ? l.alignment : 1;
    const int64_t block = options_.block < (1 << 30) ? options_.block : (1 << 30);
    l.block = block <= a ? a : block - block % a;
    l.stage = options_.stage <= a ? a : options_.stage - options_.stage % a;
    return l;
  }

  // Whether a block that needs a staging buffer can be taken now.
  bool can_stage(int device) { return device < 0 ? host_.available() : device_of(device).staging.available(); }

  Block* take(Request* request, const Cut& cut) {
    if (spare_.empty()) {
      all_.emplace_back(new Block());
      spare_.push_back(all_.back().get());
    }
    Block* block = spare_.back();
    spare_.pop_back();
    *block = Block{};
    block->request = request;
    block->cut = cut;
    ++busy_;
    return block;
  }

  void give(Block* block) {
    if (block->stage != nullptr) staging(*block).give(block->stage);
    spare_.push_back(block);
    --busy_;
  }

  // Begins blocks; what is finished at once goes to `finished`.
  void start(const std::vector<Block*>& blocks, std::vector<Block*>* finished) {
    for (Block* block : blocks) {
      if (!prepare(block) || !usable(block)) {
        finished->push_back(block);
      } else {
        waiting_.push_back(block);
        if (options_.single_submit) offer(finished);
      }
    }
    offer(finished);
  }

  // Does a block that has nothing in flight beside it, by positioned calls: they cost less than a queue of one.
  void finish_alone(Block* block, std::vector<Block*>* finished) {
    if (!prepare(block)) return finished->push_back(block);
    waiting_.push_back(block);
    while (!waiting_.empty()) {
      waiting_.pop_back();
      Op& op = block->op;
      op.result = transfer_once(op.fd, op.write, op.data, op.bytes, op.offset);
      advance(block, finished);
    }
  }

  // Gathers blocks that are done, at least one if any is in flight.
  void collect(std::vector<Block*>* finished) {
    while (finished->empty() && (in_flight_ > 0 || !waiting_.empty())) {
      events_.resize(static_cast<size_t>(engine().depth()));
      const int got = engine().reap(events_.data(), static_cast<int>(events_.size()), true);
      if (got < 0) return give_up(-got, finished);
      in_flight_ -= got;
      for (int i = 0; i < got; ++i) advance(block_of(events_[static_cast<size_t>(i)]), finished);
      offer(finished);
    }
  }

 private:
  struct Device {
    std::unique_ptr<DeviceCopier> copier;
    std::string why;
    Staging staging;
    Device(std::unique_ptr<DeviceCopier> c, std::string text, int64_t bytes, int64_t count)
        : copier(std::move(c)), why(std::move(text)), staging(bytes, count, copier.get()) {}
  };

  Engine& engine() {
    if (!engine_) engine_ = options_.make_engine(options_.context);
    return *engine_;
  }

  Device& device_of(int ordinal) {
    auto found = devices_.find(ordinal);
    if (found == devices_.end()) {
      std::string why = "this library knows no GPU";
      std::unique_ptr<DeviceCopier> copier;
      if (options_.make_copier != nullptr) copier = options_.make_copier(ordinal, &why);
      std::unique_ptr<Device> made(new Device(std::move(copier), why, options_.stage, options_.stages));
      found = devices_.emplace(ordinal, std::move(made)).first;
    }
    return *found->second;
  }

  Staging& staging(const Block& block) {
    return block.request->device < 0 ? host_ : device_of(block.request->device).staging;
  }

  static Block* block_of(Op* op) { return reinterpret_cast<Block*>(op); }

  static char* memory_of(const Block& b) { return b.request->data + (b.cut.begin - b.request->offset); }

  static bool fail(Block* b, int64_t code, int64_t at, std::string call) {
    b->failure.code = code;
    b->failure.at = at;
    b->failure.call = std::move(call);
    return false;
  }

  bool usable(Block* b) {
    const int code = engine().broken();
    return code == 0 || fail(b, code, b->cut.begin, "making a queue in the kernel");
  }

  // Gets memory, copies in, and does what is not direct. True where a transfer is left to do.
  bool prepare(Block* b) {
    Request& r = *b->request;
    char* data = memory_of(*b);
    if (r.device >= 0) {
      Device& device = device_of(r.device);
      if (!device.copier) return fail(b, EIO, b->cut.begin, device.why);
      // A write's edge goes another way: cuFile would read, change and write back the whole unit.
      const int64_t bytes = b->cut.end - b->cut.begin;
      const int64_t n = !b->cut.direct ? DeviceCopier::kNotDirect
                                       : device.copier->direct(*r.file, r.write, data, bytes, b->cut.begin, r.after.get());
      if (n != DeviceCopier::kNotDirect) {
        if (n >= 0 && n < bytes) return fail(b, r.write ? EIO : kShortFile, b->cut.begin + n, "cuFile");
        return n >= 0 ? false : fail(b, -n, b->cut.begin, device.copier->problem());
      }
    }
    if (b->cut.staged) {
      b->stage = staging(*b).take();
      if (b->stage == nullptr) return fail(b, ENOMEM, b->cut.begin, "a staging buffer");
      if (r.write && !copy_in(b, data)) return false;
      data = b->stage;
    }
    if (!b->cut.direct) {
      buffered(b, data);
      return false;
    }
    b->op.fd = r.file->direct_fd();
    b->op.write = r.write;
    b->op.data = data;
    b->op.offset = b->cut.from;
    b->op.bytes = b->cut.to - b->cut.from;
    return true;
  }

  bool copy_in(Block* b, const char* data) {
    const int64_t bytes = b->cut.end - b->cut.begin;
    if (b->request->device < 0) return std::memcpy(b->stage, data, static_cast<size_t>(bytes)), true;
    DeviceCopier& copier = *device_of(b->request->device).copier;
    return copier.to_host(b->stage, data, bytes, b->request->after.get()) || fail(b, EIO, b->cut.begin, copier.problem());
  }

  // The end of a block whose bytes are all there.
  void copy_out(Block* b) {
    if (b->request->write || !b->cut.staged) return;
    const char* from = b->stage + (b->cut.begin - b->cut.from);
    const int64_t bytes = b->cut.end - b->cut.begin;
    if (b->request->device < 0) {
      std::memcpy(memory_of(*b), from, static_cast<size_t>(bytes));
      return;
    }
    DeviceCopier& copier = *device_of(b->request->device).copier;
    if (!copier.to_device(memory_of(*b), from, bytes, b->request->after.get())) fail(b, EIO, b->cut.begin, copier.problem());
  }

  // What is left of a block, through the page cache. `data` is where the byte at cut.from lies.
  void buffered(Block* b, char* data) {
    const Request& r = *b->request;
    const int64_t at = b->cut.from + b->moved, stop = b->cut.end;
    if (!r.file->has_buffered() && at < stop) {
      fail(b, EINVAL, at, "direct I/O of bytes that are not aligned, on a descriptor that is direct only");
    } else if (at >= stop || transfer_all(r.file->buffered_fd(), r.write, data + b->moved, stop - at, at, &b->failure)) {
      copy_out(b);
    }
  }

  // Hands waiting blocks to the engine, batch by batch.
  void offer(std::vector<Block*>* finished) {
    ops_.clear();
    size_t next = 0;  // of the waiting blocks, whose transfers are `ops_`
    while (next < waiting_.size()) {
      while (ops_.size() < waiting_.size()) ops_.push_back(&waiting_[ops_.size()]->op);
      const size_t most = options_.single_submit ? 1 : waiting_.size() - next;
      const int taken = engine().submit(ops_.data() + next, static_cast<int>(most));
      if (taken > 0) {
        refusals_ = 0;
        in_flight_ += taken;
        next += static_cast<size_t>(taken);
        continue;
      }
      if (taken == -EAGAIN || taken == 0) {
        if (in_flight_ > 0) break;  // room comes with the next completion
        if (++refusals_ < kRefusals) {
          pause_after(refusals_);
          continue;
        }
      }
      Block* first = waiting_[next++];
      first->op.result = taken == 0 ? -EAGAIN : taken;
      first->refusals = kRefusals;
      refusals_ = 0;
      advance(first, finished);
    }
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(next));
  }

  // A transfer came back: the block is finished, or goes on.
  void advance(Block* b, std::vector<Block*>* finished) {
    Request& r = *b->request;
    const int64_t result = b->op.result;
    char* const base = b->op.data - b->moved;  // where the byte at cut.from lies
    if (result > 0) {
      b->refusals = 0;
      b->moved += result;
      if (b->cut.from + b->moved >= b->cut.end) {
        copy_out(b);
        finished->push_back(b);
        return;
      }
      if (b->moved % r.file->alignment() != 0) {
        buffered(b, base);
        finished->push_back(b);
        return;
      }
      b->op.data = base + b->moved;
      b->op.offset = b->cut.from + b->moved;
      b->op.bytes = b->cut.to - b->op.offset;
    } else if ((result == -EINVAL || result == -EOPNOTSUPP) && r.file->has_buffered()) {
      r.file->refuse_direct();
      buffered(b, base);
      finished->push_back(b);
      return;
    } else if (result == -EINTR || (result == -EAGAIN && ++b->refusals < kRefusals)) {
      pause_after(b->refusals);
    } else {
      const int64_t code = result < 0 ? -result : r.write ? EIO : kShortFile;
      fail(b, code, b->cut.from + b->moved, r.write ? "a direct write" : "a direct read");
      finished->push_back(b);
      return;
    }
    waiting_.push_back(b);
  }

  // The engine broke (somebody closed its descriptor, say): what it had in flight is lost. It goes first, since taking a
  // kernel AIO context away waits for what is in flight.
  void give_up(int code, std::vector<Block*>* finished) {
    engine_.reset();
    in_flight_ = 0;
    waiting_.clear();
    for (const auto& block : all_) {
      bool held = true;
      for (const Block* spare : spare_) held = held && spare != block.get();
      for (const Block* done : *finished) held = held && done != block.get();
      if (!held) continue;
      fail(block.get(), code, block->cut.from, "the I/O engine");
      finished->push_back(block.get());
    }
  }

  const Options options_;
  std::unique_ptr<Engine> engine_;
  Staging host_;
  std::map<int, std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Block>> all_;
  std::vector<Block*> spare_, waiting_;
  std::vector<Op*> ops_, events_;
  int64_t busy_ = 0, in_flight_ = 0;
  int refusals_ = 0;
};

}  // namespace aio
}  // namespace ds
