// Eight floats: AVX2 with FMA3 and F16C. Included by common/simd-foreach.h inside namespace ds::avx2.

struct Vec {
  static constexpr int width = 8;
  __m256 r;
};

inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.r, b.r)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.r, b.r)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.r, b.r)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.r, b.r)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.r)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.r, b.r, c.r)}; }

// a, or 0 where it is below; a NaN stays (max returns its second operand then).
inline Vec not_below_zero(Vec a) { return {_mm256_max_ps(_mm256_setzero_ps(), a.r)}; }
// 1, -1 or 0 by the sign of a; 0 for both zeros, a NaN stays.
inline Vec sign(Vec a) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 one = _mm256_or_ps(_mm256_and_ps(a.r, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
  const __m256 moved = _mm256_and_ps(_mm256_cmp_ps(a.r, zero, _CMP_NEQ_OQ), one);
  return {_mm256_or_ps(moved, _mm256_and_ps(_mm256_cmp_ps(a.r, zero, _CMP_UNORD_Q), a.r))};
}

inline Vec load(const float* x) { return {_mm256_loadu_ps(x)}; }
inline Vec load(const half_t* x) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))}; }
inline Vec load(const bfloat_t* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

inline void store(float* out, Vec a) { _mm256_storeu_ps(out, a.r); }
inline void store(half_t* out, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(a.r, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bfloat_t* out, Vec a) {
  const __m256i u = _mm256_castps_si256(a.r);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.r, a.r, _CMP_UNORD_Q));
  const __m256i picked = _mm256_blendv_epi8(rounded, quiet, is_nan);
  // Every 32-bit lane holds 16 significant bits: pack without saturation loss, then undo the per-half interleave.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(picked, picked), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
}
