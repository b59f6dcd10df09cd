// One step over many CPU tensors: the split into chunks and threads, the checks, and the FFI functions that every such op
// has. The arithmetic comes as a function per SIMD level.
//
// Work is a table of tensors: int64 [lists + 1][n] = addresses of p, g, one or two states, where there is one the
// low-precision copy of p, and the number of elements (g 0: skipped). Every tensor is cut into chunks of kChunk elements
// from its start, and threads take contiguous ranges of chunks, so the result does not depend on the number of threads or
// of tensors.
// Errors: ValueError for an unknown or unsupported SIMD level or a negative size, TypeError for a combination of formats
// that is not supported.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <tvm/ffi/tvm_ffi.h>

#include "common/cpu_kernels.h"
#include "common/parallel.h"
#include "common/tensor_list.h"

namespace ds {

// 16,384 elements: 64 KiB of each of four float arrays, enough to make a hand-over cheap, few enough to balance 16 threads
// on a million elements.
constexpr int64_t kChunk = 16384;
// 65,536 elements move 1.8 MB, 50 us of one core's bandwidth: less is not worth a thread's start (5 to 20 us).
constexpr int64_t kElementsPerThread = 4 * kChunk;
// Elements updated before their copy is written: p of one block is then still in the first-level cache.
constexpr int64_t kCopyBlock = 2048;

// What a step works on; filled from an op's own arguments.
struct TableView {
  int64_t table, steps, n;                   // addresses of int64 [lists + 1][n] and int64 [n] (1-based step of each tensor)
  int64_t p_format, g_format, state_format;  // format codes: 0 f32, 1 f16, 2 bf16
  int64_t states;                            // 1 or 2
  int64_t threads;                           // upper limit
  bool has_copy = false;
  int64_t copy_format = 0;
  ConvertFn convert = nullptr;
};

inline Format format_or_throw(const char* op, int64_t code, const char* name) {
  if (code < 0 || code > 2) {
    TVM_FFI_THROW(TypeError) << op << ": " << name << " has format code " << code
                             << "; expected 0 (float32), 1 (float16) or 2 (bfloat16)";
  }
  return static_cast<Format>(code);
}

// The row of a table of levels that `request` names ("" = best).
template <class Fn>
const Level<Fn>& level_or_throw(const Level<Fn>* level, const std::string& request, const std::string& available) {
  if (level == nullptr) {
    TVM_FFI_THROW(ValueError) << "DS_SIMD=" << request << " is not available on this CPU; it has " << available;
  }
  return *level;
}

// Scalars: a class with `Hyper at(int64_t step) const`.
template <class Hyper, class Scalars>
class TableStep {
 public:
  TableStep(const char* op, const TableView& view, RunFn<Hyper> fn, const Scalars& scalars)
      : op_(op), view_(view), columns_(reinterpret_cast<const int64_t*>(view.table)),
        steps_(reinterpret_cast<const int64_t*>(view.steps)), n_(view.n), fn_(fn), scalars_(scalars) {
    p_ = format_or_throw(op, view.p_format, "p");
    g_ = format_or_throw(op, view.g_format, "g");
    s_ = format_or_throw(op, view.state_format, "state");
    counts_ = 2 + view.states + (view.has_copy ? 1 : 0);
    if (view.has_copy) {
      copy_ = format_or_throw(op, view.copy_format, "copy");
      if (p_ != Format::f32 || copy_ == Format::f32) {
        TVM_FFI_THROW(TypeError) << op << ": a copy of format " << view.copy_format << " of parameters of format "
                                 << view.p_format << "; expected float32 parameters and a float16 or bfloat16 copy";
      }
    }
  }

  // Returns how many threads took part.
  int64_t run() {
    first_chunk_.reset(new int64_t[n_ + 1]);
    first_chunk_[0] = 0;
    int64_t elements = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t count = column(1, i) == 0 ? 0 : column(counts_, i);
      if (count < 0) TVM_FFI_THROW(ValueError) << op_ << ": tensor " << i << " has " << count << " elements";
      elements += count;
      first_chunk_[i + 1] = first_chunk_[i] + (count + kChunk - 1) / kChunk;
    }
    if (first_chunk_[n_] == 0) return 0;
    const int64_t worth = elements / kElementsPerThread + 1;
    const int threads = static_cast<int>(view_.threads < worth ? view_.threads : worth);
    const int took_part = Pool::run(threads, first_chunk_[n_], 1, run_chunks, this);
    if (!supported_) {
      TVM_FFI_THROW(TypeError) << op_ << ": parameter, gradient and state formats " << view_.p_format << ", "
                               << view_.g_format << ", " << view_.state_format
                               << " do not go together; expected state float32 or like the parameter, gradient float32 or "
                                  "like the parameter (any of the three for a float32 parameter)";
    }
    return took_part;
  }

