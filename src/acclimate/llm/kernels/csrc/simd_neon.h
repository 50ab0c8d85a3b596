// Vectors of Arm: a group of 16 rows is four registers.
#include <arm_neon.h>

#include <cstdint>

namespace acclimate::inference::ACCLIMATE_ISA {

constexpr int most_inputs = 2;
constexpr int most_block_inputs = most_inputs;
constexpr int many_groups = 1, many_inputs = most_block_inputs;

struct Floats {
  float32x4_t x[4];
};
struct Ints {
  int32x4_t x[4];
};
struct Bytes {
  uint8x16_t x[4];
};

#define EACH(expression)        \
  for (int i = 0; i < 4; ++i) { \
    r.x[i] = (expression);      \
  }                             \
  return r

inline Floats zero() {
  Floats r;
  EACH(vdupq_n_f32(0));
}
inline Floats add(Floats a, Floats b) {
  Floats r;
  EACH(vaddq_f32(a.x[i], b.x[i]));
}
inline Floats mul(Floats a, Floats b) {
  Floats r;
  EACH(vmulq_f32(a.x[i], b.x[i]));
}
inline Floats mul(Floats a, float b) {
  Floats r;
  EACH(vmulq_n_f32(a.x[i], b));
}
inline Floats mul_add(Floats a, Floats b, Floats c) {
  Floats r;
  EACH(vfmaq_f32(c.x[i], a.x[i], b.x[i]));
}
inline Floats mul_add(Floats a, float b, Floats c) {
  Floats r;
  EACH(vfmaq_n_f32(c.x[i], a.x[i], b));
}
inline Floats sub_mul(Floats a, float b, Floats c) {
  Floats r;
  EACH(vfmsq_f32(c.x[i], a.x[i], vdupq_n_f32(b)));
}
inline Floats load_f32(const void* from) {
  Floats r;
  EACH(vld1q_f32(static_cast<const float*>(from) + 4 * i));
}
inline uint16x4_t load_halves(const void* from, int i) {
  return vld1_u16(static_cast<const uint16_t*>(from) + 4 * i);
}
inline Floats load_f16(const void* from) {
  Floats r;
  EACH(vcvt_f32_f16(vreinterpret_f16_u16(load_halves(from, i))));
}
inline Floats load_bf16(const void* from) {
  Floats r;
  EACH(vreinterpretq_f32_u32(vshll_n_u16(load_halves(from, i), 16)));
}
inline Floats load_u8(const void* from) {
  const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(from));
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline Floats load_i8(const void* from) {
  const int8x16_t bytes = vld1q_s8(static_cast<const int8_t*>(from));
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline Floats to_floats(Ints a) {
  Floats r;
  EACH(vcvtq_f32_s32(a.x[i]));
}
inline void store(float* to, Floats a) {
  for (int i = 0; i < 4; ++i) {
    vst1q_f32(to + 4 * i, a.x[i]);
  }
}
inline float sum(Floats a) {
  return vaddvq_f32(vaddq_f32(vaddq_f32(a.x[0], a.x[1]), vaddq_f32(a.x[2], a.x[3])));
}
inline Ints set(int32_t a) {
  Ints r;
  EACH(vdupq_n_s32(a));
}

inline Bytes load_bytes(const uint8_t* from) {
  Bytes r;
  EACH(vld1q_u8(from + 16 * i));
}
inline Bytes low_bits(Bytes a) {
  Bytes r;
  EACH(vandq_u8(a.x[i], vdupq_n_u8(15)));
}
inline Bytes high_bits(Bytes a) {
  Bytes r;
  EACH(vshrq_n_u8(a.x[i], 4));
}
// The numbers of a table of 16 that codes of 4 bits stand for.
inline Bytes look_up(const uint8_t* table, Bytes codes) {
  const uint8x16_t numbers = vld1q_u8(table);
  Bytes r;
  EACH(vqtbl1q_u8(numbers, codes.x[i]));
}
// 2^(x - 128) of 16 bytes x; 0 for 0 and 1, for which it is denormal.
inline Floats load_exponents(const void* from) {
  const uint8x16_t bytes = vqsubq_u8(vld1q_u8(static_cast<const uint8_t*>(from)), vdupq_n_u8(1));
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  const auto quarter = [](uint16x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(x), 23)); };
  return {{quarter(vget_low_u16(low)), quarter(vget_high_u16(low)), quarter(vget_low_u16(high)),
           quarter(vget_high_u16(high))}};
}
template <int from>
inline uint8x16_t shifted_to_4(uint8x16_t bits) {
  if constexpr (from < 4) {
    return vshlq_n_u8(bits, 4 - from);
  } else if constexpr (from == 4) {
    return bits;
  } else {
    return vshrq_n_u8(bits, from - 4);
  }
}
template <int from>
inline Bytes with_bit(Bytes a, Bytes bits) {
  Bytes r;
  EACH(vorrq_u8(a.x[i], vandq_u8(shifted_to_4<from>(bits.x[i]), vdupq_n_u8(0x10))));
}
template <int from>
inline Bytes with_bits(Bytes a, Bytes bits) {
  Bytes r;
  EACH(vorrq_u8(a.x[i], vandq_u8(shifted_to_4<from>(bits.x[i]), vdupq_n_u8(0x30))));
}

constexpr bool wide_codes_have_offset = false;

template <int bits>
inline int8x16_t signed_codes(uint8x16_t codes) {
  return vreinterpretq_s8_u8(bits == 8 ? veorq_u8(codes, vdupq_n_u8(128)) : codes);
}

template <int bits>
inline Ints dot(Ints sums, Bytes codes, const int8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, 4);
  const int8x16_t inputs = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  for (int i = 0; i < 4; ++i) {
    const int8x16_t centred = signed_codes<bits>(codes.x[i]);
#if defined(__ARM_FEATURE_DOTPROD)
    sums.x[i] = vdotq_s32(sums.x[i], centred, inputs);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(centred), vget_low_s8(inputs)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(centred, inputs));
    sums.x[i] = vaddq_s32(sums.x[i], vpaddq_s32(low, high));
#endif
  }
  return sums;
}
#undef EACH

inline void prefetch(const void* at) { __builtin_prefetch(at); }

constexpr int64_t bytes_ahead = 0;  // the next rows
inline void prefetch_ahead(const void* at) { prefetch(at); }

}  // namespace acclimate::inference::ACCLIMATE_ISA
