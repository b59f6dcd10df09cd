// Lion over many tensors in one launch.
//
// Formula (Chen et al. 2023, algorithm 2):
//   c = b1 * m + (1 - b1) * g
//   p = p - lr * (sign(c) + wd * p)        sign(0) = 0: an update of zero moves nothing
//   m = b2 * m + (1 - b2) * g
// p g m: [n] each; g null: the tensor has no gradient and is left alone. float math (double for double parameters), every
// operation rounded to nearest even and written out, in the order of csrc/cpu_lion/cpu_lion-inl.h: CPU and GPU give the
// same bits.
// Formats: p, g and m each f32, f16 or bf16 in any combination; or all f64.
// Layout: common/multi_tensor.cuh.
// Mutates p, m. Skips everything where *noop_flag != 0 or *found_inf != 0.
#pragma once

#include "common/multi_tensor.cuh"

namespace ds {

enum LionList { kP = 0, kG = 1, kM = 2, kLionLists = 3 };

template <class M>
struct LionScalars {
  double lr, weight_decay;
  const float* lr_tensor;  // [1] or null; takes the place of lr
  M beta1, one_minus_beta1, beta2, one_minus_beta2;
  Control control;

  __device__ __forceinline__ double rate() const { return lr_tensor != nullptr ? static_cast<double>(*lr_tensor) : lr; }
};

// 1, -1 or 0; a NaN stays.
template <class M>
__device__ __forceinline__ M sign(M x) {
  return x > M(0) ? M(1) : x < M(0) ? M(-1) : x == M(0) ? M(0) : x;
}

template <class M>
__device__ __forceinline__ void lion_element(M& p, M g, M& m, const LionScalars<M>& s, M lr, M decay) {
  const M c = fma_rn(s.one_minus_beta1, g, mul_rn(s.beta1, m));
  // Apart, so that an infinite parameter stays infinite without decay (0 * inf is NaN); for finite ones the same bits.
  p = p - (decay != M(0) ? fma_rn(lr, sign(c), mul_rn(decay, p)) : mul_rn(lr, sign(c)));
  m = fma_rn(s.one_minus_beta2, g, mul_rn(s.beta2, m));
}

template <bool kFloats, int N>
__device__ __forceinline__ void lion(const Table<kLionLists>& t, const LionScalars<float>& s) {
  const auto at = Place<kLionLists>::find<N>(t);
  if (at.n <= 0 || s.control.skipped()) return;
  const float inv_scale = s.control.inv_scale<float>();
  const float lr = static_cast<float>(s.rate()), decay = static_cast<float>(s.rate() * s.weight_decay);
  Pack<kFloats, N, kLionLists> pack(t, at);
  pack.load(kP), pack.load(kG), pack.load(kM);
  float p[N], g[N], m[N];
  pack.floats(kP, p), pack.floats(kG, g), pack.floats(kM, m);
#pragma unroll
  for (int i = 0; i < N; ++i) lion_element(p[i], mul_rn(g[i], inv_scale), m[i], s, lr, decay);
  pack.round(kP, p), pack.round(kM, m);
  pack.store(kP), pack.store(kM);
}

__device__ __forceinline__ void lion(const Table<kLionLists>& t, const LionScalars<double>& s) {
  const auto at = Place<kLionLists>::find<2>(t);
  if (at.n <= 0 || s.control.skipped()) return;
  const double inv_scale = s.control.inv_scale<double>();
  double *p = at.doubles(kP), *m = at.doubles(kM);
  const double* g = at.doubles(kG);
#pragma unroll 1
  for (int i = 0; i < at.n; ++i) {
    lion_element(p[i], mul_rn(g[i], inv_scale), m[i], s, s.rate(), mul_rn(s.rate(), s.weight_decay));
  }
}

}  // namespace ds
