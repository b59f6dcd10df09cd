// The arithmetic of cpu_adam once per SIMD level. Apart from cpu_adam.cpp so that the two compile side by side: this file
// needs no FFI header, that one no intrinsics.
#include "cpu_adam/cpu_adam.h"

#include <math.h>

#include "common/numbers.h"

#define DS_SIMD_BODY "cpu_adam/cpu_adam-inl.h"
#include "common/simd-foreach.h"

namespace ds {

static constexpr Level<AdamFn> kLevels[] = DS_LEVEL_TABLE(adam);
static constexpr Level<AdamBackFn> kBackLevels[] = DS_LEVEL_TABLE(adam_back);
static constexpr Level<ConvertFn> kConvertLevels[] = DS_LEVEL_TABLE(convert);

const Level<AdamFn>* adam_level(const char* request) { return choose_level(kLevels, request); }
const Level<AdamBackFn>* adam_back_level(const char* request) { return choose_level(kBackLevels, request); }
const Level<ConvertFn>* adam_convert_level(const char* request) { return choose_level(kConvertLevels, request); }
std::string adam_levels() { return supported_levels(kLevels); }

}  // namespace ds
