// What cpu_lion.cpp (FFI) and cpu_lion_levels.cpp (arithmetic per SIMD level) share.
#pragma once

#include "common/cpu_kernels.h"

namespace ds {

// Scalars in the arithmetic type.
struct Hyper {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay, inv_grad_scale;
};

using LionFn = RunFn<Hyper>;

// The level named `request` ("" = best), or nullptr where this CPU lacks it.
const Level<LionFn>* lion_level(const char* request);
const Level<ConvertFn>* lion_convert_level(const char* request);
std::string lion_levels();

}  // namespace ds
