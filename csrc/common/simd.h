// SIMD levels of the host code: which this CPU has, and the choice of one at run time.
//
// A level's code is compiled under a target pragma (common/simd-foreach.h), never by -march, so one library runs on every
// CPU of its architecture. DS_SIMD=scalar|avx2|avx512|neon forces a level; the Python side reads the variable and passes
// its value with each call.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__) || defined(_M_X64)
#define DS_X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#include <immintrin.h>
#elif defined(__aarch64__) || defined(_M_ARM64)
#define DS_ARM64 1
#include <arm_neon.h>
#endif

namespace ds {

#if DS_X86
struct X86Features {
  bool avx2 = false;    // AVX2, FMA3, F16C and the OS keeps ymm registers
  bool avx512 = false;  // AVX-512 F, BW, DQ, VL and the OS keeps zmm registers
};

inline void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t out[4]) {
#if defined(_MSC_VER)
  int regs[4];
  __cpuidex(regs, static_cast<int>(leaf), static_cast<int>(subleaf));
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint32_t>(regs[i]);
#else
  __cpuid_count(leaf, subleaf, out[0], out[1], out[2], out[3]);
#endif
}

inline uint64_t xcr0() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<uint64_t>(hi) << 32) | lo;
#endif
}

inline X86Features x86_features() {
  X86Features f;
  uint32_t r[4];
  cpuid(0, 0, r);
  if (r[0] < 7) return f;
  cpuid(1, 0, r);
  const bool osxsave = r[2] & (1u << 27), avx = r[2] & (1u << 28), fma = r[2] & (1u << 12), f16c = r[2] & (1u << 29);
  if (!osxsave || !avx) return f;
  const uint64_t state = xcr0();
  cpuid(7, 0, r);
  // XCR0 bits 1-2: xmm and ymm; bits 5-7: opmask and the two halves of zmm.
  f.avx2 = (state & 0x6) == 0x6 && fma && f16c && (r[1] & (1u << 5));
  const uint32_t f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
  f.avx512 = f.avx2 && (state & 0xe6) == 0xe6 && (r[1] & f_dq_bw_vl) == f_dq_bw_vl;
  return f;
}
#endif

// For a scope: rounds to nearest and keeps denormals. torch.set_flush_denormal and fesetround act on one thread, so without
// this a result would depend on which thread took its chunk.
class PlainFloats {
#if DS_X86
 public:
  PlainFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // the reset value: all exceptions masked
  ~PlainFloats() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#elif DS_ARM64 && !defined(_MSC_VER)
 public:
  PlainFloats() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~PlainFloats() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Whether this CPU can run a level, by name. Unknown names are unsupported.
inline bool level_supported(const char* name) {
#if DS_X86
  static const X86Features features = x86_features();
  if (!std::strcmp(name, "avx2")) return features.avx2;
  if (!std::strcmp(name, "avx512")) return features.avx512;
#elif DS_ARM64
  if (!std::strcmp(name, "neon")) return true;  // part of the base architecture
#endif
  return !std::strcmp(name, "scalar");
}

// One row of an op's table: {name, fn}, best level first, ending with scalar.
template <class Fn>
struct Level {
  const char* name;
  Fn fn;
};

// The first supported row, or the row named by `request` ("" = best). Returns nullptr where the request is unknown or
// the CPU lacks it.
template <class Fn, int N>
const Level<Fn>* choose_level(const Level<Fn> (&table)[N], const char* request) {
  for (const Level<Fn>& row : table) {
    if (*request ? !std::strcmp(row.name, request) : level_supported(row.name)) {
      return level_supported(row.name) ? &row : nullptr;
    }
  }
  return nullptr;
}

// The levels of a table that this CPU has, best first, separated by commas.
template <class Fn, int N>
std::string supported_levels(const Level<Fn> (&table)[N]) {
  std::string names;
  for (const Level<Fn>& row : table) {
    if (!level_supported(row.name)) continue;
    if (!names.empty()) names += ',';
    names += row.name;
  }
  return names;
}

}  // namespace ds
