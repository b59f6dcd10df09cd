// The arithmetic of cpu_lion once per SIMD level. Apart from cpu_lion.cpp so that the two compile side by side: this file
// needs no FFI header, that one no intrinsics.
#include "cpu_lion/cpu_lion.h"

#include <math.h>

#include "common/numbers.h"

#define DS_SIMD_BODY "cpu_lion/cpu_lion-inl.h"
#include "common/simd-foreach.h"

namespace ds {

static constexpr Level<LionFn> kLevels[] = DS_LEVEL_TABLE(lion);
static constexpr Level<ConvertFn> kConvertLevels[] = DS_LEVEL_TABLE(convert);

const Level<LionFn>* lion_level(const char* request) { return choose_level(kLevels, request); }
const Level<ConvertFn>* lion_convert_level(const char* request) { return choose_level(kConvertLevels, request); }
std::string lion_levels() { return supported_levels(kLevels); }

}  // namespace ds
