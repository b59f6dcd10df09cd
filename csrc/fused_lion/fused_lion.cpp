// fused_lion, host side: launches the kernels of fused_lion.cu.
#include "common/launch.h"

DS_EXPORT_LAUNCHER("fused_lion")
