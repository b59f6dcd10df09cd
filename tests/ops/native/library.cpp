// Loads the finished host library of cpu_adam and calls its exported functions, without Python: so that it runs under
// `qemu-x86_64 -cpu ...`.
//
// usage: library PART LEVEL P_FORMAT G_FORMAT STATE_FORMAT N THREADS INPUT OUTPUT   (LEVEL "" = best)
//        library PART --levels
// INPUT: p, g, m, v as they lie in memory. OUTPUT: p, m, v after step 3 with the scalars below, and on stdout the level.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <tvm/ffi/c_api.h>

namespace {

// ds::StepArgs of csrc/cpu_adam/cpu_adam.cpp.
struct StepArgs {
  int64_t table, steps, n, p_format, g_format, state_format;
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  int64_t adamw, bias_correction, threads;
};

using Function = int (*)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);

Function find(void* library, const char* name) {
  void* address = dlsym(library, (std::string("__tvm_ffi_") + name).c_str());
  if (address == nullptr) std::fprintf(stderr, "no function %s\n", name), std::exit(20);
  return reinterpret_cast<Function>(address);
}

TVMFFIAny integer(int64_t value) {
  TVMFFIAny any = {};
  any.type_index = kTVMFFIInt;
  any.v_int64 = value;
  return any;
}

TVMFFIAny text(const char* value) {
  TVMFFIAny any = {};
  any.type_index = kTVMFFIRawStr;
  any.v_c_str = value;
  return any;
}

void print(const TVMFFIAny& any) {
  if (any.type_index == kTVMFFISmallStr) {
    std::printf("%.*s\n", static_cast<int>(any.small_str_len), any.v_bytes);
  } else {
    const auto* bytes = reinterpret_cast<const TVMFFIByteArray*>(reinterpret_cast<char*>(any.v_obj) + sizeof(TVMFFIObject));
    std::printf("%.*s\n", static_cast<int>(bytes->size), bytes->data);
  }
}

size_t bytes(int format) { return format == 0 ? 4 : 2; }

}  // namespace

int main(int argc, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 21;
  TVMFFIAny result = {};
  if (argc == 3 && !std::strcmp(argv[2], "--levels")) {
    if (find(library, "simd_levels")(nullptr, nullptr, 0, &result) != 0) return 22;
    return print(result), 0;
  }
  if (argc != 10) return 2;
  const TVMFFIAny wanted = text(argv[2]);
  if (find(library, "simd_level")(nullptr, &wanted, 1, &result) != 0) return 23;
  print(result);
  const int formats[4] = {std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[5])};
  const int64_t n = std::atoll(argv[6]);
  std::FILE* in = std::fopen(argv[8], "rb");
  std::FILE* out = std::fopen(argv[9], "wb");
  if (in == nullptr || out == nullptr) return 24;
  std::vector<char> data[4];
  int64_t table[5];
  for (int i = 0; i < 4; ++i) {
    data[i].resize(n * bytes(formats[i]));
    if (std::fread(data[i].data(), 1, data[i].size(), in) != data[i].size()) return 25;
    table[i] = reinterpret_cast<int64_t>(data[i].data());
  }
  table[4] = n;
  const int64_t step = 3;
  const StepArgs args = {reinterpret_cast<int64_t>(table), reinterpret_cast<int64_t>(&step), 1, formats[0], formats[1],
                         formats[2], 0.01, 0.9, 0.999, 1e-8, 0.1, 1.0, 1, 1, std::atoll(argv[7])};
  const TVMFFIAny call[2] = {integer(reinterpret_cast<int64_t>(&args)), wanted};
  if (find(library, "step_table")(nullptr, call, 2, &result) != 0) return 26;
  for (const int i : {0, 2, 3}) {
    if (std::fwrite(data[i].data(), 1, data[i].size(), out) != data[i].size()) return 27;
  }
  return std::fclose(out);
}
