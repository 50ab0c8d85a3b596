#define ACCLIMATE_ISA plain
#include "simd_plain.h"

#include "block_kernel.h"
#include "dense_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels plain_kernels = {{plain::multiply_dense<plain::FloatStep<plain::F32Weight>>,
                                plain::multiply_dense<plain::FloatStep<plain::Bf16Weight>>,
                                plain::multiply_dense<plain::FloatStep<plain::F16Weight>>},
                               nullptr,
                               plain::multiply_blocks,
                               plain::quantize,
                               plain::values_of_group,
                               plain::widen};

}  // namespace acclimate::inference
