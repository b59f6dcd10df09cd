// Entry points of fused_adam; the work is in fused_adam.cuh, the launches in fused_adam.cpp.
//
//   fused_adam_f32, _mixed, _f64  one step: all f32; any mixture of f32, f16, bf16; all f64. Grid: one block a chunk.
//   fused_adam_prepare_f32, _f64  counts a step and derives its scalars on the device (CUDA graphs, GradScaler).
//   check_finite                  sets *flag to 1 where any gradient is infinite or NaN.
#include "fused_adam/fused_adam.cuh"

using namespace ds;

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_adam_f32(const AdamTable table,
                                                                       const AdamScalars<float> scalars) {
  adam<true, 4>(table, scalars);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_adam_mixed(const AdamTable table,
                                                                         const AdamScalars<float> scalars) {
  adam<false, 8>(table, scalars);
}

extern "C" __global__ void __launch_bounds__(kBlock, 8) fused_adam_f64(const AdamTable table,
                                                                       const AdamScalars<double> scalars) {
  adam(table, scalars);
}

struct PrepareArgs {
  i64* steps;              // [n], counted up where the tensor has a gradient
  const i64* g;            // [n] addresses, 0 = no gradient
  void* out;               // AdamStep [n]
  i64 n;
  const float* lr_tensor;  // [1] or null; takes the place of lr
  double lr, beta1, beta2, decay;  // decay: wd with AdamW, else 0
  i32 bias_correction;
  const i32* noop_flag;    // [1] or null
  const float* found_inf;  // [1] or null
};

template <class M>
__device__ __forceinline__ void prepare(const PrepareArgs& a) {
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= a.n || a.g[i] == 0) return;
  if ((a.noop_flag != nullptr && *a.noop_flag != 0) || (a.found_inf != nullptr && *a.found_inf != 0.0f)) return;
  const double t = static_cast<double>(++a.steps[i]);
  const double lr = a.lr_tensor != nullptr ? static_cast<double>(*a.lr_tensor) : a.lr;
  const double bias1 = a.bias_correction ? 1.0 - pow(a.beta1, t) : 1.0;
  const double bias2 = a.bias_correction ? 1.0 - pow(a.beta2, t) : 1.0;
  AdamStep<M>* out = static_cast<AdamStep<M>*>(a.out) + i;
  out->step_size = static_cast<M>(lr / bias1);
  out->inv_sqrt_bias2 = static_cast<M>(1.0 / sqrt(bias2));
  out->decay = static_cast<M>(lr * a.decay);
}

extern "C" __global__ void fused_adam_prepare_f32(const PrepareArgs args) { prepare<float>(args); }
extern "C" __global__ void fused_adam_prepare_f64(const PrepareArgs args) { prepare<double>(args); }

// x * 0 is NaN exactly for infinities and NaNs.
extern "C" __global__ void __launch_bounds__(kBlock) check_finite(const AdamTable table, i32* flag) {
  bool bad = false;
  if (table.g_format == kF64) {
    const Place at = Place::find<2>(table);
    const double* g = reinterpret_cast<const double*>(at.g) + at.first;
    for (int i = 0; i < at.n; ++i) bad |= g[i] * 0.0 != 0.0;
  } else {
    const Place at = Place::find<4>(table);
    if (at.n > 0) {
      Raw<4> raw;
      raw.load(reinterpret_cast<const void*>(at.g), at.first, table.g_format, at.n, at.n == 4 && at.aligned);
      float g[4];
      raw.to_floats(table.g_format, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) bad |= g[i] * 0.0f != 0.0f;
    }
  }
  // Several blocks may store the same 1: no order matters.
  if (__syncthreads_or(bad) && threadIdx.x == 0) *flag = 1;
}
