// Adam and AdamW over one run of elements, for one SIMD level. Re-included per level by common/simd-foreach.h.
//
// Formula (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2), t = step, all in float32:
//   L2:     g = g + wd * p
//           m = b1 * m + (1 - b1) * g
//           v = b2 * v + (1 - b2) * g^2
//           p = p - (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)  [- lr * wd * p with AdamW]
// p g m v: [n], any alignment, not overlapping. p in {float, half, bfloat}, g one of them, m and v float or p's type.
// Mutates p, m, v. Reads are widened to float, results rounded to nearest even once at the store; the AdamW decay and the
// step are summed before they are taken from p, so p is rounded once. Each element's arithmetic is the same whether it
// falls in a full vector or in the tail.

template <class P, class G, class S>
inline void adam_vector(P* p, const G* g, S* m, S* v, const Hyper& h) {
  Vec pv = load(p), gv = load(g), mv = load(m), vv = load(v);
  gv = mul(gv, broadcast(h.inv_grad_scale));
  if (h.l2 != 0.0f) gv = fma(broadcast(h.l2), pv, gv);
  mv = fma(broadcast(h.one_minus_beta1), gv, mul(broadcast(h.beta1), mv));
  vv = fma(mul(broadcast(h.one_minus_beta2), gv), gv, mul(broadcast(h.beta2), vv));
  const Vec denom = fma(sqrt(vv), broadcast(h.inv_sqrt_bias2), broadcast(h.eps));
  const Vec direction = div(mv, denom);
  // Apart, so that an infinite parameter stays infinite without decay (0 * inf is NaN); for finite ones the same bits.
  const Vec update = h.decay != 0.0f ? fma(broadcast(h.step_size), direction, mul(broadcast(h.decay), pv))
                                     : mul(broadcast(h.step_size), direction);
  store(p, sub(pv, update));
  store(m, mv);
  store(v, vv);
}

template <class P, class G, class S>
void adam_run(P* p, const G* g, S* m, S* v, int64_t n, const Hyper& h) {
  int64_t i = 0;
  for (; i + Vec::width <= n; i += Vec::width) adam_vector(p + i, g + i, m + i, v + i, h);
  const int64_t rest = n - i;
  if (rest == 0) return;
  P pt[Vec::width] = {};
  G gt[Vec::width] = {};
  S mt[Vec::width] = {}, vt[Vec::width] = {};
  for (int64_t j = 0; j < rest; ++j) pt[j] = p[i + j], gt[j] = g[i + j], mt[j] = m[i + j], vt[j] = v[i + j];
  adam_vector(pt, gt, mt, vt, h);
  for (int64_t j = 0; j < rest; ++j) p[i + j] = pt[j], m[i + j] = mt[j], v[i + j] = vt[j];
}

template <class P, class G, class S>
inline void adam_typed(const Run& r, const Hyper& h) {
  adam_run(static_cast<P*>(r.p), static_cast<const G*>(r.g), static_cast<S*>(r.m), static_cast<S*>(r.v), r.n, h);
}

template <class P, class G>
inline bool adam_states(const Run& r, Format state, Format own, const Hyper& h) {
  if (state == Format::f32) return adam_typed<P, G, float>(r, h), true;
  if (state == own) return adam_typed<P, G, P>(r, h), true;
  return false;
}

// One run of elements; false where the combination of formats is not supported.
inline bool adam(const Run& r, Format p, Format g, Format s, const Hyper& h) {
  if (p == Format::f32) {
    if (g == Format::f32) return adam_states<float, float>(r, s, p, h);
    if (g == Format::f16) return adam_states<float, half_t>(r, s, p, h);
    if (g == Format::bf16) return adam_states<float, bfloat_t>(r, s, p, h);
  } else if (p == Format::f16) {
    if (g == Format::f16) return adam_states<half_t, half_t>(r, s, p, h);
    if (g == Format::f32) return adam_states<half_t, float>(r, s, p, h);
  } else if (p == Format::bf16) {
    if (g == Format::bf16) return adam_states<bfloat_t, bfloat_t>(r, s, p, h);
    if (g == Format::f32) return adam_states<bfloat_t, float>(r, s, p, h);
  }
  return false;
}
