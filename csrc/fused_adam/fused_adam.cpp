// fused_adam, host side: launches the kernels of fused_adam.cu. Addresses and handles come as integers: the tables of
// pointers are made and cached in Python (src/deepspeed_ops/tensor_table.py), where the tensors are.
//
// Table: int64 [5][n] in device memory = addresses of p, g, m, v and elements of each tensor (g 0: skipped); chunks int32
// [blocks][2] in device memory = (tensor, chunk within it), 128 packs a chunk.
// Errors: TypeError for a combination of formats without a kernel, DriverError for what the driver refuses.
#include <cmath>
#include <cstdint>

#include <tvm/ffi/tvm_ffi.h>

#include "common/driver.h"
#include "common/tensor_list.h"

namespace ds {
namespace {

namespace ffi = tvm::ffi;

DeviceCode& code() {
  static DeviceCode& kernels = *new DeviceCode("fused_adam");
  return kernels;
}

// Threads of a block. One block updates one chunk, one pack a thread: consecutive blocks then touch
// consecutive memory, which is worth 4 % of bandwidth over longer chunks (benchmarks/results/fused_adam.json, docs/why/0003).
constexpr unsigned kBlock = 128;

// The structures below are those of fused_adam.cuh, with addresses as integers.
struct AdamTable {
  int64_t p, g, m, v, counts, chunks;
  int32_t p_format, g_format, state_format;
};

template <class M>
struct AdamStep {
  M step_size, inv_sqrt_bias2, decay;
};

template <class M>
struct AdamScalars {
  M beta1, one_minus_beta1, beta2, one_minus_beta2, eps, l2;
  AdamStep<M> step;
  int64_t steps, grad_scale, found_inf, noop_flag;
};

struct PrepareArgs {
  int64_t steps, g, out, n, lr_tensor;
  double lr, beta1, beta2, decay;
  int32_t bias_correction;
  int64_t noop_flag, found_inf;
};

// Format codes: 0 f32, 1 f16, 2 bf16, 3 f64.
constexpr int64_t kF64 = 3;

// The kernel for these formats. Its packs: 4 floats a thread, 8 elements where a format is half as wide, 2 doubles
// (src/deepspeed_ops/fused_adam_launch.py cuts the chunks accordingly).
const char* step_kernel(const AdamTable& t) {
  if (t.p_format == kF64) return "fused_adam_f64";
  return (t.p_format | t.g_format | t.state_format) == 0 ? "fused_adam_f32" : "fused_adam_mixed";
}

AdamTable table_at(int64_t table, int64_t n, int64_t chunks, int64_t p, int64_t g, int64_t s) {
  for (const int64_t f : {p, g, s}) {
    if (f < 0 || f > 3) TVM_FFI_THROW(TypeError) << "fused_adam: format code " << f << " is unknown; expected 0 to 3";
    if ((f == kF64) != (p == kF64)) {
      TVM_FFI_THROW(TypeError) << "fused_adam: float64 does not mix with other formats; found parameter, gradient and "
                                  "state formats " << p << ", " << g << ", " << s;
    }
  }
  const int64_t row = n * 8;
  return {table, table + row, table + 2 * row, table + 3 * row, table + 4 * row, chunks,
          static_cast<int32_t>(p), static_cast<int32_t>(g), static_cast<int32_t>(s)};
}

// The arguments of the functions below arrive as the address of one of these structures: every field 8 bytes, in this
// order, filled by src/deepspeed_ops/fused_adam.py. (A typed FFI function of 20 arguments takes 2 s to compile.)
struct StepArgs {
  int64_t ordinal, stream;
  int64_t table, n, chunks, blocks;                       // addresses and sizes of the table
  int64_t p_format, g_format, state_format;               // format codes
  double lr, beta1, beta2, eps, weight_decay;
  int64_t adamw, bias_correction;                         // 0 or 1
  int64_t step;                                           // 1-based, of all tensors where steps is 0
  int64_t steps;                                          // AdamStep [n] in device memory, or 0
  int64_t grad_scale, found_inf, noop_flag;               // device addresses or 0
  int64_t counters;                                       // prepare: int64 [n] in device memory
  int64_t lr_tensor;                                      // prepare: float [1] in device memory, or 0
};

template <class M>
void launch_step(const StepArgs& a, AdamTable table) {
  const double t = static_cast<double>(a.step);
  const double bias1 = a.bias_correction ? 1.0 - std::pow(a.beta1, t) : 1.0;
  const double bias2 = a.bias_correction ? 1.0 - std::pow(a.beta2, t) : 1.0;
  AdamScalars<M> scalars = {static_cast<M>(a.beta1),
                            static_cast<M>(1.0 - a.beta1),
                            static_cast<M>(a.beta2),
                            static_cast<M>(1.0 - a.beta2),
                            static_cast<M>(a.eps),
                            a.adamw ? M(0) : static_cast<M>(a.weight_decay),
                            {static_cast<M>(a.lr / bias1), static_cast<M>(1.0 / std::sqrt(bias2)),
                             a.adamw ? static_cast<M>(a.lr * a.weight_decay) : M(0)},
                            a.steps,
                            a.grad_scale,
                            a.found_inf,
                            a.noop_flag};
  void* args[] = {&table, &scalars};
  code().launch(static_cast<int>(a.ordinal), step_kernel(table),
                static_cast<unsigned>(a.blocks), kBlock, 0, reinterpret_cast<void*>(a.stream), args);
}

const StepArgs& args_at(int64_t address) { return *reinterpret_cast<const StepArgs*>(address); }

// One step for all tensors of a table. Arg: address of StepArgs.
void step(int64_t args) {
  const StepArgs& a = args_at(args);
  const AdamTable table = table_at(a.table, a.n, a.chunks, a.p_format, a.g_format, a.state_format);
  if (a.blocks == 0) return;
  if (a.p_format == kF64) {
    launch_step<double>(a, table);
  } else {
    launch_step<float>(a, table);
  }
}

// Counts one step of every tensor that has a gradient and writes its AdamStep to `steps`, on the device; where noop_flag or
// found_inf says so, does nothing. Arg: address of StepArgs.
void prepare_steps(int64_t args) {
  const StepArgs& a = args_at(args);
  if (a.n == 0) return;
  constexpr int64_t block = 256;
  PrepareArgs packed = {a.counters, a.table + a.n * 8, a.steps, a.n, a.lr_tensor, a.lr, a.beta1, a.beta2,
                        a.adamw ? a.weight_decay : 0.0, a.bias_correction ? 1 : 0, a.noop_flag, a.found_inf};
  void* kernel_args[] = {&packed};
  code().launch(static_cast<int>(a.ordinal), a.p_format == kF64 ? "fused_adam_prepare_f64" : "fused_adam_prepare_f32",
                static_cast<unsigned>((a.n + block - 1) / block), static_cast<unsigned>(block), 0,
                reinterpret_cast<void*>(a.stream), kernel_args);
}

// Sets int32 *noop_flag to 1 where any gradient of the table is infinite or NaN; leaves it alone otherwise. The chunks must
// be those of 4 floats or 2 doubles a thread. Arg: address of StepArgs.
void check_finite(int64_t args) {
  const StepArgs& a = args_at(args);
  AdamTable table = table_at(a.table, a.n, a.chunks, a.g_format, a.g_format, a.g_format);
  if (a.blocks == 0) return;
  int64_t flag = a.noop_flag;
  void* kernel_args[] = {&table, &flag};
  code().launch(static_cast<int>(a.ordinal), "check_finite", static_cast<unsigned>(a.blocks), kBlock, 0,
                reinterpret_cast<void*>(a.stream), kernel_args);
}

void prepare_device(int64_t ordinal) { code().prepare(static_cast<int>(ordinal)); }

}  // namespace
}  // namespace ds

TVM_FFI_DLL_EXPORT_TYPED_FUNC(step, ds::step)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_steps, ds::prepare_steps)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_finite, ds::check_finite)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_device, ds::prepare_device)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(collect_addresses, ds::collect_addresses)
