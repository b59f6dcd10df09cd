// What the host code of an op on CPU tensors (work split, FFI) and its arithmetic per SIMD level share.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace ds {

enum class Format : int64_t { f32 = 0, f16 = 1, bf16 = 2 };

inline int64_t bytes_of(Format f) { return f == Format::f32 ? 4 : 2; }

// n elements of one tensor, from these addresses on.
struct Run {
  void* p;         // [n], updated
  const void* g;   // [n]
  void* state[2];  // [n] each, updated: the op's moments; the second is null where the op has one
  int64_t n;
};

// The arithmetic of an op on one run of elements; false where the formats of p, g and the state do not go together.
template <class Hyper>
using RunFn = bool (*)(const Run&, Format p, Format g, Format state, const Hyper&);

// Writes float numbers in a half format: [n] each.
using ConvertFn = void (*)(const float* from, void* to, Format format, int64_t n);

}  // namespace ds
