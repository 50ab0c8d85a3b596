#include "decode_math.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "rounding.h"

namespace acclimate::inference::decode {
namespace {

constexpr int64_t lanes = 16;

// Within 2 units in the last place; 0 below -87.
ACCLIMATE_INLINE float exp_of(float x) {
  const float bounded = std::min(std::max(x, -87.3f), 88.7f);
  const float shifted = bounded * 1.44269504f + 12582912.0f;  // rounds to a whole number
  const float whole = shifted - 12582912.0f;
  const float rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.0f;
  const float power = float_of((bits_of(shifted) - 0x4b400000u + 127u) << 23);
  return x < -87.3f ? 0.0f : y * power;
}

ACCLIMATE_INLINE float tanh_of(float x) {
  const float square = x * x;
  const float small =
      x + x * square *
              (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f + square * 0.0218694885f)));
  const float large = 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f);
  return square < 0.04f ? small : large;
}

template <Activation activation>
ACCLIMATE_INLINE float activated(float x) {
  switch (activation) {
    case Activation::silu:
      return x / (1.0f + exp_of(-x));
    case Activation::gelu_tanh:
      // 0.5 * x * (1 + tanh(u)) is x / (1 + exp(-2 u)).
      return x / (1.0f + exp_of(-1.595769122f * (x + 0.044715f * x * x * x)));
    case Activation::gelu:
      return 0.5f * x * (1.0f + std::erf(x * 0.707106781f));
    case Activation::relu:
      return std::max(x, 0.0f);
    case Activation::relu2:
      return std::max(x, 0.0f) * std::max(x, 0.0f);
  }
  return x;
}

template <class Function>
ACCLIMATE_INLINE void with_dtype(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::f32:
      return function.template operator()<Dtype::f32>();
    case Dtype::bf16:
      return function.template operator()<Dtype::bf16>();
    case Dtype::f16:
      return function.template operator()<Dtype::f16>();
  }
}

template <Activation activation, Dtype dtype>
ACCLIMATE_INLINE void activate_all(const float* gate, float* inner, int64_t n) {
  if (gate == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      inner[i] = rounded<dtype>(activated<activation>(inner[i]));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      inner[i] = rounded<dtype>(rounded<dtype>(activated<activation>(gate[i])) * inner[i]);
    }
  }
}

template <Dtype dtype>
ACCLIMATE_INLINE void activate_in(Activation activation, const float* gate, float* inner, int64_t n) {
  switch (activation) {
    case Activation::silu:
      return activate_all<Activation::silu, dtype>(gate, inner, n);
    case Activation::gelu_tanh:
      return activate_all<Activation::gelu_tanh, dtype>(gate, inner, n);
    case Activation::gelu:
      return activate_all<Activation::gelu, dtype>(gate, inner, n);
    case Activation::relu:
      return activate_all<Activation::relu, dtype>(gate, inner, n);
    case Activation::relu2:
      return activate_all<Activation::relu2, dtype>(gate, inner, n);
  }
}

ACCLIMATE_INLINE float total(const float (&sums)[lanes]) {
  float result = 0;
  for (float sum : sums) {
    result += sum;
  }
  return result;
}

ACCLIMATE_INLINE float sum_of(const float* x, int64_t n) {
  float sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      sums[lane] += x[i + lane];
    }
  }
  float result = total(sums);
  for (; i < n; ++i) {
    result += x[i];
  }
  return result;
}

ACCLIMATE_INLINE float sum_of_squares(const float* x, float mean, int64_t n) {
  float sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const float value = x[i + lane] - mean;
      sums[lane] += value * value;
    }
  }
  float result = total(sums);
  for (; i < n; ++i) {
    result += (x[i] - mean) * (x[i] - mean);
  }
  return result;
}

template <Dtype dtype>
ACCLIMATE_INLINE void normalize_by(const Norm& norm, const float* from, int64_t n, int64_t row, float mean,
                                   float square, float* to) {
  const float factor = 1.0f / std::sqrt(square + norm.eps);
  const int64_t first = norm.rows > 1 ? row % norm.rows * n : 0;
  const float* weight = norm.weight == nullptr ? nullptr : norm.weight + first;
  const float* bias = norm.bias == nullptr ? nullptr : norm.bias + first;
  for (int64_t i = 0; i < n; ++i) {
    to[i] = (from[i] - mean) * factor;
  }
  if (norm.rounds_first) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = rounded<dtype>(to[i]);
    }
  }
  if (weight != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] *= weight[i];
    }
    if (norm.rounds_first) {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = rounded<dtype>(to[i]);
      }
    }
  }
  if (bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] += bias[i];
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    to[i] = rounded<dtype>(to[i]);
  }
}

