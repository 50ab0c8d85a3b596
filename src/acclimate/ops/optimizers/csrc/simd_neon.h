// Opens namespace `neon`: four floats. simd_end.h closes it. Every 64-bit Arm has these instructions.
#include <arm_neon.h>

#include "group.h"

#define ACCLIMATE_INLINE inline __attribute__((always_inline))
#define ACCLIMATE_KERNEL

namespace acclimate::neon {

struct V {
  static constexpr int64_t lanes = 4;
  float32x4_t x;
};

ACCLIMATE_INLINE V broadcast(float a) { return {vdupq_n_f32(a)}; }
ACCLIMATE_INLINE V operator+(V a, V b) { return {vaddq_f32(a.x, b.x)}; }
ACCLIMATE_INLINE V operator-(V a, V b) { return {vsubq_f32(a.x, b.x)}; }
ACCLIMATE_INLINE V operator*(V a, V b) { return {vmulq_f32(a.x, b.x)}; }
ACCLIMATE_INLINE V operator/(V a, V b) { return {vdivq_f32(a.x, b.x)}; }
ACCLIMATE_INLINE V square_root(V a) { return {vsqrtq_f32(a.x)}; }
// 1, 0 or -1; 0 for NaN, like torch.sign.
ACCLIMATE_INLINE V sign(V a) {
  const uint32x4_t one = vreinterpretq_u32_f32(vdupq_n_f32(1.0f));
  const float32x4_t positive = vreinterpretq_f32_u32(vandq_u32(vcgtzq_f32(a.x), one));
  return {vsubq_f32(positive, vreinterpretq_f32_u32(vandq_u32(vcltzq_f32(a.x), one)))};
}

ACCLIMATE_INLINE V load_f32(const float* from) { return {vld1q_f32(from)}; }
ACCLIMATE_INLINE V load_bf16(const uint16_t* from) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16))};
}
ACCLIMATE_INLINE V load_f16(const uint16_t* from) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))};
}

ACCLIMATE_INLINE void store_f32(float* to, V value) { vst1q_f32(to, value.x); }
// Rounds to nearest, ties to even; NaN stays NaN.
ACCLIMATE_INLINE void store_bf16(uint16_t* to, V value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value.x);
  const uint32x4_t upper = vshrq_n_u32(bits, 16);
  const uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
  const uint32x4_t quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
  vst1_u16(to, vmovn_u32(vbslq_u32(vceqq_f32(value.x, value.x), rounded, quiet)));
}
ACCLIMATE_INLINE void store_f16(uint16_t* to, V value) {
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value.x)));
}
// Stores two vectors; compilers expose no Arm store that bypasses the cache.
ACCLIMATE_INLINE void stream_bf16(uint16_t* to, V a, V b) {
  store_bf16(to, a);
  store_bf16(to + V::lanes, b);
}
ACCLIMATE_INLINE void stream_f16(uint16_t* to, V a, V b) {
  store_f16(to, a);
  store_f16(to + V::lanes, b);
}
ACCLIMATE_INLINE void fence() {}
