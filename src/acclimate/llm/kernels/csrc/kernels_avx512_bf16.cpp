#if defined(__x86_64__)
#define ACCLIMATE_ISA avx512_bf16
#include "simd_avx512.h"

#include "dense_kernel.h"
#include "many_kernel.h"

namespace acclimate::inference {

const Kernels avx512_bf16_kernels = {.dense_bf16 = avx512_bf16::multiply_dense<avx512_bf16::Bf16Step>,
                                     .repack_rows = avx512_bf16::repack_rows,
                                     .multiply_repacked = avx512_bf16::multiply_repacked,
                                     .repacked_value_bytes = sizeof(uint16_t)};

}  // namespace acclimate::inference
#endif
