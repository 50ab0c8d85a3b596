// Vectors of AVX-512: a group of 16 rows is one register.
#include <immintrin.h>

#include <cstdint>

namespace acclimate::inference::ACCLIMATE_ISA {

constexpr int most_inputs = 8;
constexpr int most_block_inputs = most_inputs;
constexpr int many_groups = 2, many_inputs = 6;  // of quantised weights, for more inputs than that
constexpr int wide_groups = 2, wide_inputs = 12;  // of a product in float32 whose sums stay in registers

using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats set_floats(float a) { return _mm512_set1_ps(a); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats mul(Floats a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
inline Floats mul_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats mul_add(Floats a, float b, Floats c) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
inline Floats sub_mul(Floats a, float b, Floats c) { return _mm512_fnmadd_ps(a, _mm512_set1_ps(b), c); }
inline Floats load_f32(const void* from) { return _mm512_loadu_ps(from); }
inline Floats load_f16(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
inline Floats load_bf16(const void* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Floats load_u8(const void* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}
inline Floats load_i8(const void* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}
// 2^(x - 128) of 16 bytes x; 0 for 0 and 1, for which it is denormal.
inline Floats load_exponents(const void* from) {
  const __m128i x = _mm_subs_epu8(_mm_loadu_si128(static_cast<const __m128i*>(from)), _mm_set1_epi8(1));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(x), 23));
}
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline void store(float* to, Floats a) { _mm512_storeu_ps(to, a); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }
// The sums of eight vectors: the same additions as in eight calls of `sum`, with a third of the instructions.
inline void sum_8(const Floats* a, float* to) {
  Floats halves[4], quarters[2];
  for (int i = 0; i < 4; ++i) {
    const Floats b = a[2 * i], c = a[2 * i + 1];
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b, c, 0x44), _mm512_shuffle_f32x4(b, c, 0xee));
  }
  for (int i = 0; i < 2; ++i) {
    const Floats b = halves[2 * i], c = halves[2 * i + 1];
    quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b, c, 0x88), _mm512_shuffle_f32x4(b, c, 0xdd));
  }
  const __m512d b = _mm512_castps_pd(quarters[0]), c = _mm512_castps_pd(quarters[1]);
  const Floats pairs =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(b, c)), _mm512_castpd_ps(_mm512_unpackhi_pd(b, c)));
  const Floats sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
  const Ints order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 10, 6, 2, 12, 8, 4, 0);
  _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
}
inline Ints set(int32_t a) { return _mm512_set1_epi32(a); }

inline Bytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes low_bits(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes high_bits(Bytes a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
// The numbers of a table of 16 that codes of 4 bits stand for.
inline Bytes look_up(const uint8_t* table, Bytes codes) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), codes);
}
template <int from>
inline Bytes shifted_to_4(Bytes bits) {
  if constexpr (from < 4) {
    return _mm512_slli_epi16(bits, 4 - from);
  } else if constexpr (from == 4) {
    return bits;
  } else {
    return _mm512_srli_epi16(bits, from - 4);
  }
}
// Adds bit `from` of each byte as bit 4.
template <int from>
inline Bytes with_bit(Bytes a, Bytes bits) {
  return _mm512_ternarylogic_epi32(a, shifted_to_4<from>(bits), _mm512_set1_epi8(0x10), 0xf8);  // a | b & c
}
// Adds bits `from` and `from + 1` of each byte as bits 4 and 5.
template <int from>
inline Bytes with_bits(Bytes a, Bytes bits) {
  return _mm512_ternarylogic_epi32(a, shifted_to_4<from>(bits), _mm512_set1_epi8(0x30), 0xf8);
}

#if defined(__AVX512VNNI__)
constexpr bool wide_codes_have_offset = true;

template <int bits>
inline Ints dot(Ints sums, Bytes codes, const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, 4);
  return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(quad));
}
#endif

inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

// How far ahead dense weights are fetched into the second cache: else memory is idle while several inputs are
// multiplied.
constexpr int64_t bytes_ahead = 32 << 10;
inline void prefetch_ahead(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1); }

}  // namespace acclimate::inference::ACCLIMATE_ISA
