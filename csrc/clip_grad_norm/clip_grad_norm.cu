// The L2 norm over many tensors, and their scaling by what it says, without a word from the host.
//
// Formula (Pascanu et al. 2013, algorithm 1): norm = sqrt(sum of g^2 over all tensors); g = g * min(1, max_norm / (norm + 1e-6)).
// g: [n] each, f32, f16, bf16 or f64; one table a format. Squares are added up in float (double for f64) within a chunk, in
// double between chunks, always in the same order (common/reduce.cuh).
// Layout: common/multi_tensor.cuh.
// Mutates g, and only where the norm is too large.
//
//   squares_f32, _mixed, _f64  partial sums of squares. Grid: one block a chunk. Block: 128 threads.
//   reduce_squares             partial sums to sums of segments. Grid: one block a segment. Block: 256 threads.
//   norm_and_factor            the norm, and the factor for the gradients. One block of 256 threads.
//   scale_f32, _mixed, _f64    multiplies. Grid: one block a chunk. Block: 128 threads.
#include "common/reduce.cuh"

using namespace ds;

template <bool kFloats, int N>
__device__ __forceinline__ void squares(const Table<1>& table, double* partials) {
  const auto at = Place<1>::find<N>(table);
  float sum[1] = {0.0f};
  if (at.n > 0) {
    Pack<kFloats, N, 1> pack(table, at);
    pack.load(0);
    float g[N];
    pack.floats(0, g);  // what lies past the end was read as 0
#pragma unroll
    for (int i = 0; i < N; ++i) sum[0] = fma_rn(g[i], g[i], sum[0]);
  }
  block_sum<kBlock>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum[0];
}

extern "C" __global__ void __launch_bounds__(kBlock) squares_f32(const Table<1> table, double* partials) {
  squares<true, 4>(table, partials);
}

extern "C" __global__ void __launch_bounds__(kBlock) squares_mixed(const Table<1> table, double* partials) {
  squares<false, 8>(table, partials);
}

extern "C" __global__ void __launch_bounds__(kBlock) squares_f64(const Table<1> table, double* partials) {
  const auto at = Place<1>::find<2>(table);
  double sum[1] = {0.0};
  for (int i = 0; i < at.n; ++i) sum[0] = fma_rn(at.doubles(0)[i], at.doubles(0)[i], sum[0]);
  block_sum<kBlock>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum[0];
}

extern "C" __global__ void __launch_bounds__(kReduceBlock)
    reduce_squares(const double* partials, const i32* segments, double* sums) {
  reduce_segment<1>(partials, segments, sums);
}

// norm_and_factor: double [2].
extern "C" __global__ void __launch_bounds__(kReduceBlock)
    norm_and_factor(const double* sums, i64 segments, double max_norm, double* norm_and_factor) {
  double sum[1];
  sum_rows<kReduceBlock>(sums, 0, segments, sum);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(sum[0]), factor = max_norm / (norm + 1e-6);
  norm_and_factor[0] = norm;
  norm_and_factor[1] = factor >= 1.0 ? 1.0 : factor;  // a NaN stays
}

template <bool kFloats, int N>
__device__ __forceinline__ void scale(const Table<1>& table, const double* factor) {
  const float by = static_cast<float>(*factor);
  if (by == 1.0f) return;
  const auto at = Place<1>::find<N>(table);
  if (at.n <= 0) return;
  Pack<kFloats, N, 1> pack(table, at);
  pack.load(0);
  float g[N];
  pack.floats(0, g);
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = mul_rn(g[i], by);
  pack.round(0, g);
  pack.store(0);
}

extern "C" __global__ void __launch_bounds__(kBlock) scale_f32(const Table<1> table, const double* factor) {
  scale<true, 4>(table, factor);
}

extern "C" __global__ void __launch_bounds__(kBlock) scale_mixed(const Table<1> table, const double* factor) {
  scale<false, 8>(table, factor);
}

extern "C" __global__ void __launch_bounds__(kBlock) scale_f64(const Table<1> table, const double* factor) {
  if (*factor == 1.0) return;
  const auto at = Place<1>::find<2>(table);
  for (int i = 0; i < at.n; ++i) at.doubles(0)[i] = mul_rn(at.doubles(0)[i], *factor);
}
