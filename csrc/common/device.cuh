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

// N elements of a float or half format as they lie in memory; converted after the last load of a kernel was issued, so that
// no load waits for another.
template <int N>
struct Raw {
  static_assert(N == 4 || N == 8, "whole accesses of 8 or 16 bytes");
  u32 word[N];  // f32: one element a word; f16, bf16: elements 2 i and 2 i + 1 in word i

  // `whole`: by 16-byte accesses (8-byte for 4 halves), from an address aligned to them; else the first n one by one, the
  // rest 0.
  __device__ __forceinline__ void load(const void* base, i64 index, Format f, int n, bool whole) {
    if (f == kF32) {
      const u32* from = static_cast<const u32*>(base) + index;
      if (whole) {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) reinterpret_cast<uint4*>(word)[i] = reinterpret_cast<const uint4*>(from)[i];
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) word[i] = i < n ? from[i] : 0u;
      }
    } else {
      const u16* from = static_cast<const u16*>(base) + index;
      if (whole) {
        copy_halves(word, from);
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          word[i] = (2 * i < n ? from[2 * i] : 0u) | (2 * i + 1 < n ? static_cast<u32>(from[2 * i + 1]) << 16 : 0u);
        }
      }
    }
  }

  __device__ __forceinline__ void store(void* base, i64 index, Format f, int n, bool whole) const {
    if (f == kF32) {
      u32* to = static_cast<u32*>(base) + index;
      if (whole) {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(word)[i];
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (i < n) to[i] = word[i];
        }
      }
    } else {
      u16* to = static_cast<u16*>(base) + index;
      if (whole) {
        copy_halves(to, word);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (i < n) to[i] = half_of(i);
        }
      }
    }
  }

  // The format is asked once for the whole pack, not for each element.
  __device__ __forceinline__ void to_floats(Format f, float (&x)[N]) const {
    if (f == kF32) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = __uint_as_float(word[i]);
    } else if (f == kF16) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = half_to_float(half_of(i));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = bfloat_to_float(half_of(i));
    }
  }

  __device__ __forceinline__ void from_floats(Format f, const float (&x)[N]) {
    if (f == kF32) {
#pragma unroll
      for (int i = 0; i < N; ++i) word[i] = __float_as_uint(x[i]);
    } else if (f == kF16) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) word[i] = float_to_half(x[2 * i]) | static_cast<u32>(float_to_half(x[2 * i + 1])) << 16;
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        word[i] = float_to_bfloat(x[2 * i]) | static_cast<u32>(float_to_bfloat(x[2 * i + 1])) << 16;
      }
    }
  }

 private:
  __device__ __forceinline__ u16 half_of(int i) const { return static_cast<u16>(word[i / 2] >> (i % 2 * 16)); }

  static __device__ __forceinline__ void copy_halves(void* to, const void* from) {
    if constexpr (N == 8) {
      *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    } else {
      *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
    }
  }
};

}  // namespace ds
