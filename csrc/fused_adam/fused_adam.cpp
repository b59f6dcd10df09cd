// fused_adam, host side: launches the kernels of fused_adam.cu.
#include "common/launch.h"

DS_EXPORT_LAUNCHER("fused_adam")
