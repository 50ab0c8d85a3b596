// acclimate::lion_ on CUDA: one launch for a whole parameter group.
#include "device_group.cuh"
#include "lion_call.h"

#include "simd_cuda.h"
#include "lion_rule.h"
#include "step_kernel.cuh"
#include "simd_end.h"

ACCLIMATE_CUDA_OP(lion_, LionCall, LionRule)
