// What cpu_adam.cpp (FFI) and cpu_adam_levels.cpp (arithmetic per SIMD level) share.
#pragma once

#include "common/cpu_kernels.h"

namespace ds {

// Per-tensor scalars in the arithmetic type; computed in double from the step, so that bias correction is exact.
struct Hyper {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bias2, decay, l2, inv_grad_scale;
};

// The same for taking a step back.
struct BackHyper {
  float inv_beta1, one_minus_beta1, inv_beta2, one_minus_beta2, eps, step_size, inv_sqrt_bias2, inv_keep, l2,
      inv_grad_scale;
};

using AdamFn = RunFn<Hyper>;
using AdamBackFn = RunFn<BackHyper>;

// The level named `request` ("" = best), or nullptr where this CPU lacks it.
const Level<AdamFn>* adam_level(const char* request);
const Level<AdamBackFn>* adam_back_level(const char* request);
const Level<ConvertFn>* adam_convert_level(const char* request);
std::string adam_levels();

}  // namespace ds
