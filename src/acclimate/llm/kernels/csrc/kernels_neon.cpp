#if defined(__aarch64__)
#define ACCLIMATE_ISA neon
#include "simd_neon.h"

#include "block_kernel.h"
#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels neon_kernels = {{neon::multiply_dense<neon::FloatStep<neon::F32Weight>>,
                               neon::multiply_dense<neon::FloatStep<neon::Bf16Weight>>,
                               neon::multiply_dense<neon::FloatStep<neon::F16Weight>>},
                              nullptr,
                              neon::multiply_blocks,
                              neon::quantize,
                              neon::values_of_group,
                              neon::widen,
                              nullptr,
                              nullptr,
                              0,
                              neon::multiply_int8_rows};

}  // namespace acclimate::inference
#endif
