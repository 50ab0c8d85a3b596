// Opens namespace `avx512`: sixteen floats. simd_end.h closes it.
#include <immintrin.h>

#include "step.h"

#define ACCLIMATE_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define ACCLIMATE_INLINE inline __attribute__((always_inline)) ACCLIMATE_TARGET
#define ACCLIMATE_KERNEL ACCLIMATE_TARGET

namespace acclimate::avx512 {

#include "simd_avx512_common.h"

ACCLIMATE_INLINE __m256i bf16_of(V value) { return rounded_to_bf16(value.x); }
