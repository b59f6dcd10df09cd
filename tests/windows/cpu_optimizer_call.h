// What the callers of the CPU optimizers share: buffers with guards, the cases, and one printed digest a case.
#pragma once

#include <cmath>

#include "common/numbers.h"
#include "ffi_call.h"

namespace proof {

constexpr int64_t kF32 = 0, kF16 = 1, kBf16 = 2;
const char* const kNames[] = {"f32", "f16", "bf16"};

// A buffer of one format, one element into its allocation, with guards at both ends.
class Buffer {
 public:
  Buffer(int64_t format, int64_t n, Numbers* numbers, float scale) : width_(format == kF32 ? 4 : 2), n_(n) {
    bytes_.assign(static_cast<size_t>((n + 2) * width_), 0x5a);
    for (int64_t i = 0; i < n; ++i) {
      const float x = numbers == nullptr ? 0.0f : numbers->next() * scale;
      unsigned char* at = bytes_.data() + (i + 1) * width_;
      if (format == kF32) {
        std::memcpy(at, &x, 4);
      } else if (format == kF16) {
        ds::half_t h;
        ds::from_float(x, &h);
        std::memcpy(at, &h, 2);
      } else {
        ds::bfloat_t b;
        ds::from_float(x, &b);
        std::memcpy(at, &b, 2);
      }
    }
  }
  int64_t address() { return reinterpret_cast<int64_t>(bytes_.data() + width_); }
  uint64_t fold(uint64_t seed) const { return digest(bytes_.data(), bytes_.size(), seed); }
  bool guards_intact() const {
    for (int64_t i = 0; i < width_; ++i) {
      if (bytes_[static_cast<size_t>(i)] != 0x5a || bytes_[static_cast<size_t>((n_ + 1) * width_ + i)] != 0x5a) return false;
    }
    return true;
  }

 private:
  int64_t width_, n_;
  std::vector<unsigned char> bytes_;
};

// Three steps over `states` state buffers of one tensor; `args_of(table, step, formats, threads)` makes the op's arguments.
template <class ArgsOf>
void run_case(const Op& op, const char* level, int states, const int64_t formats[3], int64_t n, int variant, int64_t threads,
              ArgsOf args_of) {
  const int64_t p_format = formats[0], g_format = formats[1], s_format = formats[2];
  Numbers numbers(static_cast<uint64_t>(n * 8 + p_format * 4 + g_format));
  Buffer p(p_format, n, &numbers, 1.0f);
  std::vector<Buffer> state(static_cast<size_t>(states), Buffer(s_format, n, nullptr, 0.0f));
  for (int64_t step = 1; step <= 3; ++step) {
    Buffer g(g_format, n, &numbers, 0.01f * static_cast<float>(step));
    std::vector<int64_t> table = {p.address(), g.address()};
    for (Buffer& s : state) table.push_back(s.address());
    table.push_back(n);
    auto args = args_of(table.data(), &step, formats, variant, threads);
    op.call("step_table", {integer(reinterpret_cast<int64_t>(&args)), text(level)});
  }
  uint64_t all = p.fold(0xcbf29ce484222325u);
  bool intact = p.guards_intact();
  for (const Buffer& s : state) {
    all = s.fold(all);
    intact = intact && s.guards_intact();
  }
  if (!intact) fail("it wrote outside its tensors");
  std::printf("%s p=%s g=%s s=%s n=%lld variant=%d threads=%lld %016llx\n", level, kNames[p_format], kNames[g_format],
              kNames[s_format], static_cast<long long>(n), variant, static_cast<long long>(threads),
              static_cast<unsigned long long>(all));
}

// Every level that this CPU has, every combination of formats, sizes around a vector's and one for four threads.
template <class ArgsOf>
void run_all(const Op& op, int states, ArgsOf args_of) {
  const std::string levels = to_text(op.call("simd_levels", {}));
  std::printf("levels %s\n", levels.c_str());
  const int64_t combinations[][3] = {{kF32, kF32, kF32},  {kF32, kF16, kF32},   {kF32, kBf16, kF32},
                                     {kF16, kF16, kF32},  {kF16, kF16, kF16},   {kF16, kF32, kF32},
                                     {kBf16, kBf16, kF32}, {kBf16, kBf16, kBf16}, {kBf16, kF32, kBf16}};
  for (size_t from = 0; from <= levels.size();) {
    const size_t comma = levels.find(',', from);
    const std::string level = levels.substr(from, comma == std::string::npos ? comma : comma - from);
    for (const auto& formats : combinations) {
      for (const int64_t n : {1, 7, 16, 33, 1023, 16385}) {
        run_case(op, level.c_str(), states, formats, n, static_cast<int>(n % 2), 1, args_of);
      }
      run_case(op, level.c_str(), states, formats, 300007, 1, 4, args_of);  // 19 chunks: enough for four threads
    }
    if (comma == std::string::npos) break;
    from = comma + 1;
  }
  TVMFFIAny result;
  std::printf("refused %s\n", op.try_call("simd_level", {text("no-such-level")}, &result).c_str());
  std::printf("refused %s\n", op.try_call("simd_level", {integer(3)}, &result).substr(0, 9).c_str());
}

}  // namespace proof
