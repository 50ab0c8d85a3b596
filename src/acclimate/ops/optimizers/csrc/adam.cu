// acclimate::adam_ on CUDA: one launch for a whole parameter group.
#include "device_group.cuh"
#include "adam_call.h"

#include "simd_cuda.h"
#include "adam_rule.h"
#include "step_kernel.cuh"
#include "simd_end.h"

ACCLIMATE_CUDA_OP(adam_, AdamCall, AdamRule)
