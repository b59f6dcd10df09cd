// Adam and AdamW over one run of elements, for one SIMD level, and the way back. Re-included per level by
// common/simd-foreach.h.
//
// Formula (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2), t = step, all in float32:
//   L2:     g = g + wd * p
//           m = b1 * m + (1 - b1) * g
//           v = b2 * v + (1 - b2) * g^2
//           p = p - (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)  [- lr * wd * p with AdamW]
// Back, from p, m and v after step t and the gradient of that step:
//           p = (p + (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)) / (1 - lr * wd with AdamW)
//   L2:     g = g + wd * p
//           m = (m - (1 - b1) * g) / b1,  v = max(0, (v - (1 - b2) * g^2) / b2);  both 0 where t is 1 or the beta is 0
// p g m v: [n], any alignment, not overlapping. p in {float, half, bfloat}, g one of them, m and v float or p's type.
// Mutates p, m, v. Reads are widened to float, results rounded to nearest even once at the store; the AdamW decay and the
// step are summed before they are taken from p, so p is rounded once.
#include "common/cpu_run-inl.h"

struct Adam {
  using Hyper = ds::Hyper;
  static constexpr int states = 2;

  template <class P, class G, class S>
  static inline void vector(P* p, const G* g, S* m, S* v, const Hyper& h) {
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
};

struct AdamBack {
  using Hyper = ds::BackHyper;
  static constexpr int states = 2;

  template <class P, class G, class S>
  static inline void vector(P* p, const G* g, S* m, S* v, const Hyper& h) {
    Vec pv = load(p), gv = load(g), mv = load(m), vv = load(v);
    const Vec denom = fma(sqrt(vv), broadcast(h.inv_sqrt_bias2), broadcast(h.eps));
    pv = mul(fma(broadcast(h.step_size), div(mv, denom), pv), broadcast(h.inv_keep));
    gv = mul(gv, broadcast(h.inv_grad_scale));
    if (h.l2 != 0.0f) gv = fma(broadcast(h.l2), pv, gv);
    mv = mul(sub(mv, mul(broadcast(h.one_minus_beta1), gv)), broadcast(h.inv_beta1));
    vv = mul(sub(vv, mul(mul(broadcast(h.one_minus_beta2), gv), gv)), broadcast(h.inv_beta2));
    store(p, pv);
    store(m, mv);
    store(v, not_below_zero(vv));
  }
};

inline bool adam(const Run& r, Format p, Format g, Format s, const ds::Hyper& h) {
  return run_formats<Adam>(r, p, g, s, h);
}
inline bool adam_back(const Run& r, Format p, Format g, Format s, const ds::BackHyper& h) {
  return run_formats<AdamBack>(r, p, g, s, h);
}
