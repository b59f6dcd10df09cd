// Four floats: Advanced SIMD of aarch64. Included by common/simd-foreach.h inside namespace ds::neon.

struct Vec {
  static constexpr int width = 4;
  float32x4_t r;
};

inline Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.r, b.r)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.r, b.r)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.r, b.r)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.r, b.r)}; }
inline Vec sqrt(Vec a) { return {vsqrtq_f32(a.r)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.r, a.r, b.r)}; }

// a, or 0 where it is below; a NaN stays.
inline Vec not_below_zero(Vec a) { return {vmaxq_f32(a.r, vdupq_n_f32(0.0f))}; }
// 1, -1 or 0 by the sign of a; 0 for both zeros, a NaN stays.
inline Vec sign(Vec a) {
  const float32x4_t zero = vdupq_n_f32(0.0f);
  const uint32x4_t positive = vcgtq_f32(a.r, zero), negative = vcltq_f32(a.r, zero);
  const float32x4_t moved = vbslq_f32(positive, vdupq_n_f32(1.0f), vbslq_f32(negative, vdupq_n_f32(-1.0f), zero));
  return {vbslq_f32(vceqq_f32(a.r, a.r), moved, a.r)};
}

inline Vec load(const float* x) { return {vld1q_f32(x)}; }
inline Vec load(const half_t* x) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(x))))};
}
inline Vec load(const bfloat_t* x) {
  const uint32x4_t wide = vmovl_u16(vld1_u16(reinterpret_cast<const uint16_t*>(x)));
  return {vreinterpretq_f32_u32(vshlq_n_u32(wide, 16))};
}

inline void store(float* out, Vec a) { vst1q_f32(out, a.r); }
inline void store(half_t* out, Vec a) {
  vst1_u16(reinterpret_cast<uint16_t*>(out), vreinterpret_u16_f16(vcvt_f16_f32(a.r)));
}
inline void store(bfloat_t* out, Vec a) {
  const uint32x4_t u = vreinterpretq_u32_f32(a.r);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  const uint32x4_t quiet = vorrq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(0x40));
  const uint32x4_t is_number = vceqq_f32(a.r, a.r);
  vst1_u16(reinterpret_cast<uint16_t*>(out), vmovn_u32(vbslq_u32(is_number, rounded, quiet)));
}
