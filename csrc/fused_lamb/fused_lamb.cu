// Entry points of fused_lamb; the work is in fused_lamb.cuh, the launches in src/deepspeed_ops/lamb_step.py.
//
//   fused_lamb_first_f32, _mixed, _f64    pass 1: moments, partial sums of squares. Grid: one block a chunk. Block: 128 threads.
//   fused_lamb_reduce             partial sums to sums of segments. Grid: one block a segment. Block: 256 threads.
//   fused_lamb_ratio_f32, _f64    trust ratios. Grid: one block a tensor. Block: 128 threads.
//   fused_lamb_second_f32, _mixed, _f64   pass 2: parameters. Grid: one block a chunk. Block: 128 threads.
//   fused_lamb_prepare_f32, _f64  counts a step and derives its size on the device (CUDA graphs, GradScaler).
#include "fused_lamb/fused_lamb.cuh"

using namespace ds;

extern "C" __global__ void __launch_bounds__(kBlock, 8)
    fused_lamb_first_f32(const Table<kLambLists> table, const LambScalars<float> scalars, double* partials) {
  lamb_first<true, 4>(table, scalars, partials);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8)
    fused_lamb_first_mixed(const Table<kLambLists> table, const LambScalars<float> scalars, double* partials) {
  lamb_first<false, 8>(table, scalars, partials);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8)
    fused_lamb_first_f64(const Table<kLambLists> table, const LambScalars<double> scalars, double* partials) {
  lamb_first(table, scalars, partials);
}

extern "C" __global__ void __launch_bounds__(kReduceBlock)
    fused_lamb_reduce(const double* partials, const i32* segments, double* sums) {
  reduce_segment<2>(partials, segments, sums);
}

extern "C" __global__ void __launch_bounds__(kBlock)
    fused_lamb_ratio_f32(const LambRatios<float> ratios, const Control control) {
  lamb_ratio(ratios, control);
}

extern "C" __global__ void __launch_bounds__(kBlock)
    fused_lamb_ratio_f64(const LambRatios<double> ratios, const Control control) {
  lamb_ratio(ratios, control);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8)
    fused_lamb_second_f32(const Table<kLambLists> table, const LambScalars<float> scalars, const float* factors) {
  lamb_second<true, 4>(table, scalars, factors);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8)
    fused_lamb_second_mixed(const Table<kLambLists> table, const LambScalars<float> scalars, const float* factors) {
  lamb_second<false, 8>(table, scalars, factors);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8)
    fused_lamb_second_f64(const Table<kLambLists> table, const LambScalars<double> scalars, const double* factors) {
  lamb_second(table, scalars, factors);
}

template <class M>
__device__ __forceinline__ void prepare(const PrepareArgs& a) {
  const Counted c = count_step_and_bias(a);
  if (c.counts) static_cast<M*>(a.out)[c.i] = static_cast<M>(c.lr * sqrt(c.bias2) / c.bias1);
}

extern "C" __global__ void fused_lamb_prepare_f32(const PrepareArgs args) { prepare<float>(args); }
extern "C" __global__ void fused_lamb_prepare_f64(const PrepareArgs args) { prepare<double>(args); }
