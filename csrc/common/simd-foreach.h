// Includes DS_SIMD_BODY once per SIMD level of this architecture, each time inside namespace ds::<level> and under the
// target pragma that allows the level's instructions. The body sees `Vec` of common/simd-<level>.h. No guard: an op
// includes this file once.
//
// The body must not instantiate templates of the standard library: such an instantiation could be compiled with the
// level's instructions and then be the copy that the linker keeps for all callers.

#ifndef DS_SIMD_BODY
#error "define DS_SIMD_BODY to the op's -inl.h before including common/simd-foreach.h"
#endif

#if DS_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace ds::avx2 {
#include "common/simd-avx2.h"
#include DS_SIMD_BODY
}  // namespace ds::avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#elif defined(__GNUC__)
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
namespace ds::avx512 {
#include "common/simd-avx512.h"
#include DS_SIMD_BODY
}  // namespace ds::avx512
#if defined(__clang__)
#pragma clang attribute pop
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif
#elif DS_ARM64
namespace ds::neon {
#include "common/simd-neon.h"
#include DS_SIMD_BODY
}  // namespace ds::neon
#endif

namespace ds::scalar {
#include "common/simd-scalar.h"
#include DS_SIMD_BODY
}  // namespace ds::scalar

#if DS_X86
#define DS_LEVEL_TABLE(fn) {{"avx512", ds::avx512::fn}, {"avx2", ds::avx2::fn}, {"scalar", ds::scalar::fn}}
#elif DS_ARM64
#define DS_LEVEL_TABLE(fn) {{"neon", ds::neon::fn}, {"scalar", ds::scalar::fn}}
#else
#define DS_LEVEL_TABLE(fn) {{"scalar", ds::scalar::fn}}
#endif
