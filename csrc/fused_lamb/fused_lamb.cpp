// fused_lamb, host side: launches the kernels of fused_lamb.cu.
#include "common/launch.h"

DS_EXPORT_LAUNCHER("fused_lamb")
