// Opens namespace `cuda`: one float of one thread. simd_end.h closes it.
//
// The host's rules run here unchanged and give the same bits: sources are compiled with -fmad=false, and
// division and square root are correctly rounded by default.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "group.h"

#define ACCLIMATE_INLINE __device__ __forceinline__
#define ACCLIMATE_KERNEL __device__

namespace acclimate::cuda {

struct V {
  static constexpr int64_t lanes = 1;
  float x;
};

ACCLIMATE_INLINE V broadcast(float a) { return {a}; }
ACCLIMATE_INLINE V operator+(V a, V b) { return {a.x + b.x}; }
ACCLIMATE_INLINE V operator-(V a, V b) { return {a.x - b.x}; }
ACCLIMATE_INLINE V operator*(V a, V b) { return {a.x * b.x}; }
ACCLIMATE_INLINE V operator/(V a, V b) { return {a.x / b.x}; }
ACCLIMATE_INLINE V square_root(V a) { return {sqrtf(a.x)}; }
// 1, 0 or -1; 0 for NaN, like torch.sign.
ACCLIMATE_INLINE V sign(V a) { return {static_cast<float>((a.x > 0.0f) - (a.x < 0.0f))}; }

// Four neighbours at a time make full memory transactions; `aligned` says whether that is possible.
constexpr int elements_per_access = 4;

ACCLIMATE_INLINE float float_of(uint16_t bits, Dtype dtype) {
  return dtype == Dtype::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                              : __half2float(__ushort_as_half(bits));
}
ACCLIMATE_INLINE uint16_t bits_of(float value, Dtype dtype) {
  return dtype == Dtype::bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                              : __half_as_ushort(__float2half_rn(value));
}

ACCLIMATE_INLINE void load(const char* data, Dtype dtype, int64_t i, int count, bool aligned, V* to) {
  if (dtype == Dtype::f32) {
    const float* const from = reinterpret_cast<const float*>(data) + i;
    if (aligned && count == elements_per_access) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      to[0].x = four.x, to[1].x = four.y, to[2].x = four.z, to[3].x = four.w;
      return;
    }
#pragma unroll
    for (int k = 0; k < elements_per_access; ++k) {
      to[k].x = k < count ? from[k] : 0.0f;
    }
    return;
  }
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(data) + i;
  ushort4 four{0, 0, 0, 0};
  if (aligned && count == elements_per_access) {
    four = *reinterpret_cast<const ushort4*>(from);
  } else {
    four.x = from[0];
    four.y = count > 1 ? from[1] : 0;
    four.z = count > 2 ? from[2] : 0;
    four.w = count > 3 ? from[3] : 0;
  }
  to[0].x = float_of(four.x, dtype), to[1].x = float_of(four.y, dtype);
  to[2].x = float_of(four.z, dtype), to[3].x = float_of(four.w, dtype);
}

ACCLIMATE_INLINE void store(char* data, Dtype dtype, int64_t i, int count, bool aligned, const V* from) {
  if (dtype == Dtype::f32) {
    float* const to = reinterpret_cast<float*>(data) + i;
    if (aligned && count == elements_per_access) {
      *reinterpret_cast<float4*>(to) = make_float4(from[0].x, from[1].x, from[2].x, from[3].x);
      return;
    }
    // A loop to `count` would put the vectors into local memory, and each load would wait for the one before.
#pragma unroll
    for (int k = 0; k < elements_per_access; ++k) {
      if (k < count) {
        to[k] = from[k].x;
      }
    }
    return;
  }
  uint16_t* const to = reinterpret_cast<uint16_t*>(data) + i;
  if (aligned && count == elements_per_access) {
    *reinterpret_cast<ushort4*>(to) = make_ushort4(bits_of(from[0].x, dtype), bits_of(from[1].x, dtype),
                                                   bits_of(from[2].x, dtype), bits_of(from[3].x, dtype));
    return;
  }
#pragma unroll
  for (int k = 0; k < elements_per_access; ++k) {
    if (k < count) {
      to[k] = bits_of(from[k].x, dtype);
    }
  }
}
