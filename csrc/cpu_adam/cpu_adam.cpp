// cpu_adam: Adam and AdamW on CPU tensors. The arithmetic is in cpu_adam-inl.h; here are the split into chunks and the
// FFI functions.
//
// Work is a table of tensors: int64 [5][n] = addresses of p, g, m, v and the number of elements (g 0: skipped). Every
// tensor is cut into chunks of kChunk elements from its start, and threads take contiguous ranges of chunks, so the result
// does not depend on the number of threads or of tensors.
// Errors: ValueError for an unknown or unsupported SIMD level or negative size, TypeError for a combination of dtypes that
// is not supported.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>

#include <tvm/ffi/tvm_ffi.h>

#include "common/parallel.h"
#include "common/tensor_list.h"
#include "cpu_adam/cpu_adam.h"

namespace ds {
namespace {

namespace ffi = tvm::ffi;

// 16,384 elements: 64 KiB of each of four float arrays, enough to make a hand-over cheap, few enough to balance 16 threads
// on a million elements.
constexpr int64_t kChunk = 16384;
// 65,536 elements move 1.8 MB, 50 us of one core's bandwidth: less is not worth a thread's start (5 to 20 us).
constexpr int64_t kGrain = 4;

const Level<AdamFn>& level_or_throw(const std::string& request) {
  const Level<AdamFn>* level = adam_level(request.c_str());
  if (level == nullptr) {
    TVM_FFI_THROW(ValueError) << "DS_SIMD=" << request << " is not available on this CPU; it has "
                              << adam_levels();
  }
  return *level;
}

struct Scalars {
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  bool adamw, bias_correction;

  Hyper at(int64_t step) const {
    Hyper h;
    h.beta1 = static_cast<float>(beta1);
    h.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    h.beta2 = static_cast<float>(beta2);
    h.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    h.eps = static_cast<float>(eps);
    const double t = static_cast<double>(step);
    const double bias1 = bias_correction ? 1.0 - std::pow(beta1, t) : 1.0;
    const double bias2 = bias_correction ? 1.0 - std::pow(beta2, t) : 1.0;
    h.step_size = static_cast<float>(lr / bias1);
    h.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2));
    h.decay = adamw ? static_cast<float>(lr * weight_decay) : 0.0f;
    h.l2 = adamw ? 0.0f : static_cast<float>(weight_decay);
    h.inv_grad_scale = static_cast<float>(1.0 / grad_scale);
    return h;
  }
};

struct Table {
  const int64_t* columns;  // [5][n]
  const int64_t* steps;    // [n]
  int64_t n;
  const int64_t* first_chunk;  // [n + 1], running sum of chunks
  Format p, g, s;
  int64_t p_bytes, g_bytes, s_bytes;
  AdamFn fn;
  const Scalars* scalars;
  std::atomic<bool> supported{true};

  int64_t column(int c, int64_t i) const { return columns[c * n + i]; }
};

void run_chunks(void* context, int64_t begin, int64_t end) {
  const PlainFloats plain;
  auto& t = *static_cast<Table*>(context);
  // The tensor that holds chunk `begin`: the last one whose first chunk is not past it.
  int64_t lo = 0, hi = t.n - 1;
  while (lo < hi) {
    const int64_t mid = (lo + hi + 1) / 2;
    if (t.first_chunk[mid] <= begin) {
      lo = mid;
    } else {
      hi = mid - 1;
    }
  }
  for (int64_t i = lo; i < t.n && t.first_chunk[i] < end; ++i) {
    const int64_t from = begin > t.first_chunk[i] ? begin - t.first_chunk[i] : 0;
    const int64_t to = end < t.first_chunk[i + 1] ? end - t.first_chunk[i] : t.first_chunk[i + 1] - t.first_chunk[i];
    if (from >= to) continue;
    const int64_t offset = from * kChunk;
    const int64_t length = t.column(4, i) < to * kChunk ? t.column(4, i) - offset : (to - from) * kChunk;
    const Run run = {reinterpret_cast<void*>(t.column(0, i) + offset * t.p_bytes),
                     reinterpret_cast<const void*>(t.column(1, i) + offset * t.g_bytes),
                     reinterpret_cast<void*>(t.column(2, i) + offset * t.s_bytes),
                     reinterpret_cast<void*>(t.column(3, i) + offset * t.s_bytes), length};
    if (!t.fn(run, t.p, t.g, t.s, t.scalars->at(t.steps[i]))) t.supported.store(false, std::memory_order_relaxed);
  }
}

