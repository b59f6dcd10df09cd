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
// Layout: common/multi_tensor.cuh.
// Mutates p, m, v. Skips everything where *noop_flag != 0 or *found_inf != 0.
#pragma once

#include "common/multi_tensor.cuh"

namespace ds {

enum AdamList { kP = 0, kG = 1, kM = 2, kV = 3, kAdamLists = 4 };

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
  Control control;
};

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

template <bool kFloats, int N>
__device__ __forceinline__ void adam(const Table<kAdamLists>& t, const AdamScalars<float>& s) {
  const auto at = Place<kAdamLists>::find<N>(t);
  if (at.n <= 0 || s.control.skipped()) return;
  const AdamStep<float> step = s.steps != nullptr ? s.steps[at.tensor] : s.step;
  const float inv_scale = s.control.inv_scale<float>();
  Pack<kFloats, N, kAdamLists> pack(t, at);
  pack.load(kP), pack.load(kG), pack.load(kM), pack.load(kV);
  float p[N], g[N], m[N], v[N];
  pack.floats(kP, p), pack.floats(kG, g), pack.floats(kM, m), pack.floats(kV, v);
#pragma unroll
  for (int i = 0; i < N; ++i) adam_element(p[i], mul_rn(g[i], inv_scale), m[i], v[i], s, step);
  pack.round(kP, p), pack.round(kM, m), pack.round(kV, v);
  pack.store(kP), pack.store(kM), pack.store(kV);
}

__device__ __forceinline__ void adam(const Table<kAdamLists>& t, const AdamScalars<double>& s) {
  const auto at = Place<kAdamLists>::find<2>(t);
  if (at.n <= 0 || s.control.skipped()) return;
  const AdamStep<double> step = s.steps != nullptr ? s.steps[at.tensor] : s.step;
  const double inv_scale = s.control.inv_scale<double>();
  double *p = at.doubles(kP), *m = at.doubles(kM), *v = at.doubles(kV);
  const double* g = at.doubles(kG);
#pragma unroll 1
  for (int i = 0; i < at.n; ++i) adam_element(p[i], mul_rn(g[i], inv_scale), m[i], v[i], s, step);
}

}  // namespace ds
