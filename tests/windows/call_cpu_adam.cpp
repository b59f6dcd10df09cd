// call_cpu_adam RUNTIME OP: runs cpu_adam over levels, dtypes, sizes and thread counts and prints a digest of all it wrote.
#include "cpu_optimizer_call.h"

namespace {

// As csrc/cpu_adam/cpu_adam.cpp and src/deepspeed_ops/cpu_adam.py have it.
struct StepArgs {
  int64_t table, steps, n;
  int64_t p_format, g_format, state_format;
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  int64_t adamw, bias_correction;
  int64_t threads;
};

StepArgs args_of(const int64_t* table, const int64_t* step, const int64_t formats[3], int variant, int64_t threads) {
  return {reinterpret_cast<int64_t>(table), reinterpret_cast<int64_t>(step), 1, formats[0], formats[1], formats[2],
          1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, variant, 1, threads};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) proof::fail("call_cpu_adam RUNTIME OP");
  proof::run_all(proof::Op(argv[1], argv[2]), 2, args_of);
}