template <Dtype dtype>
ACCLIMATE_INLINE void normalize_in(const Norm& norm, const float* from, int64_t n, int64_t row, float* to) {
  const float mean = norm.is_layer ? sum_of(from, n) / static_cast<float>(n) : 0.0f;
  normalize_by<dtype>(norm, from, n, row, mean, sum_of_squares(from, mean, n) / static_cast<float>(n), to);
}

template <Dtype dtype, bool rounds_products>
ACCLIMATE_INLINE void rotate_pair(float cos, float sin, float& a, float& b) {
  float ac = a * cos, bs = b * sin, bc = b * cos, as = a * sin;
  if constexpr (rounds_products) {
    ac = rounded<dtype>(ac);
    bs = rounded<dtype>(bs);
    bc = rounded<dtype>(bc);
    as = rounded<dtype>(as);
  }
  a = rounded<dtype>(ac - bs);
  b = rounded<dtype>(bc + as);
}

// Works on local copies, which do not overlap, so that the compiler vectorises it.
template <Dtype dtype, bool rounds_products>
ACCLIMATE_INLINE void rotate_halves(const float* cos, const float* sin, int64_t pairs, float* x) {
  int64_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    float a[lanes], b[lanes], c[lanes], s[lanes];
    std::memcpy(a, x + i, sizeof(a));
    std::memcpy(b, x + pairs + i, sizeof(b));
    std::memcpy(c, cos + i, sizeof(c));
    std::memcpy(s, sin + i, sizeof(s));
    for (int64_t lane = 0; lane < lanes; ++lane) {
      rotate_pair<dtype, rounds_products>(c[lane], s[lane], a[lane], b[lane]);
    }
    std::memcpy(x + i, a, sizeof(a));
    std::memcpy(x + pairs + i, b, sizeof(b));
  }
  for (; i < pairs; ++i) {
    rotate_pair<dtype, rounds_products>(cos[i], sin[i], x[i], x[pairs + i]);
  }
}

template <Dtype dtype, bool rounds_products>
ACCLIMATE_INLINE void rotate_in(bool interleaved, const float* cos, const float* sin, int64_t pairs,
                                float* x) {
  if (!interleaved) {
    return rotate_halves<dtype, rounds_products>(cos, sin, pairs, x);
  }
  for (int64_t i = 0; i < pairs; ++i) {
    rotate_pair<dtype, rounds_products>(cos[i], sin[i], x[2 * i], x[2 * i + 1]);
  }
}

}  // namespace

ACCLIMATE_CLONES void round_values(Dtype dtype, float* x, int64_t n) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = rounded<own>(x[i]);
    }
  });
}

ACCLIMATE_CLONES void normalize(const Norm& norm, Dtype dtype, const float* from, int64_t n, int64_t row,
                                float* to) {
  if (!norm.is_there) {
    std::copy(from, from + n, to);
    return;
  }
  with_dtype(dtype,
             [&]<Dtype own>() __attribute__((always_inline)) { normalize_in<own>(norm, from, n, row, to); });
}

ACCLIMATE_CLONES float counted_squares(const Norm& norm, const float* from, int64_t n) {
  return norm.counts ? sum_of_squares(from, 0.0f, n) : 0.0f;
}

ACCLIMATE_CLONES void normalize_shared(const Norm& norm, Dtype dtype, const float* from, int64_t n,
                                       float squares, float* to) {
  const float mean_square = squares / static_cast<float>(norm.shared_columns);
  with_dtype(dtype, [&]<Dtype own>() __attribute__((always_inline)) {
    normalize_by<own>(norm, from, n, 0, 0.0f, mean_square, to);
  });
}

