// LAMB over many tensors, in two passes over memory.
//
// Formula (You et al. 2020, algorithm 2, with the bias correction in the step size and a clamped ratio), t = step:
//   m = b1 * m + (1 - b1) * g,  v = b2 * v + (1 - b2) * g^2
//   u = m / (sqrt(v) + eps) + wd * p          [eps inside: m / sqrt(v + eps) + wd * p]
//   r = |p| / |u| over the whole tensor, clamped to [min, max]; 1 where either norm is 0
//   p = p - lr * sqrt(1 - b2^t) / (1 - b1^t) * r * u
// Pass 1 updates m and v and adds up p^2 and u^2 (24 bytes an element in f32, g among them), pass 2 computes u
// again from the m and v that were stored (16 bytes; keeping u would cost as many) and updates p: 40 bytes in all.
// p g m v: [n] each; g null: the tensor has no gradient and is left alone. copy: [n], the updated p in another format, or
// null. float math (double for double parameters), every operation rounded to nearest even and written out; norms: see
// common/reduce.cuh.
// Formats: p, g, the moments and copy each f32, f16 or bf16 in any combination; or all f64.
// Layout: common/multi_tensor.cuh.
// Mutates p, m, v, copy. Skips everything where *noop_flag != 0 or *found_inf != 0.
#pragma once

#include "common/reduce.cuh"

namespace ds {

enum LambList { kP = 0, kG = 1, kM = 2, kV = 3, kCopy = 4, kLambLists = 5 };

template <class M>
struct LambScalars {
  M beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay;
  Control control;
  i32 eps_inside_sqrt;
};

template <class M>
__device__ __forceinline__ M lamb_update(M p, M m, M v, const LambScalars<M>& s) {
  const M denom = s.eps_inside_sqrt ? sqrt_rn(v + s.eps) : sqrt_rn(v) + s.eps;
  const M direction = div_rn(m, denom);
  // Apart, so that an infinite parameter has a finite update without decay (0 * inf is NaN).
  return s.weight_decay != M(0) ? fma_rn(s.weight_decay, p, direction) : direction;
}

template <class M>
__device__ __forceinline__ void lamb_moments(M g, M& m, M& v, const LambScalars<M>& s) {
  m = fma_rn(s.one_minus_beta1, g, mul_rn(s.beta1, m));
  v = fma_rn(mul_rn(s.one_minus_beta2, g), g, mul_rn(s.beta2, v));
}

// Pass 1. partials: double [blocks][2], the sums of p^2 and u^2 of each chunk.
template <bool kFloats, int N>
__device__ __forceinline__ void lamb_first(const Table<kLambLists>& t, const LambScalars<float>& s, double* partials) {
  if (s.control.skipped()) return;
  const auto at = Place<kLambLists>::find<N>(t);
  float sums[2] = {0.0f, 0.0f};
  if (at.n > 0) {
    const float inv_scale = s.control.inv_scale<float>();
    Pack<kFloats, N, kLambLists> pack(t, at);
    pack.load(kP), pack.load(kG), pack.load(kM), pack.load(kV);
    float p[N], g[N], m[N], v[N];
    pack.floats(kP, p), pack.floats(kG, g), pack.floats(kM, m), pack.floats(kV, v);
#pragma unroll
    for (int i = 0; i < N; ++i) lamb_moments(mul_rn(g[i], inv_scale), m[i], v[i], s);
    pack.round(kM, m), pack.round(kV, v);
    pack.store(kM), pack.store(kV);
    pack.floats(kM, m), pack.floats(kV, v);  // as pass 2 will read them
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= at.n) break;
      const float u = lamb_update(p[i], m[i], v[i], s);
      sums[0] = fma_rn(p[i], p[i], sums[0]);
      sums[1] = fma_rn(u, u, sums[1]);
    }
  }
  block_sum<kBlock>(sums);
  if (threadIdx.x == 0) {
    partials[2 * static_cast<i64>(blockIdx.x)] = sums[0];
    partials[2 * static_cast<i64>(blockIdx.x) + 1] = sums[1];
  }
}

