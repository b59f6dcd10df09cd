// Lion over one run of elements, for one SIMD level. Re-included per level by common/simd-foreach.h.
//
// Formula (Chen et al. 2023, algorithm 2), all in float32:
//   c = b1 * m + (1 - b1) * g
//   p = p - lr * (sign(c) + wd * p)        sign(0) = 0: an update of zero moves nothing
//   m = b2 * m + (1 - b2) * g
// p g m: [n], any alignment, not overlapping. p in {float, half, bfloat}, g one of them, m float or p's type.
// Mutates p, m. Reads are widened to float, results rounded to nearest even once at the store; the decay and the step are
// summed before they are taken from p, so p is rounded once. sign of a NaN is that NaN.
#include "common/cpu_run-inl.h"

struct Lion {
  using Hyper = ds::Hyper;
  static constexpr int states = 1;

  template <class P, class G, class S>
  static inline void vector(P* p, const G* g, S* m, S*, const Hyper& h) {
    Vec pv = load(p), gv = load(g), mv = load(m);
    gv = mul(gv, broadcast(h.inv_grad_scale));
    const Vec c = fma(broadcast(h.one_minus_beta1), gv, mul(broadcast(h.beta1), mv));
    // Apart, so that an infinite parameter stays infinite without decay (0 * inf is NaN); for finite ones the same bits.
    const Vec update = h.decay != 0.0f ? fma(broadcast(h.lr), sign(c), mul(broadcast(h.decay), pv))
                                       : mul(broadcast(h.lr), sign(c));
    store(p, sub(pv, update));
    store(m, fma(broadcast(h.one_minus_beta2), gv, mul(broadcast(h.beta2), mv)));
  }
};

inline bool lion(const Run& r, Format p, Format g, Format s, const ds::Hyper& h) {
  return run_formats<Lion>(r, p, g, s, h);
}
