#if defined(__x86_64__)
#define ACCLIMATE_ISA avx512
#include "simd_avx512.h"

#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#include "wide_kernel.h"

namespace acclimate::inference {

const Kernels avx512_kernels = {.dense = {avx512::multiply_dense<avx512::FloatStep<avx512::F32Weight>>,
                                          avx512::multiply_dense<avx512::FloatStep<avx512::Bf16Weight>>,
                                          avx512::multiply_dense<avx512::FloatStep<avx512::F16Weight>>},
                                .repack_rows = avx512::widen_rows,
                                .multiply_repacked = avx512::multiply_wide,
                                .repacked_value_bytes = sizeof(float),
                                .int8_rows = avx512::multiply_int8_rows};

}  // namespace acclimate::inference
#endif
