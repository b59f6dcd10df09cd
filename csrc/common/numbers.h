// Number formats of the host code: IEEE binary16 and bfloat16 as storage types, float as the arithmetic type.
//
// Rounding to a narrower format is to nearest, ties to even, as F16C's vcvtps2ph and CUDA's cvt.rn do; overflow gives an
// infinity, denormals are kept, a NaN stays a NaN (quieted). These are the scalar forms; the vector forms in
// simd-<level>.h give the same bits, which tests/ops/cpu_adam proves over all 65,536 patterns.
#pragma once

#include <cstdint>
#include <cstring>

namespace ds {

struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
}

inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof(x));
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(bfloat_t x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(half_t x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1fu) {
    // Infinity, or a NaN: set the quiet bit as the hardware conversion does.
    return bits_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x00400000u : 0u));
  }
  if (exponent == 0) {
    // Zero or denormal: mantissa * 2^-24 is exact in float.
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    return bits_float(sign | float_bits(magnitude));
  }
  return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline void from_float(float x, float* out) { *out = x; }

inline void from_float(float x, bfloat_t* out) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((u >> 16) | 0x0040u);
    return;
  }
  out->bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline void from_float(float x, half_t* out) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  uint32_t h;
  if (magnitude > 0x7f800000u) {
    h = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {
    // 65,520 is the midpoint between the largest half and 2^16: it and all above round to infinity.
    h = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is denormal: adding 0.5 lines the float's last bit up with 2^-24 and rounds to even.
    h = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    h = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | h);
}

}  // namespace ds
