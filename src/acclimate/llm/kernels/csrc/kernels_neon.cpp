#if defined(__aarch64__)
#define ACCLIMATE_ISA neon
#include "simd_neon.h"

#include "block_kernel.h"
#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels neon_kernels = {.dense = {neon::multiply_dense<neon::FloatStep<neon::F32Weight>>,
                                        neon::multiply_dense<neon::FloatStep<neon::Bf16Weight>>,
                                        neon::multiply_dense<neon::FloatStep<neon::F16Weight>>},
                              .blocks = neon::multiply_blocks,
                              .quantize = neon::quantize,
                              .values = neon::values_of_group,
                              .widen = neon::widen,
                              .int8_rows = neon::multiply_int8_rows};

}  // namespace acclimate::inference
#endif