ACCLIMATE_CLONES void add_branch(Dtype dtype, float* x, const float* branch, float factor, int64_t n) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    if (factor == 1.0f) {
      for (int64_t i = 0; i < n; ++i) {
        x[i] = rounded<own>(x[i] + branch[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        x[i] = rounded<own>(x[i] + rounded<own>(branch[i] * factor));
      }
    }
  });
}

ACCLIMATE_CLONES void activate(Activation activation, Dtype dtype, const float* gate, float* inner,
                               int64_t n) {
  with_dtype(dtype, [=]<Dtype own>()
                        __attribute__((always_inline)) { activate_in<own>(activation, gate, inner, n); });
}

ACCLIMATE_CLONES void apply_gating(const Gating& gating, Dtype dtype, float* gate, float* up, int64_t n) {
  if (!gating.is_gated) {
    return activate(gating.activation, dtype, nullptr, up, n);
  }
  constexpr float none = std::numeric_limits<float>::infinity();
  // A comparison with NaN is false, so NaN stays.
  if (gating.gate_limit < none) {
    for (int64_t i = 0; i < n; ++i) {
      gate[i] = gate[i] > gating.gate_limit ? gating.gate_limit : gate[i];
    }
  }
  if (gating.up_limit < none) {
    for (int64_t i = 0; i < n; ++i) {
      const float bounded = up[i] > gating.up_limit ? gating.up_limit : up[i];
      up[i] = bounded < -gating.up_limit ? -gating.up_limit : bounded;
    }
  }
  if (gating.steepness == 1.0f && gating.adds == 0.0f) {
    return activate(gating.activation, dtype, gate, up, n);
  }
  with_dtype(dtype, [=, &gating]<Dtype own>() __attribute__((always_inline)) {
    const float steepness = gating.steepness, adds = gating.adds;
    for (int64_t i = 0; i < n; ++i) {
      const float x = gate[i];
      const float factor = rounded<own>(1.0f / (1.0f + exp_of(-rounded<own>(x * steepness))));
      const float active = rounded<own>(steepness == 1.0f ? x / (1.0f + exp_of(-x)) : x * factor);
      up[i] = rounded<own>(active * rounded<own>(up[i] + adds));
    }
  });
}

ACCLIMATE_CLONES void sigmoid(Dtype dtype, float* x, int64_t n) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = rounded<own>(1.0f / (1.0f + exp_of(-x[i])));
    }
  });
}

void softmax(float* x, int64_t n) {
  const float sum = exponentials(1.0f, largest(x, n), x, n);
  for (int64_t i = 0; i < n; ++i) {
    x[i] /= sum;
  }
}

ACCLIMATE_CLONES void add_bias(Dtype dtype, const float* bias, const float* from, int64_t n, float* to) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    if (bias == nullptr) {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = rounded<own>(from[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = rounded<own>(from[i] + bias[i]);
      }
    }
  });
}

ACCLIMATE_CLONES void rotate(Dtype dtype, bool interleaved, bool rounds_products, const float* cos,
                             const float* sin, int64_t pairs, float* x) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    if (rounds_products) {
      rotate_in<own, true>(interleaved, cos, sin, pairs, x);
    } else {
      rotate_in<own, false>(interleaved, cos, sin, pairs, x);
    }
  });
}

ACCLIMATE_CLONES void soft_cap(float cap, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = tanh_of(x[i] / cap) * cap;
  }
}

ACCLIMATE_CLONES void soft_cap_rounded(Dtype dtype, float cap, float* x, int64_t n) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = rounded<own>(rounded<own>(tanh_of(rounded<own>(x[i] / cap))) * cap);
    }
  });
}

ACCLIMATE_CLONES void multiply_values(Dtype dtype, const float* by, float* x, int64_t n) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = rounded<own>(x[i] * by[i]);
    }
  });
}

ACCLIMATE_CLONES void add_products(const float* by, const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] += by[i] * from[i];
  }
}

ACCLIMATE_CLONES void scale(Dtype dtype, float factor, float* x, int64_t n) {
  with_dtype(dtype, [=]<Dtype own>() __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = rounded<own>(x[i] * factor);
    }
  });
}

