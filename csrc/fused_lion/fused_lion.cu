// Entry points of fused_lion; the work is in fused_lion.cuh, the launches in src/deepspeed_ops/lion_step.py.
//
//   fused_lion_f32, _mixed, _f64  one step: all f32; any mixture of f32, f16, bf16; all f64. Grid: one block a chunk.
//   fused_lion_prepare            counts a step on the device (CUDA graphs, GradScaler).
#include "fused_lion/fused_lion.cuh"

using namespace ds;

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_lion_f32(const Table<kLionLists> table,
                                                                       const LionScalars<float> scalars) {
  lion<true, 4>(table, scalars);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_lion_mixed(const Table<kLionLists> table,
                                                                         const LionScalars<float> scalars) {
  lion<false, 8>(table, scalars);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_lion_f64(const Table<kLionLists> table,
                                                                       const LionScalars<double> scalars) {
  lion(table, scalars);
}

extern "C" __global__ void fused_lion_prepare(const PrepareArgs args) { count_step(args); }
