// What cpu_adagrad.cpp (FFI) and cpu_adagrad_levels.cpp (arithmetic per SIMD level) share.
#pragma once

#include "common/cpu_kernels.h"

namespace ds {

// Scalars in the arithmetic type.
struct Hyper {
  float lr, eps, weight_decay, inv_grad_scale;
};

using AdagradFn = RunFn<Hyper>;

// The level named `request` ("" = best), or nullptr where this CPU lacks it.
const Level<AdagradFn>* adagrad_level(const char* request);
const Level<ConvertFn>* adagrad_convert_level(const char* request);
std::string adagrad_levels();

}  // namespace ds
