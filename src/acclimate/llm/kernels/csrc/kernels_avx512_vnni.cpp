#if defined(__x86_64__)
#define ACCLIMATE_ISA avx512_vnni
#include "simd_avx512.h"

#include "block_kernel.h"
#include "values_kernel.h"

namespace acclimate::inference {

const Kernels avx512_vnni_kernels = {.blocks = avx512_vnni::multiply_blocks,
                                     .quantize = avx512_vnni::quantize,
                                     .values = avx512_vnni::values_of_group,
                                     .widen = avx512_vnni::widen};

}  // namespace acclimate::inference
#endif
