// Adam and AdamW over many tensors in one launch.
//
// Formula (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2), t = step:
//   L2:     g = g + wd * p
//           m = b1 * m + (1 - b1) * g
//           v = b2 * v + (1 - b2) * g^2
//           p = p - (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)  [- lr * wd * p with AdamW]
// p g m v: [n] each; g null: the tensor has no gradient and is left alone. float math (double for double parameters), every
// operation rounded to nearest even and written out (no contraction by the compiler), in the order of
// csrc/cpu_adam/cpu_adam-inl.h: CPU and GPU give the same bits.
// Formats: p, g and the moments each f32, f16 or bf16 in any combination; or all f64.
// Layout: any element alignment; vector accesses where p, g, m and v of a tensor are 16-byte aligned.
// Mutates p, m, v. Skips everything where *noop_flag != 0 or *found_inf != 0.
#pragma once

#include "common/device.cuh"

namespace ds {

// Where the tensors are. All arrays are in device memory.
struct AdamTable {
  const i64* p;       // [tensors] addresses
  const i64* g;       // [tensors] addresses, 0 = no gradient
  const i64* m;       // [tensors] addresses
  const i64* v;       // [tensors] addresses
  const i64* counts;  // [tensors] elements
  const i32* chunks;  // [blocks][2]: tensor, chunk within the tensor
  Format p_format, g_format, state_format;
};

// Scalars that may differ per tensor (steps do); from the host, or from fused_adam_prepare.
template <class M>
struct AdamStep {
  M step_size;       // lr / (1 - b1^t)
  M inv_sqrt_bias2;  // 1 / sqrt(1 - b2^t)
  M decay;           // lr * wd with AdamW, else 0
};

template <class M>
struct AdamScalars {
  M beta1, one_minus_beta1, beta2, one_minus_beta2, eps, l2;
  AdamStep<M> step;          // for all tensors, where `steps` is null
  const AdamStep<M>* steps;  // [tensors] or null
  const float* grad_scale;   // [1] or null: gradients are divided by it
  const float* found_inf;    // [1] or null
  const i32* noop_flag;      // [1] or null
};

constexpr int kBlock = 128;  // threads; each takes one pack of 4 floats, 8 elements of mixed formats or 2 doubles

__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double div_rn(double a, double b) { return __ddiv_rn(a, b); }
__device__ __forceinline__ float sqrt_rn(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double sqrt_rn(double a) { return __dsqrt_rn(a); }

template <class M>
__device__ __forceinline__ void adam_element(M& p, M g, M& m, M& v, const AdamScalars<M>& s, const AdamStep<M>& step) {
  if (s.l2 != M(0)) g = fma_rn(s.l2, p, g);
  m = fma_rn(s.one_minus_beta1, g, mul_rn(s.beta1, m));
  v = fma_rn(mul_rn(s.one_minus_beta2, g), g, mul_rn(s.beta2, v));
  const M denom = fma_rn(sqrt_rn(v), step.inv_sqrt_bias2, s.eps);
  const M direction = div_rn(m, denom);
  // Apart, so that an infinite parameter stays infinite without decay (0 * inf is NaN); for finite ones the same bits.
  p = p - (step.decay != M(0) ? fma_rn(step.step_size, direction, mul_rn(step.decay, p))
                              : mul_rn(step.step_size, direction));
}

// This thread's pack: which tensor, from which element on, how many elements (none: not positive).
struct Place {
  i32 tensor;
  i64 p, g, m, v;  // addresses of the tensor
  i64 first;
  int n;
  bool aligned;  // all four to 16 bytes

  template <int kPack>
  static __device__ __forceinline__ Place find(const AdamTable& t) {
    const int2 chunk = __ldg(reinterpret_cast<const int2*>(t.chunks) + blockIdx.x);
    Place at;
    at.tensor = chunk.x;
    // All five at once: they depend on the chunk alone.
    at.g = __ldg(t.g + chunk.x);
    at.p = __ldg(t.p + chunk.x);
    at.m = __ldg(t.m + chunk.x);
    at.v = __ldg(t.v + chunk.x);
    const i64 count = __ldg(t.counts + chunk.x);
    at.first = (static_cast<i64>(chunk.y) * kBlock + threadIdx.x) * kPack;
    const i64 left = count - at.first;
    at.n = at.g == 0 ? 0 : static_cast<int>(left < kPack ? left : kPack);
    at.aligned = ((at.p | at.g | at.m | at.v) & 15) == 0;
    return at;
  }
};

template <class M>
__device__ __forceinline__ bool skipped(const AdamScalars<M>& s) {
  return (s.noop_flag != nullptr && *s.noop_flag != 0) || (s.found_inf != nullptr && *s.found_inf != 0.0f);
}

// kFloats: everything is f32, which spares the branches on formats (1.5 % of an H200's bandwidth).
template <bool kFloats, int N>
__device__ __forceinline__ void adam(const AdamTable& t, const AdamScalars<float>& s) {
  const Place at = Place::find<N>(t);
  if (at.n <= 0 || skipped(s)) return;
  const AdamStep<float> step = s.steps != nullptr ? s.steps[at.tensor] : s.step;
  const float inv_scale = s.grad_scale != nullptr ? __fdiv_rn(1.0f, *s.grad_scale) : 1.0f;
  const bool whole = at.n == N && at.aligned;
  const Format p_format = kFloats ? kF32 : t.p_format, g_format = kFloats ? kF32 : t.g_format;
  const Format state_format = kFloats ? kF32 : t.state_format;
  void* const p_at = reinterpret_cast<void*>(at.p);
  void* const m_at = reinterpret_cast<void*>(at.m);
  void* const v_at = reinterpret_cast<void*>(at.v);
  Raw<N> raw_p, raw_g, raw_m, raw_v;
  raw_p.load(p_at, at.first, p_format, at.n, whole);
  raw_g.load(reinterpret_cast<const void*>(at.g), at.first, g_format, at.n, whole);
  raw_m.load(m_at, at.first, state_format, at.n, whole);
  raw_v.load(v_at, at.first, state_format, at.n, whole);
  float p[N], g[N], m[N], v[N];
  raw_p.to_floats(p_format, p);
  raw_g.to_floats(g_format, g);
  raw_m.to_floats(state_format, m);
  raw_v.to_floats(state_format, v);
#pragma unroll
  for (int i = 0; i < N; ++i) adam_element(p[i], mul_rn(g[i], inv_scale), m[i], v[i], s, step);
  raw_p.from_floats(p_format, p);
  raw_m.from_floats(state_format, m);
  raw_v.from_floats(state_format, v);
  raw_p.store(p_at, at.first, p_format, at.n, whole);
  raw_m.store(m_at, at.first, state_format, at.n, whole);
  raw_v.store(v_at, at.first, state_format, at.n, whole);
}

__device__ __forceinline__ void adam(const AdamTable& t, const AdamScalars<double>& s) {
  const Place at = Place::find<2>(t);
  if (at.n <= 0 || skipped(s)) return;
  const AdamStep<double> step = s.steps != nullptr ? s.steps[at.tensor] : s.step;
  const double inv_scale = s.grad_scale != nullptr ? 1.0 / static_cast<double>(*s.grad_scale) : 1.0;
  double* p = reinterpret_cast<double*>(at.p) + at.first;
  const double* g = reinterpret_cast<const double*>(at.g) + at.first;
  double* m = reinterpret_cast<double*>(at.m) + at.first;
  double* v = reinterpret_cast<double*>(at.v) + at.first;
#pragma unroll 1
  for (int i = 0; i < at.n; ++i) adam_element(p[i], mul_rn(g[i], inv_scale), m[i], v[i], s, step);
}

}  // namespace ds
