// Opens namespace `plain`: four floats in portable vector code. simd_end.h closes it.
//
// No kernel uses fused multiply-add, and sources are compiled with -ffp-contract=off, so that every
// instruction set and the fallback in torch give the same bits.
#include <cmath>

#include "group.h"

#define ACCLIMATE_INLINE inline __attribute__((always_inline))
#define ACCLIMATE_KERNEL

namespace acclimate::plain {

struct V {
  static constexpr int64_t lanes = 4;
  typedef float Floats __attribute__((vector_size(16)));
  Floats x;
};

ACCLIMATE_INLINE V broadcast(float a) { return {V::Floats{a, a, a, a}}; }
ACCLIMATE_INLINE V operator+(V a, V b) { return {a.x + b.x}; }
ACCLIMATE_INLINE V operator-(V a, V b) { return {a.x - b.x}; }
ACCLIMATE_INLINE V operator*(V a, V b) { return {a.x * b.x}; }
ACCLIMATE_INLINE V operator/(V a, V b) { return {a.x / b.x}; }
ACCLIMATE_INLINE V square_root(V a) {
  return {V::Floats{std::sqrt(a.x[0]), std::sqrt(a.x[1]), std::sqrt(a.x[2]), std::sqrt(a.x[3])}};
}
// 1, 0 or -1; 0 for NaN, like torch.sign.
ACCLIMATE_INLINE V sign(V a) {
  V result;
  for (int i = 0; i < 4; ++i) {
    result.x[i] = static_cast<float>((a.x[i] > 0) - (a.x[i] < 0));
  }
  return result;
}

ACCLIMATE_INLINE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
ACCLIMATE_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Rounds to nearest, ties to even.
ACCLIMATE_INLINE uint16_t bf16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ACCLIMATE_INLINE uint16_t f16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  }
  if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24: adding 0.5 makes the hardware round to one of them.
    return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

ACCLIMATE_INLINE float float_of_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  if (magnitude < 0x400u) {
    return float_of_bits(sign | bits_of_float(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return float_of_bits(sign | ((magnitude << 13) + 0x38000000u));
}

ACCLIMATE_INLINE V load_f32(const float* from) {
  V result;
  std::memcpy(&result.x, from, 16);
  return result;
}
ACCLIMATE_INLINE V load_bf16(const uint16_t* from) {
  V result;
  for (int i = 0; i < 4; ++i) {
    result.x[i] = float_of_bits(static_cast<uint32_t>(from[i]) << 16);
  }
  return result;
}
ACCLIMATE_INLINE V load_f16(const uint16_t* from) {
  V result;
  for (int i = 0; i < 4; ++i) {
    result.x[i] = float_of_f16(from[i]);
  }
  return result;
}
ACCLIMATE_INLINE void store_f32(float* to, V value) { std::memcpy(to, &value.x, 16); }
ACCLIMATE_INLINE void store_bf16(uint16_t* to, V value) {
  for (int i = 0; i < 4; ++i) {
    to[i] = bf16_of_float(value.x[i]);
  }
}
ACCLIMATE_INLINE void store_f16(uint16_t* to, V value) {
  for (int i = 0; i < 4; ++i) {
    to[i] = f16_of_float(value.x[i]);
  }
}
// Stores two vectors; here through the cache.
ACCLIMATE_INLINE void stream_bf16(uint16_t* to, V a, V b) {
  store_bf16(to, a);
  store_bf16(to + V::lanes, b);
}
ACCLIMATE_INLINE void stream_f16(uint16_t* to, V a, V b) {
  store_f16(to, a);
  store_f16(to + V::lanes, b);
}
ACCLIMATE_INLINE void fence() {}
