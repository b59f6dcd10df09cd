// Adagrad over one run of elements, for one SIMD level. Re-included per level by common/simd-foreach.h.
//
// Formula (Duchi et al. 2011, diagonal case), all in float32:
//   g = g + wd * p
//   v = v + g^2
//   p = p - lr * g / (sqrt(v) + eps)
// p g v: [n], any alignment, not overlapping. p in {float, half, bfloat}, g one of them, v float or p's type.
// Mutates p, v; not g. Reads are widened to float, results rounded to nearest even once at the store.
#include "common/cpu_run-inl.h"

struct Adagrad {
  using Hyper = ds::Hyper;
  static constexpr int states = 1;

  template <class P, class G, class S>
  static inline void vector(P* p, const G* g, S* v, S*, const Hyper& h) {
    Vec pv = load(p), gv = load(g), vv = load(v);
    gv = mul(gv, broadcast(h.inv_grad_scale));
    if (h.weight_decay != 0.0f) gv = fma(broadcast(h.weight_decay), pv, gv);
    vv = fma(gv, gv, vv);
    const Vec denom = add(sqrt(vv), broadcast(h.eps));
    store(p, sub(pv, mul(broadcast(h.lr), div(gv, denom))));
    store(v, vv);
  }
};

inline bool adagrad(const Run& r, Format p, Format g, Format s, const ds::Hyper& h) {
  return run_formats<Adagrad>(r, p, g, s, h);
}
