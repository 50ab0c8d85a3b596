// Vectors of AVX2: a group of 16 rows is two registers.
#include <immintrin.h>

#include <cstdint>

namespace acclimate::inference::ACCLIMATE_ISA {

constexpr int most_inputs = 2;
constexpr int most_block_inputs = 4;  // of quantised weights
constexpr int many_groups = 1, many_inputs = most_block_inputs;
constexpr int wide_groups = 1, wide_inputs = 6;  // of a product in float32 whose sums stay in registers

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};

inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats set_floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats mul(Floats x, float y) { return mul(x, set_floats(y)); }
inline Floats mul_add(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats mul_add(Floats x, float y, Floats z) { return mul_add(x, set_floats(y), z); }
inline Floats sub_mul(Floats x, float y, Floats z) {
  const __m256 factor = _mm256_set1_ps(y);
  return {_mm256_fnmadd_ps(x.a, factor, z.a), _mm256_fnmadd_ps(x.b, factor, z.b)};
}
inline Floats load_f32(const void* from) {
  const float* x = static_cast<const float*>(from);
  return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}
inline Floats load_f16(const void* from) {
  const __m128i* x = static_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x + 1))};
}
inline __m256 bf16_to_floats(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Floats load_bf16(const void* from) {
  const __m128i* x = static_cast<const __m128i*>(from);
  return {bf16_to_floats(_mm_loadu_si128(x)), bf16_to_floats(_mm_loadu_si128(x + 1))};
}
inline Floats load_u8(const void* from) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline Floats load_i8(const void* from) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
inline float sum(__m256 both) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float sum(Floats x) { return sum(_mm256_add_ps(x.a, x.b)); }
inline Ints set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

inline Bytes load_bytes(const uint8_t* from) {
  const __m256i* x = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(x), _mm256_loadu_si256(x + 1)};
}
inline Bytes low_bits(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes high_bits(Bytes x) { return low_bits({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
// The numbers of a table of 16 that codes of 4 bits stand for.
inline Bytes look_up(const uint8_t* table, Bytes codes) {
  const __m256i numbers =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(numbers, codes.a), _mm256_shuffle_epi8(numbers, codes.b)};
}
// 2^(x - 128) of 16 bytes x; 0 for 0 and 1, for which it is denormal.
inline Floats load_exponents(const void* from) {
  const __m128i x = _mm_subs_epu8(_mm_loadu_si128(static_cast<const __m128i*>(from)), _mm_set1_epi8(1));
  const auto half = [](__m128i bytes) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
  };
  return {half(x), half(_mm_srli_si128(x, 8))};
}
template <int from>
inline __m256i shifted_to_4(__m256i bits) {
  if constexpr (from < 4) {
    return _mm256_slli_epi16(bits, 4 - from);
  } else {
    return _mm256_srli_epi16(bits, from - 4);
  }
}
template <int from>
inline Bytes with_mask(Bytes x, Bytes bits, __m256i mask) {
  return {_mm256_or_si256(x.a, _mm256_and_si256(shifted_to_4<from>(bits.a), mask)),
          _mm256_or_si256(x.b, _mm256_and_si256(shifted_to_4<from>(bits.b), mask))};
}
template <int from>
inline Bytes with_bit(Bytes x, Bytes bits) {
  return with_mask<from>(x, bits, _mm256_set1_epi8(0x10));
}
template <int from>
inline Bytes with_bits(Bytes x, Bytes bits) {
  return with_mask<from>(x, bits, _mm256_set1_epi8(0x30));
}

// Two products of 8-bit codes and inputs can exceed 16 bits. Signed codes as magnitudes, with their sign
// moved to the inputs, cannot.
constexpr bool wide_codes_have_offset = false;

template <int bits>
inline __m256i dot(__m256i sums, __m256i codes, __m256i x) {
  if constexpr (bits == 8) {
    const __m256i centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    x = _mm256_sign_epi8(x, centred);
    codes = _mm256_abs_epi8(centred);
  }
  const __m256i pairs = _mm256_maddubs_epi16(codes, x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <int bits>
inline Ints dot(Ints sums, Bytes codes, const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, 4);
  const __m256i inputs = _mm256_set1_epi32(quad);
  return {dot<bits>(sums.a, codes.a, inputs), dot<bits>(sums.b, codes.b, inputs)};
}

inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

constexpr int64_t bytes_ahead = 0;  // the next rows
inline void prefetch_ahead(const void* at) { prefetch(at); }

}  // namespace acclimate::inference::ACCLIMATE_ISA
