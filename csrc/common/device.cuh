// What every kernel stands on: integer types, number formats, vector accesses. Includes nothing, so that nvcc and NVRTC
// compile it alike and NVRTC needs no include path (it has no <cstdint>, and CUDA's fp16 headers sit in a different place
// in every wheel).
#pragma once

namespace ds {

// Not int64_t and friends: nvcc brings those in with types of its own, NVRTC does not.
using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
static_assert(sizeof(i64) == 8 && sizeof(i32) == 4 && sizeof(u16) == 2, "LP64 and LLP64 agree on these");

__device__ __forceinline__ float half_to_float(u16 bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

__device__ __forceinline__ u16 float_to_half(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ float bfloat_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// To nearest, ties to even; a NaN stays one. cvt.rn.bf16.f32 exists from sm_80 on; below, the same by shift and round.
__device__ __forceinline__ u16 float_to_bfloat(float x) {
#if __CUDA_ARCH__ >= 800
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#else
  const u32 u = __float_as_uint(x);
  const u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return static_cast<u16>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
}

// Formats chosen at run time: one kernel serves every combination of them. A kernel that moves memory has cycles to spare
// for a uniform branch, and a twelfth of the code is a twelfth of the time that a user waits for NVRTC.
enum Format : i32 { kF32 = 0, kF16 = 1, kBF16 = 2, kF64 = 3 };

// Four elements of a float or half format as they lie in memory; converted after the last load of a kernel was issued, so
// that no load waits for another.
struct Raw4 {
  u32 word[4];  // f32: one element a word; f16, bf16: elements 0-1 in word 0, 2-3 in word 1

  // `whole`: by one 16-byte or 8-byte access, from an address aligned to it; else the first n one by one, the rest 0.
  __device__ __forceinline__ void load(const void* base, i64 index, Format f, int n, bool whole) {
    if (f == kF32) {
      const u32* from = static_cast<const u32*>(base) + index;
      if (whole) {
        *reinterpret_cast<uint4*>(word) = *reinterpret_cast<const uint4*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = i < n ? from[i] : 0u;
      }
    } else {
      const u16* from = static_cast<const u16*>(base) + index;
      if (whole) {
        *reinterpret_cast<uint2*>(word) = *reinterpret_cast<const uint2*>(from);
      } else {
        word[0] = (0 < n ? from[0] : 0u) | (1 < n ? static_cast<u32>(from[1]) << 16 : 0u);
        word[1] = (2 < n ? from[2] : 0u) | (3 < n ? static_cast<u32>(from[3]) << 16 : 0u);
      }
    }
  }

  __device__ __forceinline__ void store(void* base, i64 index, Format f, int n, bool whole) const {
    if (f == kF32) {
      u32* to = static_cast<u32*>(base) + index;
      if (whole) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(word);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < n) to[i] = word[i];
        }
      }
    } else {
      u16* to = static_cast<u16*>(base) + index;
      if (whole) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(word);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < n) to[i] = static_cast<u16>(word[i / 2] >> (i % 2 * 16));
        }
      }
    }
  }

  __device__ __forceinline__ void to_floats(Format f, float (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u16 half = static_cast<u16>(word[i / 2] >> (i % 2 * 16));
      x[i] = f == kF32 ? __uint_as_float(word[i]) : f == kF16 ? half_to_float(half) : bfloat_to_float(half);
    }
  }

  __device__ __forceinline__ void from_floats(Format f, const float (&x)[4]) {
    if (f == kF32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = __float_as_uint(x[i]);
      return;
    }
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = f == kF16 ? float_to_half(x[i]) : float_to_bfloat(x[i]);
    word[0] = bits[0] | bits[1] << 16;
    word[1] = bits[2] | bits[3] << 16;
  }
};

}  // namespace ds
