// What cpu_adam.cpp (work split, FFI) and cpu_adam_levels.cpp (arithmetic per SIMD level) share.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace ds {

enum class Format : int64_t { f32 = 0, f16 = 1, bf16 = 2 };

// n elements of one tensor, from these addresses on.
struct Run {
  void* p;        // [n], updated
  const void* g;  // [n]
  void* m;        // [n], updated
  void* v;        // [n], updated
  int64_t n;
};

// Per-tensor scalars in the arithmetic type; computed in double from the step, so that bias correction is exact.
struct Hyper {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bias2, decay, l2, inv_grad_scale;
};

// Returns false where the formats of p, g and the moments do not go together.
using AdamFn = bool (*)(const Run&, Format p, Format g, Format state, const Hyper&);

// The level named `request` ("" = best), or nullptr where this CPU lacks it.
const Level<AdamFn>* adam_level(const char* request);
std::string adam_levels();

}  // namespace ds
