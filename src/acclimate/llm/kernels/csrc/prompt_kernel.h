// What is between the products of a prompt, for AVX-512 with conversions to bf16; included after
// many_kernel.h. Results are in bf16, so exponentials need not have all bits of a float.
#pragma once

#include "many_kernel.h"

namespace acclimate::inference::ACCLIMATE_ISA {

constexpr float minus_infinity = -__builtin_inff();

// Within 2^-21; 0 below -104. Of NaN it is NaN.
inline Floats exp_of(Floats x) {
  const Floats bounded = _mm512_max_ps(set_floats(-110.0f), x);  // of two operands with a NaN, the second
  const Floats whole = _mm512_roundscale_ps(mul(bounded, 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
  const Floats rest = _mm512_fnmadd_ps(whole, set_floats(-2.12194440e-4f),
                                       _mm512_fnmadd_ps(whole, set_floats(0.693359375f), bounded));
  Floats y = mul_add(rest, set_floats(1.3981999507e-3f), set_floats(8.3334519073e-3f));
  y = mul_add(y, rest, set_floats(4.1665795894e-2f));
  y = mul_add(y, rest, set_floats(1.6666665459e-1f));
  y = mul_add(y, rest, set_floats(5.0000001201e-1f));
  y = mul_add(y, rest, set_floats(1.0f));
  y = mul_add(y, rest, set_floats(1.0f));
  return _mm512_scalef_ps(y, whole);
}

// Calls step(first, lanes) for 16 numbers after the other: all lanes but in the last step.
template <class Step>
inline void for_each_16(int64_t n, const Step& step) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    step(i, __mmask16{0xffff});
  }
  if (i < n) {
    step(i, static_cast<__mmask16>((1u << (n - i)) - 1));
  }
}

float weigh(float scale, const float* x, int64_t n, uint16_t* to, float& peak) {
  Floats largest = set_floats(minus_infinity);
  for_each_16(n, [&](int64_t i, __mmask16 lanes) {
    largest = _mm512_max_ps(_mm512_mask_loadu_ps(set_floats(minus_infinity), lanes, x + i), largest);
  });
  peak = _mm512_reduce_max_ps(largest) * scale;
  Floats sums = zero();
  for_each_16(n, [&](int64_t i, __mmask16 lanes) {
    const Floats own = _mm512_maskz_loadu_ps(lanes, x + i);
    const Floats found =
        _mm512_maskz_mov_ps(lanes, exp_of(_mm512_fmsub_ps(own, set_floats(scale), set_floats(peak))));
    sums = add(sums, found);
    _mm256_mask_storeu_epi16(to + i, lanes, in_bf16(found));
  });
  return sum(sums);
}

inline Floats silu(Floats x) {
  return _mm512_div_ps(x, add(set_floats(1.0f), exp_of(_mm512_sub_ps(zero(), x))));
}

// 0.5 * x * (1 + tanh(u)) is x / (1 + exp(-2 u)).
inline Floats gelu_tanh(Floats x) {
  const Floats cube = mul(mul(mul(x, 0.044715f), x), x);
  return _mm512_div_ps(x, add(set_floats(1.0f), exp_of(mul(add(x, cube), -1.595769122f))));
}

template <Floats (*activated)(Floats)>
void gate(const float* gate, const float* up, int64_t n, uint16_t* to) {
  for_each_16(n, [&](int64_t i, __mmask16 lanes) {
    Floats result = _mm512_maskz_loadu_ps(lanes, up + i);
    if (gate == nullptr) {
      result = activated(result);
    } else {
      result = mul(rounded(activated(_mm512_maskz_loadu_ps(lanes, gate + i))), result);
    }
    _mm256_mask_storeu_epi16(to + i, lanes, in_bf16(result));
  });
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
