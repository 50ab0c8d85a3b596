#define ACCLIMATE_ISA plain
#include "simd_plain.h"

#include "block_kernel.h"
#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels plain_kernels = {.dense = {plain::multiply_dense<plain::FloatStep<plain::F32Weight>>,
                                         plain::multiply_dense<plain::FloatStep<plain::Bf16Weight>>,
                                         plain::multiply_dense<plain::FloatStep<plain::F16Weight>>},
                               .blocks = plain::multiply_blocks,
                               .quantize = plain::quantize,
                               .values = plain::values_of_group,
                               .widen = plain::widen,
                               .int8_rows = plain::multiply_int8_rows};

}  // namespace acclimate::inference
