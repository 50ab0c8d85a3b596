// Opens namespace `avx512`: sixteen floats. With ACCLIMATE_AVX512_BF16 it opens `avx512_bf16`, in which the
// hardware converts to bfloat16. simd_end.h closes it.
#include <immintrin.h>

#include "group.h"

#if defined(ACCLIMATE_AVX512_BF16)
#define ACCLIMATE_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#else
#define ACCLIMATE_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#endif
#define ACCLIMATE_INLINE inline __attribute__((always_inline)) ACCLIMATE_TARGET
#define ACCLIMATE_KERNEL ACCLIMATE_TARGET

#if defined(ACCLIMATE_AVX512_BF16)
namespace acclimate::avx512_bf16 {
#else
namespace acclimate::avx512 {
#endif

struct V {
  static constexpr int64_t lanes = 16;
  __m512 x;
};

ACCLIMATE_INLINE V broadcast(float a) { return {_mm512_set1_ps(a)}; }
ACCLIMATE_INLINE V operator+(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V operator-(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V operator*(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V operator/(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
ACCLIMATE_INLINE V square_root(V a) { return {_mm512_sqrt_ps(a.x)}; }
// 1, 0 or -1; 0 for NaN, like torch.sign.
ACCLIMATE_INLINE V sign(V a) {
  const __m512 zero = _mm512_setzero_ps();
  const __mmask16 positive = _mm512_cmp_ps_mask(a.x, zero, _CMP_GT_OQ);
  const __mmask16 negative = _mm512_cmp_ps_mask(a.x, zero, _CMP_LT_OQ);
  const __m512 ones = _mm512_maskz_mov_ps(positive, _mm512_set1_ps(1.0f));
  return {_mm512_mask_mov_ps(ones, negative, _mm512_set1_ps(-1.0f))};
}

ACCLIMATE_INLINE V load_f32(const float* from) { return {_mm512_loadu_ps(from)}; }
ACCLIMATE_INLINE V load_bf16(const uint16_t* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
ACCLIMATE_INLINE V load_f16(const uint16_t* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}

// Rounds to nearest, ties to even; NaN stays NaN.
ACCLIMATE_INLINE __m256i rounded_to_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i wide = _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(wide);
}

ACCLIMATE_INLINE __m256i bf16_of(V value);

ACCLIMATE_INLINE void store_f32(float* to, V value) { _mm512_storeu_ps(to, value.x); }
ACCLIMATE_INLINE void store_bf16(uint16_t* to, V value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bf16_of(value));
}
ACCLIMATE_INLINE void store_f16(uint16_t* to, V value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value.x, _MM_FROUND_TO_NEAREST_INT));
}
// Stores two vectors past the cache, to an address that is a multiple of their size.
ACCLIMATE_INLINE void stream_bf16(uint16_t* to, V a, V b) {
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(bf16_of(a)), bf16_of(b), 1);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
}
ACCLIMATE_INLINE void stream_f16(uint16_t* to, V a, V b) {
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
  const __m512i both = _mm512_inserti64x4(low, _mm512_cvtps_ph(b.x, _MM_FROUND_TO_NEAREST_INT), 1);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
}
ACCLIMATE_INLINE void fence() { _mm_sfence(); }

#if defined(ACCLIMATE_AVX512_BF16)
// VCVTNEPS2BF16 treats denormals as zero whatever the control register says (Intel SDM), so denormals are
// rounded in software, and every instruction set gives the same bits.
ACCLIMATE_INLINE __m256i bf16_of(V value) {
  constexpr int denormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(value.x, denormal) != 0, 0)) {
    return rounded_to_bf16(value.x);
  }
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value.x));
}
#else
ACCLIMATE_INLINE __m256i bf16_of(V value) { return rounded_to_bf16(value.x); }
#endif