ACCLIMATE_CLONES float largest(const float* x, int64_t n) {
  float found[lanes];
  std::fill(found, found + lanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      found[lane] = found[lane] < x[i + lane] ? x[i + lane] : found[lane];
    }
  }
  float result = *std::max_element(found, found + lanes);
  for (; i < n; ++i) {
    result = std::max(result, x[i]);
  }
  return result;
}

ACCLIMATE_CLONES bool has_nan(const float* x, int64_t n) {
  int32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    found |= x[i] != x[i];
  }
  return found != 0;
}

ACCLIMATE_CLONES float exponentials(float factor, float shift, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = exp_of(x[i] * factor - shift);
  }
  return sum_of(x, n);
}

float weigh(float scale, float cap, float* x, int64_t n, float& peak) {
  if (cap > 0) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] *= scale;
    }
    soft_cap(cap, x, n);
    scale = 1.0f;
  }
  peak = largest(x, n) * scale;
  return exponentials(scale, peak, x, n);
}

ACCLIMATE_CLONES void divide_by_length(const float* x, float eps, float factor, int64_t n, float* to) {
  const float inverse = 1.0f / std::sqrt(sum_of_squares(x, 0.0f, n) + eps);
  for (int64_t i = 0; i < n; ++i) {
    to[i] = x[i] * inverse * factor;
  }
}

ACCLIMATE_CLONES void update_state(const float* before, const float* query, const float* key,
                                   const float* value, float decay, float strength, int64_t keys,
                                   int64_t values, float* __restrict__ change, float* __restrict__ after,
                                   float* __restrict__ result) {
  std::fill(change, change + values, 0.0f);
  std::fill(result, result + values, 0.0f);
  float overlap = 0;
  for (int64_t i = 0; i < keys; ++i) {
    const float* row = before + i * values;
    const float k = key[i], q = query[i];
    overlap += k * q;
    for (int64_t j = 0; j < values; ++j) {
      const float held = row[j] * decay;
      change[j] += held * k;
      result[j] += held * q;
    }
  }
  for (int64_t j = 0; j < values; ++j) {
    change[j] = (value[j] - change[j]) * strength;
    result[j] += overlap * change[j];
  }
  for (int64_t i = 0; i < keys; ++i) {
    const float* row = before + i * values;
    const float k = key[i];
    float* to = after + i * values;
    for (int64_t j = 0; j < values; ++j) {
      to[j] = row[j] * decay + k * change[j];
    }
  }
}

ACCLIMATE_CLONES void update_columns(const TokensOfRule& given, float* __restrict__ state) {
  constexpr int64_t columns = columns_of_state;
  float change[columns] = {};
  // What a token changes is added when the next one reads the state.
  for (int64_t token = 0; token <= given.tokens; ++token) {
    const int64_t at = token * given.stride;
    const bool has_before = token > 0, has_token = token < given.tokens;
    const float* query = given.queries + (has_before ? at - given.stride : at);
    const float* key_before = given.keys_of_tokens + (has_before ? at - given.stride : at);
    const float* key = given.keys_of_tokens + (has_token ? at : at - given.stride);
    const float decay = has_token ? given.decays[at] : 1.0f;
    float result[columns] = {}, seen[columns] = {};
    for (int64_t i = 0; i < given.keys; ++i) {
      float* row = state + i * columns;
      const float k = key[i], k_before = key_before[i], q = query[i];
      for (int64_t j = 0; j < columns; ++j) {
        const float after = row[j] + k_before * change[j];
        result[j] += after * q;
        row[j] = after * decay;
        seen[j] += row[j] * k;
      }
    }
    if (has_before) {
      std::copy(result, result + given.columns, given.values + at - given.stride);
    }
    if (has_token) {
      float value[columns] = {};
      std::copy(given.values + at, given.values + at + given.columns, value);
      for (int64_t j = 0; j < columns; ++j) {
        change[j] = (value[j] - seen[j]) * given.strengths[at];
      }
    }
  }
}

ACCLIMATE_CLONES void accumulate(float factor, const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] += factor * from[i];
  }
}

ACCLIMATE_CLONES void fill_bf16(const float* x, int64_t n, int64_t stride, uint16_t* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<uint16_t>(rounded_bf16(x[i]) >> 16);
  }
  std::fill(to + n, to + stride, uint16_t{0});
}

