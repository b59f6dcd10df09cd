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
template <class T>
inline Vec load(const T* x) {
  return {to_float(*x)};
}
template <class T>
inline void store(T* out, Vec a) {
  from_float(a.r, out);
}
