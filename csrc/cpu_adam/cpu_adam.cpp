// cpu_adam: Adam and AdamW on CPU tensors. The arithmetic is in cpu_adam-inl.h, the work split in common/cpu_table.h; here
// are the scalars and the FFI functions.
// Errors: those of common/cpu_table.h.
#include <cmath>

#include "common/cpu_table.h"
#include "cpu_adam/cpu_adam.h"

namespace ds {
namespace {

namespace ffi = tvm::ffi;

// The arguments of the functions below: every field 8 bytes, in this order, filled by src/deepspeed_ops/adam_step.py.
struct StepArgs {
  int64_t table, steps, n;                   // as in TableView
  int64_t p_format, g_format, state_format;
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  int64_t adamw, bias_correction;  // 0 or 1
  int64_t threads;

  TableView view() const { return {table, steps, n, p_format, g_format, state_format, 2, threads}; }
};

struct Bias {
  double first, second;  // 1 - beta^t, or 1

  Bias(const StepArgs& a, int64_t step) {
    const double t = static_cast<double>(step);
    first = a.bias_correction ? 1.0 - std::pow(a.beta1, t) : 1.0;
    second = a.bias_correction ? 1.0 - std::pow(a.beta2, t) : 1.0;
  }
};

struct Forward {
  const StepArgs& a;

  Hyper at(int64_t step) const {
    const Bias bias(a, step);
    Hyper h;
    h.beta1 = static_cast<float>(a.beta1);
    h.one_minus_beta1 = static_cast<float>(1.0 - a.beta1);
    h.beta2 = static_cast<float>(a.beta2);
    h.one_minus_beta2 = static_cast<float>(1.0 - a.beta2);
    h.eps = static_cast<float>(a.eps);
    h.step_size = static_cast<float>(a.lr / bias.first);
    h.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias.second));
    h.decay = a.adamw ? static_cast<float>(a.lr * a.weight_decay) : 0.0f;
    h.l2 = a.adamw ? 0.0f : static_cast<float>(a.weight_decay);
    h.inv_grad_scale = static_cast<float>(1.0 / a.grad_scale);
    return h;
  }
};

struct Back {
  const StepArgs& a;

  // Before step 1 the moments were 0; where beta is 0 the old moment is lost and has no effect.
  static float inverse(double beta, int64_t step) { return beta == 0.0 || step == 1 ? 0.0f : static_cast<float>(1.0 / beta); }

  BackHyper at(int64_t step) const {
    const Hyper h = Forward{a}.at(step);
    return {inverse(a.beta1, step), h.one_minus_beta1, inverse(a.beta2, step), h.one_minus_beta2, h.eps,
            h.step_size, h.inv_sqrt_bias2, a.adamw ? static_cast<float>(1.0 / (1.0 - a.lr * a.weight_decay)) : 1.0f,
            h.l2, h.inv_grad_scale};
  }
};

const StepArgs& args_at(int64_t address) { return *reinterpret_cast<const StepArgs*>(address); }

// One step for every tensor of a table, at the SIMD level named `simd` ("" = best). Arg: address of StepArgs. Returns how
// many threads took part.
int64_t step_table(int64_t args, const ffi::String& simd) {
  const std::string request = simd;
  const AdamFn fn = level_or_throw(adam_level(request.c_str()), request, adam_levels()).fn;
  const Forward scalars{args_at(args)};
  const TableView view = scalars.a.view();
  return TableStep<Hyper, Forward>("cpu_adam", view, fn, scalars).run();
}

// The same where the table has one more row before the last: copies of p of format `copy_format`.
int64_t step_table_copy(int64_t args, int64_t copy_format, const ffi::String& simd) {
  const std::string request = simd;
  const AdamFn fn = level_or_throw(adam_level(request.c_str()), request, adam_levels()).fn;
  const Forward scalars{args_at(args)};
  TableView view = scalars.a.view();
  view.has_copy = true, view.copy_format = copy_format, view.convert = adam_convert_level(request.c_str())->fn;
  return TableStep<Hyper, Forward>("cpu_adam", view, fn, scalars).run();
}

// Takes step `steps[i]` of every tensor back.
int64_t rollback_table(int64_t args, const ffi::String& simd) {
  const std::string request = simd;
  const AdamBackFn fn = level_or_throw(adam_back_level(request.c_str()), request, adam_levels()).fn;
  const Back scalars{args_at(args)};
  const TableView view = scalars.a.view();
  return TableStep<BackHyper, Back>("cpu_adam", view, fn, scalars).run();
}

}  // namespace
}  // namespace ds

DS_EXPORT_CPU_TABLE(ds::adam_levels, ds::adam_level)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(step_table, ds::step_table)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(step_table_copy, ds::step_table_copy)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rollback_table, ds::rollback_table)
