// Entry points of fused_adam; the work is in fused_adam.cuh, the launches in src/deepspeed_ops/adam_step.py.
//
//   fused_adam_f32, _mixed, _f64  one step: all f32; any mixture of f32, f16, bf16; all f64. Grid: one block a chunk.
//   fused_adam_prepare_f32, _f64  counts a step and derives its scalars on the device (CUDA graphs, GradScaler).
//   check_finite                  sets *flag to 1 where any gradient is infinite or NaN.
#include "fused_adam/fused_adam.cuh"

using namespace ds;

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_adam_f32(const Table<kAdamLists> table,
                                                                       const AdamScalars<float> scalars) {
  adam<true, 4>(table, scalars);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_adam_mixed(const Table<kAdamLists> table,
                                                                         const AdamScalars<float> scalars) {
  adam<false, 8>(table, scalars);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_adam_f64(const Table<kAdamLists> table,
                                                                       const AdamScalars<double> scalars) {
  adam(table, scalars);
}

template <class M>
__device__ __forceinline__ void prepare(const PrepareArgs& a) {
  const Counted c = count_step_and_bias(a);
  if (!c.counts) return;
  AdamStep<M>* out = static_cast<AdamStep<M>*>(a.out) + c.i;
  out->step_size = static_cast<M>(c.lr / c.bias1);
  out->inv_sqrt_bias2 = static_cast<M>(1.0 / sqrt(c.bias2));
  out->decay = static_cast<M>(c.lr * a.decay);  // decay: wd with AdamW, else 0
}

extern "C" __global__ void fused_adam_prepare_f32(const PrepareArgs args) { prepare<float>(args); }
extern "C" __global__ void fused_adam_prepare_f64(const PrepareArgs args) { prepare<double>(args); }

// x * 0 is NaN exactly for infinities and NaNs.
extern "C" __global__ void __launch_bounds__(kBlock) check_finite(const Table<1> table, i32* flag) {
  bool bad = false;
  if (table.format[0] == kF64) {
    const auto at = Place<1>::find<2>(table);
    for (int i = 0; i < at.n; ++i) bad |= at.doubles(0)[i] * 0.0 != 0.0;
  } else {
    const auto at = Place<1>::find<4>(table);
    if (at.n > 0) {
      Pack<false, 4, 1> pack(table, at);
      pack.load(0);
      float g[4];
      pack.floats(0, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) bad |= g[i] * 0.0f != 0.0f;
    }
  }
  // Several blocks may store the same 1: no order matters.
  if (__syncthreads_or(bad) && threadIdx.x == 0) *flag = 1;
}
