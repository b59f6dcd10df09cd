// From a formula over one vector to a function over one run of elements of any formats, for one SIMD level. Included by an
// op's -inl.h, inside the level's namespace.
//
// A formula is a struct with `using Hyper`, `static constexpr int states` (1 or 2) and
//   template <class P, class G, class S> static void vector(P* p, const G* g, S* m, S* v, const Hyper& h)
// which updates Vec::width elements of p, m and v (v is m where states is 1). Each element's arithmetic is the same whether
// it falls in a full vector or in the tail, which is worked on in a copy.

template <class Formula, class P, class G, class S>
void run_elements(P* p, const G* g, S* m, S* v, int64_t n, const typename Formula::Hyper& h) {
  int64_t i = 0;
  for (; i + Vec::width <= n; i += Vec::width) Formula::vector(p + i, g + i, m + i, v + i, h);
  const int64_t rest = n - i;
  if (rest == 0) return;
  P pt[Vec::width] = {};
  G gt[Vec::width] = {};
  S mt[Vec::width] = {}, vt[Vec::width] = {};
  for (int64_t j = 0; j < rest; ++j) pt[j] = p[i + j], gt[j] = g[i + j], mt[j] = m[i + j], vt[j] = v[i + j];
  Formula::vector(pt, gt, mt, Formula::states == 2 ? vt : mt, h);
  for (int64_t j = 0; j < rest; ++j) {
    p[i + j] = pt[j], m[i + j] = mt[j];
    if (Formula::states == 2) v[i + j] = vt[j];
  }
}

template <class Formula, class P, class G, class S>
inline void run_typed(const Run& r, const typename Formula::Hyper& h) {
  S* const m = static_cast<S*>(r.state[0]);
  S* const v = Formula::states == 2 ? static_cast<S*>(r.state[1]) : m;
  run_elements<Formula>(static_cast<P*>(r.p), static_cast<const G*>(r.g), m, v, r.n, h);
}

template <class Formula, class P, class G>
inline bool run_states(const Run& r, Format state, Format own, const typename Formula::Hyper& h) {
  if (state == Format::f32) return run_typed<Formula, P, G, float>(r, h), true;
  if (state == own) return run_typed<Formula, P, G, P>(r, h), true;
  return false;
}

// One run of elements; false where the combination of formats is not supported.
template <class Formula>
inline bool run_formats(const Run& r, Format p, Format g, Format s, const typename Formula::Hyper& h) {
  if (p == Format::f32) {
    if (g == Format::f32) return run_states<Formula, float, float>(r, s, p, h);
    if (g == Format::f16) return run_states<Formula, float, half_t>(r, s, p, h);
    if (g == Format::bf16) return run_states<Formula, float, bfloat_t>(r, s, p, h);
  } else if (p == Format::f16) {
    if (g == Format::f16) return run_states<Formula, half_t, half_t>(r, s, p, h);
    if (g == Format::f32) return run_states<Formula, half_t, float>(r, s, p, h);
  } else if (p == Format::bf16) {
    if (g == Format::bf16) return run_states<Formula, bfloat_t, bfloat_t>(r, s, p, h);
    if (g == Format::f32) return run_states<Formula, bfloat_t, float>(r, s, p, h);
  }
  return false;
}

template <class T>
inline void convert_to(const float* from, T* to, int64_t n) {
  int64_t i = 0;
  for (; i + Vec::width <= n; i += Vec::width) store(to + i, load(from + i));
  for (; i < n; ++i) from_float(from[i], to + i);  // the same bits: numbers.h
}

// The low-precision copy of parameters that were just updated and are still in the cache.
inline void convert(const float* from, void* to, Format format, int64_t n) {
  if (format == Format::f16) convert_to(from, static_cast<half_t*>(to), n);
  if (format == Format::bf16) convert_to(from, static_cast<bfloat_t*>(to), n);
}
