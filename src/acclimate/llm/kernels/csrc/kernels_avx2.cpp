#if defined(__x86_64__)
#define ACCLIMATE_ISA avx2
#include "simd_avx2.h"

#include "block_kernel.h"
#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#include "values_kernel.h"
#include "wide_kernel.h"

namespace acclimate::inference {

const Kernels avx2_kernels = {.dense = {avx2::multiply_dense<avx2::HalfStep<Dtype::f32>>,
                                        avx2::multiply_dense<avx2::HalfStep<Dtype::bf16>>,
                                        avx2::multiply_dense<avx2::HalfStep<Dtype::f16>>},
                              .blocks = avx2::multiply_blocks,
                              .quantize = avx2::quantize,
                              .values = avx2::values_of_group,
                              .widen = avx2::widen,
                              .repack_rows = avx2::widen_rows,
                              .multiply_repacked = avx2::multiply_wide,
                              .repacked_value_bytes = sizeof(float),
                              .int8_rows = avx2::multiply_int8_rows};

}  // namespace acclimate::inference
#endif
