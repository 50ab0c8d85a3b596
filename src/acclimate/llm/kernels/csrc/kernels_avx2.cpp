#if defined(__x86_64__)
#define ACCLIMATE_ISA avx2
#include "simd_avx2.h"

#include "block_kernel.h"
#include "dense_kernel.h"
#include "int8_rows_kernel.h"
#include "values_kernel.h"
#include "wide_kernel.h"

namespace acclimate::inference {

const Kernels avx2_kernels = {
    {avx2::multiply_dense<avx2::HalfStep<Dtype::f32>>, avx2::multiply_dense<avx2::HalfStep<Dtype::bf16>>,
     avx2::multiply_dense<avx2::HalfStep<Dtype::f16>>},
    nullptr,
    avx2::multiply_blocks,
    avx2::quantize,
    avx2::values_of_group,
    avx2::widen,
    avx2::widen_rows,
    avx2::multiply_wide,
    sizeof(float),
    avx2::multiply_int8_rows};

}  // namespace acclimate::inference
#endif
