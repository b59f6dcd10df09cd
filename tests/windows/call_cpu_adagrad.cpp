// call_cpu_adagrad RUNTIME OP: runs cpu_adagrad over levels, dtypes, sizes and thread counts and prints a digest of all it wrote.
#include "cpu_optimizer_call.h"

namespace {

// As csrc/cpu_adagrad/cpu_adagrad.cpp and src/deepspeed_ops/adagrad_step.py have it.
struct StepArgs {
  int64_t table, steps, n;
  int64_t p_format, g_format, state_format;
  double lr, eps, weight_decay, grad_scale;
  int64_t threads;
};

StepArgs args_of(const int64_t* table, const int64_t* step, const int64_t formats[3], int variant, int64_t threads) {
  return {reinterpret_cast<int64_t>(table), reinterpret_cast<int64_t>(step), 1, formats[0], formats[1], formats[2],
          1e-2, 1e-8, variant * 0.1, 1.0, threads};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) proof::fail("call_cpu_adagrad RUNTIME OP");
  proof::run_all(proof::Op(argv[1], argv[2]), 1, args_of);
}
