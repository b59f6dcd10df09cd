// Sums over many tensors in a fixed order, so that equal inputs give equal bits: each block adds up its chunk in a tree and
// writes one partial sum; a second kernel adds the partial sums of a segment (kSegment chunks), a third the segments. No
// atomics, nothing waits on the host. Within a chunk in the arithmetic type, between chunks in double.
#pragma once

#include "common/multi_tensor.cuh"

namespace ds {

constexpr int kReduceBlock = 256;  // threads that add up one segment; src/deepspeed_ops/device_table.py: SEGMENT

// kValues sums over the block, of which thread 0 has the result. Every thread of the block must take part.
template <int kThreads, int kValues, class M>
__device__ __forceinline__ void block_sum(M (&x)[kValues]) {
  __shared__ M warp_sums[kThreads / 32][kValues];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) x[k] += __shfl_down_sync(0xffffffffu, x[k], offset);
  }
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) warp_sums[threadIdx.x / 32][k] = x[k];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) x[k] += warp_sums[w][k];
    }
  }
}

// Rows [first, end) of double [rows][kValues], added up by a block; thread 0 has the result.
template <int kThreads, int kValues>
__device__ __forceinline__ void sum_rows(const double* rows, i64 first, i64 end, double (&sum)[kValues]) {
#pragma unroll
  for (int k = 0; k < kValues; ++k) sum[k] = 0.0;
  for (i64 row = first + threadIdx.x; row < end; row += kThreads) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) sum[k] += rows[row * kValues + k];
  }
  block_sum<kThreads>(sum);
}

// One block a segment: [segments][2] = first chunk, number of chunks.
template <int kValues>
__device__ __forceinline__ void reduce_segment(const double* partials, const i32* segments, double* sums) {
  const i64 first = segments[2 * blockIdx.x], count = segments[2 * blockIdx.x + 1];
  double sum[kValues];
  sum_rows<kReduceBlock>(partials, first, first + count, sum);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) sums[static_cast<i64>(blockIdx.x) * kValues + k] = sum[k];
  }
}

}  // namespace ds
