// Sixteen floats: AVX-512 F, BW, DQ, VL. Included by common/simd-foreach.h inside namespace ds::avx512.

struct Vec {
  static constexpr int width = 16;
  __m512 r;
};

inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.r, b.r)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.r, b.r)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.r, b.r)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.r, b.r)}; }
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.r)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.r, b.r, c.r)}; }

// a, or 0 where it is below; a NaN stays (max returns its second operand then).
inline Vec not_below_zero(Vec a) { return {_mm512_max_ps(_mm512_setzero_ps(), a.r)}; }
// 1, -1 or 0 by the sign of a; 0 for both zeros, a NaN stays.
inline Vec sign(Vec a) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 one = _mm512_or_ps(_mm512_and_ps(a.r, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(1.0f));
  const __m512 moved = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.r, zero, _CMP_NEQ_OQ), one);
  return {_mm512_mask_mov_ps(moved, _mm512_cmp_ps_mask(a.r, zero, _CMP_UNORD_Q), a.r)};
}

inline Vec load(const float* x) { return {_mm512_loadu_ps(x)}; }
inline Vec load(const half_t* x) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))}; }
inline Vec load(const bfloat_t* x) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline void store(float* out, Vec a) { _mm512_storeu_ps(out, a.r); }
inline void store(half_t* out, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(a.r, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bfloat_t* out, Vec a) {
  const __m512i u = _mm512_castps_si512(a.r);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.r, a.r, _CMP_UNORD_Q);
  const __m512i picked = _mm512_mask_mov_epi32(rounded, is_nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(picked));
}
