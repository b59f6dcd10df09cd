// clip_grad_norm, host side: launches the kernels of clip_grad_norm.cu.
#include "common/launch.h"

DS_EXPORT_LAUNCHER("clip_grad_norm")
