// cpu_lion: Lion on CPU tensors. The arithmetic is in cpu_lion-inl.h, the work split in common/cpu_table.h; here are
// the scalars and the FFI functions.
// Errors: those of common/cpu_table.h.
#include "common/cpu_table.h"
#include "cpu_lion/cpu_lion.h"

namespace ds {
namespace {

// The arguments of the functions below: every field 8 bytes, in this order, filled by src/deepspeed_ops/lion_step.py.
struct StepArgs {
  int64_t table, steps, n;  // as in TableView
  int64_t p_format, g_format, state_format;
  double lr, beta1, beta2, weight_decay, grad_scale;
  int64_t threads;
};

struct Scalars {
  const StepArgs& a;

  // The formula does not know the step.
  Hyper at(int64_t) const {
    Hyper h;
    h.beta1 = static_cast<float>(a.beta1);
    h.one_minus_beta1 = static_cast<float>(1.0 - a.beta1);
    h.beta2 = static_cast<float>(a.beta2);
    h.one_minus_beta2 = static_cast<float>(1.0 - a.beta2);
    h.lr = static_cast<float>(a.lr);
    h.decay = static_cast<float>(a.lr * a.weight_decay);
    h.inv_grad_scale = static_cast<float>(1.0 / a.grad_scale);
    return h;
  }
};

int64_t run(int64_t address, const std::string& request, bool has_copy, int64_t copy_format) {
  const Scalars scalars{*reinterpret_cast<const StepArgs*>(address)};
  const StepArgs& a = scalars.a;
  const LionFn fn = level_or_throw(lion_level(request.c_str()), request, lion_levels()).fn;
  TableView view = {a.table, a.steps, a.n, a.p_format, a.g_format, a.state_format, 1, a.threads};
  view.has_copy = has_copy, view.copy_format = copy_format, view.convert = lion_convert_level(request.c_str())->fn;
  return TableStep<Hyper, Scalars>("cpu_lion", view, fn, scalars).run();
}

// One step for every tensor of a table, at the SIMD level named `simd` ("" = best). Arg: address of StepArgs. Returns how
// many threads took part.
int64_t step_table(int64_t args, const tvm::ffi::String& simd) { return run(args, simd, false, 0); }

// The same where the table has one more row before the last: copies of p of format `copy_format`.
int64_t step_table_copy(int64_t args, int64_t copy_format, const tvm::ffi::String& simd) {
  return run(args, simd, true, copy_format);
}

}  // namespace
}  // namespace ds

DS_EXPORT_CPU_TABLE(ds::lion_levels, ds::lion_level)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(step_table, ds::step_table)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(step_table_copy, ds::step_table_copy)
