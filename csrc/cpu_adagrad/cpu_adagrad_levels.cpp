// The arithmetic of cpu_adagrad once per SIMD level. Apart from cpu_adagrad.cpp so that the two compile side by side: this file
// needs no FFI header, that one no intrinsics.
#include "cpu_adagrad/cpu_adagrad.h"

#include <math.h>

#include "common/numbers.h"

#define DS_SIMD_BODY "cpu_adagrad/cpu_adagrad-inl.h"
#include "common/simd-foreach.h"

namespace ds {

static constexpr Level<AdagradFn> kLevels[] = DS_LEVEL_TABLE(adagrad);
static constexpr Level<ConvertFn> kConvertLevels[] = DS_LEVEL_TABLE(convert);

const Level<AdagradFn>* adagrad_level(const char* request) { return choose_level(kLevels, request); }
const Level<ConvertFn>* adagrad_convert_level(const char* request) { return choose_level(kConvertLevels, request); }
std::string adagrad_levels() { return supported_levels(kLevels); }

}  // namespace ds
