// Runs one SIMD level of csrc/cpu_adam/cpu_adam_levels.cpp on tensors from a file. Needs neither torch nor TVM-FFI, so it
// also runs under qemu for another architecture.
//
// usage: levels LEVEL P_FORMAT G_FORMAT STATE_FORMAT N INPUT OUTPUT   (formats: 0 f32, 1 f16, 2 bf16)
//        levels --supported
// INPUT: ten floats of ds::Hyper, then p, g, m, v as they lie in memory. OUTPUT: p, m, v.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu_adam/cpu_adam.h"

namespace {

std::vector<char> read_file(const char* path) {
  std::vector<char> data;
  std::FILE* f = std::fopen(path, "rb");
  if (f == nullptr) return data;
  char buffer[65536];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), f)) > 0;) data.insert(data.end(), buffer, buffer + n);
  std::fclose(f);
  return data;
}

size_t bytes(ds::Format f) { return f == ds::Format::f32 ? 4 : 2; }

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && !std::strcmp(argv[1], "--supported")) return std::puts(ds::adam_levels().c_str()) < 0;
  if (argc != 8) return 2;
  const auto* level = ds::adam_level(argv[1]);
  if (level == nullptr) {
    std::fprintf(stderr, "no level %s; this CPU has %s\n", argv[1], ds::adam_levels().c_str());
    return 3;
  }
  const auto p = static_cast<ds::Format>(std::atoi(argv[2]));
  const auto g = static_cast<ds::Format>(std::atoi(argv[3]));
  const auto s = static_cast<ds::Format>(std::atoi(argv[4]));
  const int64_t n = std::atoll(argv[5]);
  std::vector<char> data = read_file(argv[6]);
  const size_t sizes[4] = {n * bytes(p), n * bytes(g), n * bytes(s), n * bytes(s)};
  if (data.size() != sizeof(ds::Hyper) + sizes[0] + sizes[1] + sizes[2] + sizes[3]) return 4;
  ds::Hyper h;
  std::memcpy(&h, data.data(), sizeof(h));
  char* at[4];
  char* next = data.data() + sizeof(h);
  for (int i = 0; i < 4; ++i) at[i] = next, next += sizes[i];
  if (!level->fn({at[0], at[1], at[2], at[3], n}, p, g, s, h)) return 5;
  std::FILE* out = std::fopen(argv[7], "wb");
  if (out == nullptr) return 6;
  for (const int i : {0, 2, 3}) {
    if (std::fwrite(at[i], 1, sizes[i], out) != sizes[i]) return 7;
  }
  return std::fclose(out);
}
