// Runs GPU kernels on the CPU, one thread after the other: enough of the device language for csrc's .cu files, compiled by a
// host compiler. The threads of a block are coroutines that take turns at __syncthreads() and at each shuffle, blocks run
// one after the other. Equal arithmetic (every operation of the kernels is written out and correctly rounded), not equal
// timing: it shows wrong indices, tails, formulas, reductions and structures, not races.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "common/numbers.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };

namespace emulator {

struct Index { unsigned x; };
inline Index thread, block, threads;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline void (*body)(void**);
inline void** parameters;
inline int votes;
inline uint64_t lanes[1024];

inline void yield() { swapcontext(&fibers[thread.x].context, &scheduler); }

inline void enter() {
  const unsigned me = thread.x;
  body(parameters);
  fibers[me].done = true;
  swapcontext(&fibers[me].context, &scheduler);
}

inline void run_block() {
  for (unsigned t = 0; t < threads.x; ++t) {
    Fiber& f = fibers[t];
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (unsigned t = 0; t < threads.x; ++t) {
      if (fibers[t].done) continue;
      any = true;
      thread.x = t;
      swapcontext(&scheduler, &fibers[t].context);
    }
  }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** p, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<A>*>(p[I])...);
}
template <class... A>
void call(void (*kernel)(A...), void** p) {
  call(kernel, p, std::index_sequence_for<A...>());
}

inline void launch(void (*kernel)(void**), void** p, unsigned grid, unsigned block_threads) {
  body = kernel, parameters = p, threads.x = block_threads;
  fibers.resize(block_threads);
  for (Fiber& f : fibers) f.stack.resize(65536);
  for (block.x = 0; block.x < grid; ++block.x) run_block();
}

}  // namespace emulator

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::threads

inline void __syncthreads() { emulator::yield(); }
inline int __syncthreads_or(int x) {
  emulator::votes = 0;
  emulator::yield();
  emulator::votes |= x;
  emulator::yield();
  const int all = emulator::votes;
  emulator::yield();
  return all;
}
template <class T>
T __shfl_down_sync(unsigned, T x, int offset) {
  const unsigned me = threadIdx.x;
  memcpy(&emulator::lanes[me], &x, sizeof(x));
  emulator::yield();
  T got = x;
  if (me % 32 + offset < 32) memcpy(&got, &emulator::lanes[me + offset], sizeof(got));
  emulator::yield();
  return got;
}
template <class T>
T __ldg(const T* p) { return *p; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline float __uint_as_float(unsigned u) { return ds::bits_float(u); }
inline unsigned __float_as_uint(float x) { return ds::float_bits(x); }
inline float emulated_half_to_float(unsigned short bits) { return ds::to_float(ds::half_t{bits}); }
inline unsigned short emulated_float_to_half(float x) {
  ds::half_t h;
  ds::from_float(x, &h);
  return h.bits;
}
