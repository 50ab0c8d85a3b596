// Opens namespace `avx512_bf16`: sixteen floats, converted by the hardware. simd_end.h closes it.
#include <immintrin.h>

#include "step.h"

#define ACCLIMATE_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define ACCLIMATE_INLINE inline __attribute__((always_inline)) ACCLIMATE_TARGET
#define ACCLIMATE_KERNEL ACCLIMATE_TARGET

namespace acclimate::avx512_bf16 {

#include "simd_avx512_common.h"

// VCVTNEPS2BF16 treats denormals as zero whatever the control register says (Intel SDM), so denormals are
// rounded in software, and every instruction set gives the same bits.
ACCLIMATE_INLINE __m256i bf16_of(V value) {
  constexpr int denormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(value.x, denormal) != 0, 0)) {
    return rounded_to_bf16(value.x);
  }
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value.x));
}
