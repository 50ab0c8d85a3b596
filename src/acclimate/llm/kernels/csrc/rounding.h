// Numbers rounded to a dtype. Functions are static, since they are compiled for several instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear.h"

// ACCLIMATE_CLONES: compiles a function once for each instruction set. The loader chooses one that the
// processor can run, before the library could be told of ACCLIMATE_CPU_ISA. It has no effect on them and
// needs none: no multiplication and addition are fused, so all of them round in the same way.
#if defined(__x86_64__) && defined(__GLIBC__)
#define ACCLIMATE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ACCLIMATE_CLONES
#endif
#define ACCLIMATE_INLINE inline __attribute__((always_inline))

namespace acclimate::inference {

static ACCLIMATE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

static ACCLIMATE_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

static ACCLIMATE_INLINE uint32_t rounded_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (x != x ? bits | 0x400000 : rounded) & 0xffff0000u;
}

template <Dtype dtype>
static ACCLIMATE_INLINE float rounded(float x) {
  if constexpr (dtype == Dtype::bf16) {
    return float_of(rounded_bf16(x));
  } else if constexpr (dtype == Dtype::f16) {
    // Adding and subtracting a power of two rounds to its last place: 2^13 times the value's own, and at
    // least the last place of the smallest float16.
    const uint32_t exponent = std::max(bits_of(x) & 0x7f800000u, 113u << 23);
    const float shift = float_of(exponent + (13u << 23));
    const float magnitude = float_of(bits_of(x) & 0x7fffffffu);
    const float result = (magnitude + shift) - shift;
    const float bounded = result > 65504.0f ? std::numeric_limits<float>::infinity() : result;
    return x != x ? x : float_of(bits_of(bounded) | (bits_of(x) & 0x80000000u));
  } else {
    return x;
  }
}

// The value must be representable in float16, so that only its bits move.
static ACCLIMATE_INLINE uint16_t bits_of_f16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x7f800000u) {
    half = 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u);
  } else if (magnitude >= 113u << 23) {
    half = (magnitude >> 13) - (112u << 10);
  } else {
    half = static_cast<uint32_t>(std::fabs(x) * 16777216.0f);
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace acclimate::inference
