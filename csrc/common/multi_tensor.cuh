// The skeleton of kernels that update many tensors in one launch.
//
// The tensors come as a table of addresses in device memory, a row a list (parameters, gradients, moments, ...); each is cut
// into chunks of one pack a thread, and a block takes one chunk: consecutive blocks then touch consecutive memory, which on
// an H200 is worth 4 % of bandwidth over longer chunks (docs/why/0003, benchmarks/results/fused_adam.json).
// A pack is 4 floats, 8 elements where some are of a half format (so that halves move in 16-byte accesses too), or 2
// doubles. The all-float kernels are apart because the branches on formats cost 1.5 % of an H200's bandwidth.
// Layout: any element alignment; vector accesses where all addresses of a tensor are multiples of 16.
// The structures are those of src/deepspeed_ops/launch.py, field by field.
#pragma once

#include "common/device.cuh"

namespace ds {

constexpr int kBlock = 128;  // threads

// Where the tensors are. All arrays are in device memory. With one list, that list holds the gradients; with more, the
// first holds the parameters and the second the gradients.
template <int kLists>
struct Table {
  const i64* list[kLists];  // [tensors] addresses; gradient 0: the tensor is left alone; another 0: it has no such tensor
  const i64* counts;        // [tensors] elements
  const i32* chunks;        // [blocks][2]: tensor, chunk within the tensor
  Format format[kLists];
};

// What the device itself may decide about a step.
struct Control {
  const float* grad_scale;  // [1] or null: gradients are divided by it
  const float* found_inf;   // [1] or null: not 0: nothing happens
  const i32* noop_flag;     // [1] or null: not 0: nothing happens

  __device__ __forceinline__ bool skipped() const {
    return (noop_flag != nullptr && *noop_flag != 0) || (found_inf != nullptr && *found_inf != 0.0f);
  }

  template <class M>
  __device__ __forceinline__ M inv_scale() const;
};

__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double div_rn(double a, double b) { return __ddiv_rn(a, b); }
__device__ __forceinline__ float sqrt_rn(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double sqrt_rn(double a) { return __dsqrt_rn(a); }

template <>
__device__ __forceinline__ float Control::inv_scale<float>() const {
  return grad_scale != nullptr ? div_rn(1.0f, *grad_scale) : 1.0f;
}
template <>
__device__ __forceinline__ double Control::inv_scale<double>() const {
  return grad_scale != nullptr ? div_rn(1.0, static_cast<double>(*grad_scale)) : 1.0;
}

// This thread's pack: which tensor, from which element on, how many elements (none: not positive).
template <int kLists>
struct Place {
  i32 tensor;
  i64 address[kLists];  // of the tensor in each list
  i64 first;
  int n;
  bool aligned;  // all of them to 16 bytes

  template <int kPack>
  static __device__ __forceinline__ Place find(const Table<kLists>& t) {
    const int2 chunk = __ldg(reinterpret_cast<const int2*>(t.chunks) + blockIdx.x);
    Place at;
    at.tensor = chunk.x;
    // All of them at once: they depend on the chunk alone.
    i64 any = 0;
#pragma unroll
    for (int l = 0; l < kLists; ++l) {
      at.address[l] = __ldg(t.list[l] + chunk.x);
      any |= at.address[l];
    }
    const i64 count = __ldg(t.counts + chunk.x);
    at.first = (static_cast<i64>(chunk.y) * kBlock + threadIdx.x) * kPack;
    const i64 left = count - at.first;
    at.n = at.address[kLists > 1 ? 1 : 0] == 0 ? 0 : static_cast<int>(left < kPack ? left : kPack);
    at.aligned = (any & 15) == 0;
    return at;
  }

  // The elements of one list, for double math.
  __device__ __forceinline__ double* doubles(int list) const { return reinterpret_cast<double*>(address[list]) + first; }
};

// One pack of a list: as it lies in memory, and as floats. All loads of a kernel are issued before the first conversion.
// kFloats: everything is f32; N: elements of a pack.
template <bool kFloats, int N, int kLists>
struct Pack {
  const Table<kLists>& table;
  const Place<kLists>& at;
  const bool whole;
  Raw<N> raw[kLists];

  __device__ __forceinline__ Pack(const Table<kLists>& t, const Place<kLists>& place)
      : table(t), at(place), whole(place.n == N && place.aligned) {}

  __device__ __forceinline__ Format format(int list) const { return kFloats ? kF32 : table.format[list]; }

  __device__ __forceinline__ void load(int list) {
    raw[list].load(reinterpret_cast<const void*>(at.address[list]), at.first, format(list), at.n, whole);
  }
  __device__ __forceinline__ void floats(int list, float (&x)[N]) const { raw[list].to_floats(format(list), x); }
  __device__ __forceinline__ void round(int list, const float (&x)[N]) { raw[list].from_floats(format(list), x); }
  __device__ __forceinline__ void store(int list) const {
    raw[list].store(reinterpret_cast<void*>(at.address[list]), at.first, format(list), at.n, whole);
  }
};

// Counting a step on the device, for a captured graph or a gradient scaler. One thread a tensor.
struct PrepareArgs {
  i64* steps;                      // [n], counted up where the tensor has a gradient
  const i64* g;                    // [n] addresses, 0 = no gradient
  void* out;                       // [n] the op's scalars of the step; null where it has none
  i64 n;
  const float* lr_tensor;          // [1] or null; takes the place of lr
  double lr, beta1, beta2, decay;  // decay: what the op says
  i32 bias_correction;
  const i32* noop_flag;            // [1] or null
  const float* found_inf;          // [1] or null
};

struct Counted {
  bool counts;   // whether this thread's tensor takes the step
  i64 i;         // the tensor
  double t, lr;  // step, 1-based; learning rate
  double bias1, bias2;
};

__device__ __forceinline__ Counted count_step(const PrepareArgs& a) {
  Counted c = {};
  c.i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c.i >= a.n || a.g[c.i] == 0) return c;
  if ((a.noop_flag != nullptr && *a.noop_flag != 0) || (a.found_inf != nullptr && *a.found_inf != 0.0f)) return c;
  c.counts = true;
  c.t = static_cast<double>(++a.steps[c.i]);
  c.lr = a.lr_tensor != nullptr ? static_cast<double>(*a.lr_tensor) : a.lr;
  return c;
}

// Also 1 - beta^t, or 1 without bias correction.
__device__ __forceinline__ Counted count_step_and_bias(const PrepareArgs& a) {
  Counted c = count_step(a);
  if (!c.counts) return c;
  c.bias1 = a.bias_correction ? 1.0 - pow(a.beta1, c.t) : 1.0;
  c.bias2 = a.bias_correction ? 1.0 - pow(a.beta2, c.t) : 1.0;
  return c;
}

}  // namespace ds