Format format_or_throw(int64_t code, const char* name) {
  if (code < 0 || code > 2) {
    TVM_FFI_THROW(TypeError) << "cpu_adam: " << name << " has format code " << code
                             << "; expected 0 (float32), 1 (float16) or 2 (bfloat16)";
  }
  return static_cast<Format>(code);
}

int64_t bytes_of(Format f) { return f == Format::f32 ? 4 : 2; }

// The arguments of step_table: every field 8 bytes, in this order, filled by src/deepspeed_ops/cpu_adam.py.
struct StepArgs {
  int64_t table, steps, n;                   // addresses of int64 [5][n] and int64 [n] (1-based step of each tensor)
  int64_t p_format, g_format, state_format;  // format codes: 0 f32, 1 f16, 2 bf16
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  int64_t adamw, bias_correction;  // 0 or 1
  int64_t threads;                 // upper limit
};

// One step for every tensor of a table, at the SIMD level named `simd` ("" = best). Arg: address of StepArgs. Returns how
// many threads took part.
int64_t step_table(int64_t args, const ffi::String& simd) {
  const StepArgs& a = *reinterpret_cast<const StepArgs*>(args);
  const Level<AdamFn>& level = level_or_throw(simd);
  const Scalars scalars = {a.lr,  a.beta1,        a.beta2,      a.eps,
                           a.weight_decay, a.grad_scale, a.adamw != 0, a.bias_correction != 0};
  const int64_t n = a.n;
  Table t;
  t.columns = reinterpret_cast<const int64_t*>(a.table);
  t.steps = reinterpret_cast<const int64_t*>(a.steps);
  t.n = n;
  t.p = format_or_throw(a.p_format, "p");
  t.g = format_or_throw(a.g_format, "g");
  t.s = format_or_throw(a.state_format, "m and v");
  t.p_bytes = bytes_of(t.p), t.g_bytes = bytes_of(t.g), t.s_bytes = bytes_of(t.s);
  t.fn = level.fn;
  t.scalars = &scalars;
  const std::unique_ptr<int64_t[]> first(new int64_t[n + 1]);
  first[0] = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t count = t.column(1, i) == 0 ? 0 : t.column(4, i);
    if (count < 0) TVM_FFI_THROW(ValueError) << "cpu_adam: tensor " << i << " has " << count << " elements";
    first[i + 1] = first[i] + (count + kChunk - 1) / kChunk;
  }
  t.first_chunk = first.get();
  if (first[n] == 0) return 0;
  const int took_part = Pool::run(static_cast<int>(a.threads), first[n], kGrain, run_chunks, &t);
  if (!t.supported) {
    TVM_FFI_THROW(TypeError) << "cpu_adam: parameter, gradient and state formats " << a.p_format << ", " << a.g_format << ", "
                             << a.state_format
                             << " do not go together; expected state float32 or like the parameter, gradient float32 or "
                                "like the parameter (any of the three for a float32 parameter)";
  }
  return took_part;
}

int64_t usable_cpu_count() { return usable_cpus(); }
ffi::String simd_levels() { return adam_levels(); }
ffi::String simd_level(const ffi::String& request) { return std::string(level_or_throw(request).name); }

}  // namespace
}  // namespace ds

TVM_FFI_DLL_EXPORT_TYPED_FUNC(step_table, ds::step_table)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(collect_addresses, ds::collect_addresses)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(simd_levels, ds::simd_levels)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(simd_level, ds::simd_level)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(usable_cpus, ds::usable_cpu_count)
