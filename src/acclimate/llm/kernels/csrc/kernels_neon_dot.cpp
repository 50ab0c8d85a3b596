#if defined(__aarch64__)
#define ACCLIMATE_ISA neon_dot
#include "simd_neon.h"

#include "block_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels neon_dot_kernels = {.blocks = neon_dot::multiply_blocks,
                                  .quantize = neon_dot::quantize,
                                  .values = neon_dot::values_of_group,
                                  .widen = neon_dot::widen};

}  // namespace acclimate::inference
#endif