__device__ __forceinline__ void lamb_first(const Table<kLambLists>& t, const LambScalars<double>& s, double* partials) {
  if (s.control.skipped()) return;
  const auto at = Place<kLambLists>::find<2>(t);
  const double inv_scale = s.control.inv_scale<double>();
  double sums[2] = {0.0, 0.0};
#pragma unroll 1
  for (int i = 0; i < at.n; ++i) {
    const double p = at.doubles(kP)[i];
    double m = at.doubles(kM)[i], v = at.doubles(kV)[i];
    lamb_moments(mul_rn(at.doubles(kG)[i], inv_scale), m, v, s);
    at.doubles(kM)[i] = m, at.doubles(kV)[i] = v;
    const double u = lamb_update(p, m, v, s);
    sums[0] = fma_rn(p, p, sums[0]);
    sums[1] = fma_rn(u, u, sums[1]);
  }
  block_sum<kBlock>(sums);
  if (threadIdx.x == 0) {
    partials[2 * static_cast<i64>(blockIdx.x)] = sums[0];
    partials[2 * static_cast<i64>(blockIdx.x) + 1] = sums[1];
  }
}

// Between the passes: one block a tensor.
template <class M>
struct LambRatios {
  const double* sums;       // [segments][2] of p^2 and u^2
  const i32* tensor_first;  // [tensors + 1] first segment of each tensor
  const i64* g;             // [tensors] addresses, 0 = no gradient
  const M* step_sizes;      // [tensors] or null
  M step_size;              // for all tensors, where step_sizes is null
  float min_ratio, max_ratio;
  float* ratios;            // [tensors] r
  M* factors;               // [tensors] what u is multiplied with
};

template <class M>
__device__ __forceinline__ void lamb_ratio(const LambRatios<M>& a, const Control& control) {
  const i64 i = blockIdx.x;
  if (a.g[i] == 0 || control.skipped()) return;
  double sum[2];
  sum_rows<kBlock>(a.sums, a.tensor_first[i], a.tensor_first[i + 1], sum);
  if (threadIdx.x != 0) return;
  const double p_norm = sqrt(sum[0]), u_norm = sqrt(sum[1]);
  double ratio = 1.0;
  if (p_norm != 0.0 && u_norm != 0.0) {
    ratio = p_norm / u_norm;  // a NaN passes both comparisons and stays
    if (ratio > static_cast<double>(a.max_ratio)) ratio = static_cast<double>(a.max_ratio);
    if (ratio < static_cast<double>(a.min_ratio)) ratio = static_cast<double>(a.min_ratio);
  }
  a.ratios[i] = static_cast<float>(ratio);
  a.factors[i] = mul_rn(a.step_sizes != nullptr ? a.step_sizes[i] : a.step_size, static_cast<M>(ratio));
}

// Pass 2.
template <bool kFloats, int N>
__device__ __forceinline__ void lamb_second(const Table<kLambLists>& t, const LambScalars<float>& s,
                                            const float* factors) {
  const auto at = Place<kLambLists>::find<N>(t);
  if (at.n <= 0 || s.control.skipped()) return;
  const float factor = factors[at.tensor];
  Pack<kFloats, N, kLambLists> pack(t, at);
  pack.load(kP), pack.load(kM), pack.load(kV);
  float p[N], m[N], v[N];
  pack.floats(kP, p), pack.floats(kM, m), pack.floats(kV, v);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = fma_rn(-factor, lamb_update(p[i], m[i], v[i], s), p[i]);
  pack.round(kP, p);
  pack.store(kP);
  if (at.address[kCopy] != 0) {
    pack.round(kCopy, p);
    pack.store(kCopy);
  }
}

__device__ __forceinline__ void lamb_second(const Table<kLambLists>& t, const LambScalars<double>& s,
                                            const double* factors) {
  const auto at = Place<kLambLists>::find<2>(t);
  if (at.n <= 0 || s.control.skipped()) return;
  const double factor = factors[at.tensor];
#pragma unroll 1
  for (int i = 0; i < at.n; ++i) {
    const double u = lamb_update(at.doubles(kP)[i], at.doubles(kM)[i], at.doubles(kV)[i], s);
    at.doubles(kP)[i] = fma_rn(-factor, u, at.doubles(kP)[i]);
  }
}

}  // namespace ds
