#define ACCLIMATE_ISA plain
#include "simd_plain.h"

#include "block_kernel.h"
#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels plain_kernels = {{plain::multiply_dense<plain::FloatStep<plain::F32Weight>>,
                                plain::multiply_dense<plain::FloatStep<plain::Bf16Weight>>,
                                plain::multiply_dense<plain::FloatStep<plain::F16Weight>>},
                               nullptr,
                               plain::multiply_blocks,
                               plain::quantize,
                               plain::values_of_group,
                               plain::widen,
                               nullptr,
                               nullptr,
                               0,
                               plain::multiply_int8_rows};

}  // namespace acclimate::inference