 private:
  int64_t column(int64_t c, int64_t i) const { return columns_[c * n_ + i]; }

  static void run_chunks(void* context, int64_t begin, int64_t end) {
    const PlainFloats plain;
    static_cast<TableStep*>(context)->chunks(begin, end);
  }

  void chunks(int64_t begin, int64_t end) {
    // The tensor that holds chunk `begin`: the last one whose first chunk is not past it.
    int64_t lo = 0, hi = n_ - 1;
    while (lo < hi) {
      const int64_t mid = (lo + hi + 1) / 2;
      if (first_chunk_[mid] <= begin) {
        lo = mid;
      } else {
        hi = mid - 1;
      }
    }
    for (int64_t i = lo; i < n_ && first_chunk_[i] < end; ++i) {
      const int64_t count = first_chunk_[i + 1] - first_chunk_[i];
      const int64_t from = begin > first_chunk_[i] ? begin - first_chunk_[i] : 0;
      const int64_t to = end < first_chunk_[i + 1] ? end - first_chunk_[i] : count;
      if (from >= to) continue;
      const int64_t offset = from * kChunk;
      const int64_t length = column(counts_, i) < to * kChunk ? column(counts_, i) - offset : (to - from) * kChunk;
      const bool done = view_.has_copy ? elements_and_copy(i, offset, length) : elements(i, offset, length);
      if (!done) supported_.store(false, std::memory_order_relaxed);
    }
  }

  bool elements(int64_t i, int64_t offset, int64_t length) const {
    Run run = {reinterpret_cast<void*>(column(0, i) + offset * bytes_of(p_)),
               reinterpret_cast<const void*>(column(1, i) + offset * bytes_of(g_)),
               {nullptr, nullptr},
               length};
    for (int64_t s = 0; s < view_.states; ++s) {
      run.state[s] = reinterpret_cast<void*>(column(2 + s, i) + offset * bytes_of(s_));
    }
    return fn_(run, p_, g_, s_, scalars_.at(steps_[i]));
  }

  bool elements_and_copy(int64_t i, int64_t offset, int64_t length) const {
    for (int64_t done = 0; done < length; done += kCopyBlock) {
      const int64_t at = offset + done, n = length - done < kCopyBlock ? length - done : kCopyBlock;
      if (!elements(i, at, n)) return false;
      view_.convert(reinterpret_cast<const float*>(column(0, i)) + at,
                    reinterpret_cast<void*>(column(counts_ - 1, i) + at * bytes_of(copy_)), copy_, n);
    }
    return true;
  }

  const char* const op_;
  const TableView& view_;
  const int64_t* const columns_;
  const int64_t* const steps_;
  const int64_t n_;
  const RunFn<Hyper> fn_;
  const Scalars& scalars_;
  Format p_, g_, s_, copy_ = Format::f32;
  int64_t counts_;  // the row with the numbers of elements: the last one
  std::unique_ptr<int64_t[]> first_chunk_;  // [n + 1], running sum of chunks
  std::atomic<bool> supported_{true};
};

inline int64_t usable_cpu_count() { return usable_cpus(); }

}  // namespace ds

// The functions that the Python side expects of every op on CPU tensors, beside its own. `levels` names the SIMD levels of
// this CPU, `level` gives the row of a request or nullptr.
#define DS_EXPORT_CPU_TABLE(levels, level)                                                     \
  namespace ds {                                                                               \
  namespace {                                                                                  \
  tvm::ffi::String simd_levels() { return levels(); }                                          \
  tvm::ffi::String simd_level(const tvm::ffi::String& request) {                               \
    const std::string wanted = request;                                                        \
    return std::string(level_or_throw(level(wanted.c_str()), wanted, levels()).name);          \
  }                                                                                            \
  }                                                                                            \
  }                                                                                            \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(collect_addresses, ds::collect_addresses)                      \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(simd_levels, ds::simd_levels)                                  \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(simd_level, ds::simd_level)                                    \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(usable_cpus, ds::usable_cpu_count)
