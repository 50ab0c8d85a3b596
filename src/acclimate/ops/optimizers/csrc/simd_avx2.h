// Opens namespace `avx2`: eight floats. simd_end.h closes it.
//
// Each function names its target, so that one file holds all instruction sets and no build flag can put wide
// instructions into code that runs on older machines.
#include <immintrin.h>

#include "group.h"

#define ACCLIMATE_TARGET __attribute__((target("avx2,f16c")))
#define ACCLIMATE_INLINE inline __attribute__((always_inline)) ACCLIMATE_TARGET
#define ACCLIMATE_KERNEL ACCLIMATE_TARGET

namespace acclimate::avx2 {

struct V {
  static constexpr int64_t lanes = 8;
  __m256 x;
};

ACCLIMATE_INLINE V broadcast(float a) { return {_mm256_set1_ps(a)}; }
ACCLIMATE_INLINE V operator+(V a, V b) { return {_mm256_add_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V operator-(V a, V b) { return {_mm256_sub_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V operator*(V a, V b) { return {_mm256_mul_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V operator/(V a, V b) { return {_mm256_div_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V square_root(V a) { return {_mm256_sqrt_ps(a.x)}; }
// 1, 0 or -1; 0 for NaN, like torch.sign.
ACCLIMATE_INLINE V sign(V a) {
  const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
  const __m256 positive = _mm256_and_ps(_mm256_cmp_ps(a.x, zero, _CMP_GT_OQ), one);
  return {_mm256_sub_ps(positive, _mm256_and_ps(_mm256_cmp_ps(a.x, zero, _CMP_LT_OQ), one))};
}

ACCLIMATE_INLINE V load_f32(const float* from) { return {_mm256_loadu_ps(from)}; }
ACCLIMATE_INLINE V load_bf16(const uint16_t* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
ACCLIMATE_INLINE V load_f16(const uint16_t* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}

// Rounds to nearest, ties to even; NaN stays NaN.
ACCLIMATE_INLINE __m128i bf16_of(V value) {
  const __m256i bits = _mm256_castps_si256(value.x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value.x, value.x, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(rounded, quiet, is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x8);
  return _mm256_castsi256_si128(packed);
}

ACCLIMATE_INLINE void store_f32(float* to, V value) { _mm256_storeu_ps(to, value.x); }
ACCLIMATE_INLINE void store_bf16(uint16_t* to, V value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bf16_of(value));
}
ACCLIMATE_INLINE void store_f16(uint16_t* to, V value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value.x, _MM_FROUND_TO_NEAREST_INT));
}
// Stores two vectors past the cache, to an address that is a multiple of their size.
ACCLIMATE_INLINE void stream_bf16(uint16_t* to, V a, V b) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_set_m128i(bf16_of(b), bf16_of(a)));
}
ACCLIMATE_INLINE void stream_f16(uint16_t* to, V a, V b) {
  const __m256i both = _mm256_set_m128i(_mm256_cvtps_ph(b.x, _MM_FROUND_TO_NEAREST_INT),
                                        _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), both);
}
ACCLIMATE_INLINE void fence() { _mm_sfence(); }
