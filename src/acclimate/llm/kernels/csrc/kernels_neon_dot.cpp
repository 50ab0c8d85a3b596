#if defined(__aarch64__)
#define ACCLIMATE_ISA neon_dot
#include "simd_neon.h"

#include "block_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels neon_dot_kernels = {
    {}, nullptr, neon_dot::multiply_blocks, neon_dot::quantize, neon_dot::values_of_group, neon_dot::widen};

}  // namespace acclimate::inference
#endif
