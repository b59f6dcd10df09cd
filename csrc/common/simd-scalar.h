// One float at a time, for any CPU. Included by common/simd-foreach.h inside namespace ds::scalar.
//
// fma() is one rounding where the compiler has the instruction (FP_FAST_FMAF: every aarch64) and two elsewhere: a call of
// the C library's software fma would be an order of magnitude slower than the two instructions.

struct Vec {
  static constexpr int width = 1;
  float r;
};

inline Vec broadcast(float x) { return {x}; }
inline Vec add(Vec a, Vec b) { return {a.r + b.r}; }
inline Vec sub(Vec a, Vec b) { return {a.r - b.r}; }
inline Vec mul(Vec a, Vec b) { return {a.r * b.r}; }
inline Vec div(Vec a, Vec b) { return {a.r / b.r}; }
inline Vec sqrt(Vec a) { return {::sqrtf(a.r)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef FP_FAST_FMAF
  return {::fmaf(a.r, b.r, c.r)};
#else
  return {a.r * b.r + c.r};
#endif
}
// a, or 0 where it is below; a NaN stays.
inline Vec not_below_zero(Vec a) { return {a.r < 0.0f ? 0.0f : a.r}; }
// 1, -1 or 0 by the sign of a; 0 for both zeros, a NaN stays.
inline Vec sign(Vec a) { return {a.r > 0.0f ? 1.0f : a.r < 0.0f ? -1.0f : a.r == 0.0f ? 0.0f : a.r}; }

template <class T>
inline Vec load(const T* x) {
  return {to_float(*x)};
}
template <class T>
inline void store(T* out, Vec a) {
  from_float(a.r, out);
}
