// call_cpu_adam RUNTIME OP: runs cpu_adam over levels, dtypes, sizes and thread counts and prints a digest of all it wrote.
#include <cmath>

#include "common/numbers.h"
#include "ffi_call.h"

namespace {

// As csrc/cpu_adam/cpu_adam.cpp and src/deepspeed_ops/cpu_adam.py have it.
struct StepArgs {
  int64_t table, steps, n;
  int64_t p_format, g_format, state_format;
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  int64_t adamw, bias_correction;
  int64_t threads;
};

constexpr int64_t kF32 = 0, kF16 = 1, kBf16 = 2;
const char* const kNames[] = {"f32", "f16", "bf16"};

// A buffer of one format, one element into its allocation, with guards at both ends.
class Buffer {
 public:
  Buffer(int64_t format, int64_t n, proof::Numbers* numbers, float scale) : width_(format == kF32 ? 4 : 2), n_(n) {
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
  uint64_t digest(uint64_t seed) const { return proof::digest(bytes_.data(), bytes_.size(), seed); }
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

void run(const proof::Op& op, const char* level, const int64_t formats[3], int64_t n, bool adamw, int64_t threads) {
  const int64_t p_format = formats[0], g_format = formats[1], s_format = formats[2];
  proof::Numbers numbers(static_cast<uint64_t>(n * 8 + p_format * 4 + g_format));
  Buffer p(p_format, n, &numbers, 1.0f), m(s_format, n, nullptr, 0.0f), v(s_format, n, nullptr, 0.0f);
  for (int64_t step = 1; step <= 3; ++step) {
    Buffer g(g_format, n, &numbers, 0.01f * static_cast<float>(step));
    const int64_t table[5] = {p.address(), g.address(), m.address(), v.address(), n};
    StepArgs args = {reinterpret_cast<int64_t>(table), reinterpret_cast<int64_t>(&step), 1, p_format, g_format, s_format,
                     1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, adamw, 1, threads};
    op.call("step_table", {proof::integer(reinterpret_cast<int64_t>(&args)), proof::text(level)});
  }
  if (!p.guards_intact() || !m.guards_intact() || !v.guards_intact()) proof::fail("it wrote outside its tensors");
  const uint64_t all = v.digest(m.digest(p.digest(0xcbf29ce484222325u)));
  std::printf("%s p=%s g=%s s=%s n=%lld adamw=%d threads=%lld %016llx\n", level, kNames[p_format], kNames[g_format],
              kNames[s_format], static_cast<long long>(n), adamw, static_cast<long long>(threads),
              static_cast<unsigned long long>(all));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) proof::fail("call_cpu_adam RUNTIME OP");
  const proof::Op op(argv[1], argv[2]);
  const std::string levels = proof::to_text(op.call("simd_levels", {}));
  std::printf("levels %s\n", levels.c_str());
  const int64_t combinations[][3] = {{kF32, kF32, kF32},  {kF32, kF16, kF32},   {kF32, kBf16, kF32},
                                     {kF16, kF16, kF32},  {kF16, kF16, kF16},   {kF16, kF32, kF32},
                                     {kBf16, kBf16, kF32}, {kBf16, kBf16, kBf16}, {kBf16, kF32, kBf16}};
  for (size_t from = 0; from <= levels.size();) {
    const size_t comma = levels.find(',', from);
    const std::string level = levels.substr(from, comma == std::string::npos ? comma : comma - from);
    for (const auto& formats : combinations) {
      for (const int64_t n : {1, 7, 16, 33, 1023, 16385}) run(op, level.c_str(), formats, n, n % 2 == 1, 1);
      run(op, level.c_str(), formats, 300007, true, 4);  // 19 chunks: enough for four threads
    }
    if (comma == std::string::npos) break;
    from = comma + 1;
  }
  TVMFFIAny result;
  std::printf("refused %s\n", op.try_call("simd_level", {proof::text("no-such-level")}, &result).c_str());
  std::printf("refused %s\n", op.try_call("simd_level", {proof::integer(3)}, &result).substr(0, 9).c_str());
}
