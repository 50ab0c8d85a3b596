// The small operations between products, on float32 values that are rounded where the model's dtype would.
#pragma once

#include <cstdint>
#include <limits>

#include "linear.h"

namespace acclimate::inference::decode {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Numbered as ACTIVATIONS in acclimate.llm.decode.description.
enum class Activation : int64_t { silu, gelu_tanh, gelu, relu, relu2 };

struct Norm {
  bool is_there = false, is_layer = false, rounds_first = false;
  // Of a row that ranks share: the elements of all ranks, and whether this rank's squares are counted.
  int64_t shared_columns = 0;  // 0: each row is whole
  bool counts = true;
  float eps = 0;
  const float* weight = nullptr;
  const float* bias = nullptr;
  int64_t rows = 1;  // the weights of several heads, one after the other
};

// The bytes of a value.
inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// Rounds to the dtype and back.
void round_values(Dtype dtype, float* x, int64_t n);

// Normalizes n values with the weights of a row, or copies them if there is no norm. from and to may be the
// same.
void normalize(const Norm& norm, Dtype dtype, const float* from, int64_t n, int64_t row, float* to);

// The sum of the squares of n values of a row that ranks share; 0 if another rank counts them.
float counted_squares(const Norm& norm, const float* from, int64_t n);

// Normalizes n values of a row that ranks share by the sum of the squares of all ranks.
void normalize_shared(const Norm& norm, Dtype dtype, const float* from, int64_t n, float squares, float* to);

// x = round(x + round(factor * branch))
void add_branch(Dtype dtype, float* x, const float* branch, float factor, int64_t n);

// inner = round(round(activation(gate)) * up); a null gate: round(activation(inner))
void activate(Activation activation, Dtype dtype, const float* gate, float* inner, int64_t n);

// What an expert computes between its products; without gates: round(activation(up)).
struct Gating {
  Activation activation;
  bool is_gated;
  float steepness;  // not 1: the activation is x * sigmoid(steepness * x)
  float gate_limit, up_limit;  // infinity: none
  float adds;  // to what a gate multiplies
};

// up = round(activation(gate) * up), with the limits applied before; changes `gate` too.
void apply_gating(const Gating& gating, Dtype dtype, float* gate, float* up, int64_t n);

// x = round(sigmoid(x))
void sigmoid(Dtype dtype, float* x, int64_t n);

// x = softmax(x), without rounding
void softmax(float* x, int64_t n);

// to = round(from + bias); bias may be null, and `from` and `to` may be the same.
void add_bias(Dtype dtype, const float* bias, const float* from, int64_t n, float* to);

// Rotates the first 2 * pairs values.
void rotate(Dtype dtype, bool interleaved, bool rounds_products, const float* cos, const float* sin,
            int64_t pairs, float* x);

// x = tanh(x / cap) * cap, without rounding
void soft_cap(float cap, float* x, int64_t n);

// x = tanh(x / cap) * cap, rounded after each operation
void soft_cap_rounded(Dtype dtype, float cap, float* x, int64_t n);

// x = round(x * by), value by value
void multiply_values(Dtype dtype, const float* by, float* x, int64_t n);

// to += by * from, value by value
void add_products(const float* by, const float* from, float* to, int64_t n);

// x = round(x * factor)
void scale(Dtype dtype, float factor, float* x, int64_t n);

float largest(const float* x, int64_t n);

bool has_nan(const float* x, int64_t n);

// x = exp(x * factor - shift); returns the sum.
float exponentials(float factor, float shift, float* x, int64_t n);

// Turns scores into the weights of attention: x = exp(y - peak), where y is scale * x, bounded if there is a
// cap, and the peak is the largest y. Returns the sum.
float weigh(float scale, float cap, float* x, int64_t n, float& peak);

// to = factor * x / sqrt(sum(x * x) + eps)
void divide_by_length(const float* x, float eps, float factor, int64_t n, float* to);

// One token of a delta rule. A state is [keys][values]:
//   state = decay * before; after = state + key * change, where change = strength * (value - key state);
//   result = query after
// `change` gets the change. No two results may be in the same memory.
void update_state(const float* before, const float* query, const float* key, const float* value, float decay,
                  float strength, int64_t keys, int64_t values, float* change, float* after, float* result);

// Some tokens of a delta rule, for some columns of a state, [keys][columns_of_state]. The numbers of a token
// are `stride` after those of the token before.
struct TokensOfRule {
  int64_t tokens, stride, keys;
  const float *queries, *keys_of_tokens, *decays, *strengths;
  float* values;  // `columns` of each token, at most columns_of_state; they are replaced by the results
  int64_t columns;
};

constexpr int64_t columns_of_state = 32;

// Changes the columns of a state, and computes the results: as update_state for each token.
void update_columns(const TokensOfRule& given, float* state);

// to += factor * from
void accumulate(float factor, const float* from, float* to, int64_t n);

// One product's input in a dtype's form: zeros follow the n values up to a multiple of 32.
void fill_bf16(const float* x, int64_t n, int64_t stride, uint16_t* to);
void fill_f32(const float* x, int64_t n, int64_t stride, float* to);

// weigh() with results in bf16. Its numbers in `x` are lost.
float weigh_bf16(float scale, float cap, float* x, int64_t n, uint16_t* to, float& peak);

// activate() with results in bf16. Its numbers in `inner` are lost.
void activate_bf16(Activation activation, const float* gate, float* inner, int64_t n, uint16_t* to);

// Stores values that are rounded already, `step` elements apart.
void store(Dtype dtype, const float* x, int64_t n, void* to, int64_t first, int64_t step);

// Stores x in 8 bits as Int8Rows has them: whole numbers `step` elements apart, and the exponent of each
// block `exponent_step` apart. A block with an infinite or NaN value becomes NaN.
void store_int8(const float* x, int64_t n, int8_t* to, int64_t step, uint8_t* exponents,
                int64_t exponent_step);

// The bf16 values of a row in 8 bits, exactly.
void widen_int8_row(const int8_t* from, const uint8_t* exponents, int64_t n, uint16_t* to);

// The same for numbers that have an exponent each.
void widen_int8(const int8_t* from, const uint8_t* exponents, int64_t n, uint16_t* to);

// to = x * 2^(exponent - 127)
void scale_by_powers(const float* x, const uint8_t* exponents, int64_t n, float* to);

}  // namespace acclimate::inference::decode