float weigh_bf16(float scale, float cap, float* x, int64_t n, uint16_t* to, float& peak) {
  const PromptKernels& kernels = prompt_kernels();
  if (kernels.weigh != nullptr && cap <= 0) {
    return kernels.weigh(scale, x, n, to, peak);
  }
  const float sum = weigh(scale, cap, x, n, peak);
  fill_bf16(x, n, n, to);
  return sum;
}

void activate_bf16(Activation activation, const float* gate, float* inner, int64_t n, uint16_t* to) {
  const PromptKernels& kernels = prompt_kernels();
  if (kernels.silu != nullptr && activation == Activation::silu) {
    return kernels.silu(gate, inner, n, to);
  }
  if (kernels.gelu_tanh != nullptr && activation == Activation::gelu_tanh) {
    return kernels.gelu_tanh(gate, inner, n, to);
  }
  activate(activation, Dtype::bf16, gate, inner, n);
  fill_bf16(inner, n, n, to);
}

void fill_f32(const float* x, int64_t n, int64_t stride, float* to) {
  std::memcpy(to, x, n * sizeof(float));
  std::fill(to + n, to + stride, 0.0f);
}

void store(Dtype dtype, const float* x, int64_t n, void* to, int64_t first, int64_t step) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = first + i * step;
    if (dtype == Dtype::f32) {
      static_cast<float*>(to)[place] = x[i];
    } else if (dtype == Dtype::bf16) {
      static_cast<uint16_t*>(to)[place] = static_cast<uint16_t>(rounded_bf16(x[i]) >> 16);
    } else {
      static_cast<uint16_t*>(to)[place] = bits_of_f16(x[i]);
    }
  }
}

ACCLIMATE_CLONES void store_int8(const float* x, int64_t n, int8_t* to, int64_t step, uint8_t* exponents,
                                 int64_t exponent_step) {
  constexpr uint32_t infinity = 0x7f800000u;
  for (int64_t first = 0; first < n; first += int8_columns) {
    float block[int8_columns] = {};
    const int64_t count = std::min(int8_columns, n - first);
    std::copy(x + first, x + first + count, block);
    uint32_t top = 0;  // the bits of magnitudes have their order, and those of NaN are the largest
    for (float value : block) {
      top = std::max(top, bits_of(value) & 0x7fffffffu);
    }
    // The exponent of top / 127, rounded up.
    const uint32_t exponent = top < infinity ? (bits_of(float_of(top) / 127.0f) + 0x7fffffu) >> 23 : 255u;
    const float inverse = float_of(top < infinity ? (254u - exponent) << 23 : 0u);
    int8_t codes[int8_columns];
    for (int64_t i = 0; i < int8_columns; ++i) {
      const float bounded = top < infinity ? block[i] * inverse : 0.0f;
      const uint32_t shifted = bits_of(bounded + 12582912.0f);  // rounds to a whole number
      codes[i] = static_cast<int8_t>(static_cast<int32_t>(shifted - 0x4b400000u));
    }
    exponents[first / int8_columns * exponent_step] = static_cast<uint8_t>(exponent);
    for (int64_t i = 0; i < count; ++i) {
      to[(first + i) * step] = codes[i];
    }
  }
}

ACCLIMATE_CLONES void widen_int8_row(const int8_t* from, const uint8_t* exponents, int64_t n, uint16_t* to) {
  for (int64_t first = 0; first < n; first += int8_columns) {
    const float power = float_of(static_cast<uint32_t>(exponents[first / int8_columns]) << 23);
    const int64_t last = std::min(first + int8_columns, n);
    for (int64_t i = first; i < last; ++i) {
      to[i] = static_cast<uint16_t>(bits_of(static_cast<float>(from[i]) * power) >> 16);
    }
  }
}

ACCLIMATE_CLONES void widen_int8(const int8_t* from, const uint8_t* exponents, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; ++i) {
    const float power = float_of(static_cast<uint32_t>(exponents[i]) << 23);
    to[i] = static_cast<uint16_t>(bits_of(static_cast<float>(from[i]) * power) >> 16);
  }
}

ACCLIMATE_CLONES void scale_by_powers(const float* x, const uint8_t* exponents, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = x[i] * float_of(static_cast<uint32_t>(exponents[i]) << 23);
  }
}

}  // namespace acclimate::inference::decode
