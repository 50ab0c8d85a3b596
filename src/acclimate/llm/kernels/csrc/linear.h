// Products of a few input rows with a weight, y[m][n] = x[m][k] * weight[n][k]^T, for callers that have
// threads of their own: prepare the input once, then let each thread compute a range of the weight's rows.
//
//   Weight weight{WeightFormat::q4_k, Dtype::f32, n, k, data, stride};
//   const Form form = form_of(weight, Dtype::bf16);
//   std::vector<std::byte> memory(input_bytes(form, m, k));  // aligned to 64 bytes
//   const Input input = prepare(form, Dtype::bf16, x, x_stride, m, k, memory.data());
//   // in thread t of count, after a barrier:
//   const auto [first, last] = rows_of(weight, t, count);
//   compute(weight, input, first, last, y + first, n);
//
// An input can serve several weights of the same form and k. Sums are in float32. All functions can be called
// by several threads at once and throw nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace acclimate::inference {

// How a weight is stored: a matrix of floating-point numbers, or one of the formats of formats.def.
enum class WeightFormat : int32_t {
  dense,
#define WEIGHT_FORMAT(name, ...) name,
#include "formats.def"
};

enum class Dtype : int32_t { f32, bf16, f16 };

constexpr int64_t max_rows = 16;  // input rows of one product
constexpr int64_t group_rows = 16;  // weight rows that a quantised weight interleaves

struct Weight {
  WeightFormat format;
  Dtype dtype;  // of a dense weight
  int64_t n, k;
  const uint8_t* data;
  int64_t stride;  // bytes from one row of a dense weight, or one group of a quantised one, to the next
};

// The form of the input that a weight is multiplied by.
enum class Form : int32_t {
  f32,
  bf16,  // for vectors of bf16 products
  int8,  // 8 bits with a scale for each 32 values, for quantised weights
};

struct Input {
  Form form;
  int64_t m, k;
  int64_t stride;  // values from one row to the next, filled up with zeros
  const void* values;
  const float* scales;  // int8: [m][stride / 32]; the first is NaN for a row that stays in float32
  const float* scaled_sums;  // int8: scale * sum of a block
  const int32_t* sums;  // int8: of each 16 values; the first of a row in float32 is its number in `exact`
  const float* exact = nullptr;  // int8: rows with infinite or NaN values, in float32
  int64_t exact_rows = 0;  // that `exact` has memory for

  // Some of the rows.
  Input rows(int64_t first, int64_t count) const {
    Input some = *this;
    const int64_t bytes = form == Form::f32 ? 4 : form == Form::bf16 ? 2 : 1;
    some.m = count;
    some.values = static_cast<const uint8_t*>(values) + first * stride * bytes;
    if (form == Form::int8) {
      some.scales += first * (stride / 32);
      some.scaled_sums += first * (stride / 32);
      some.sums += first * (stride / 16);
    }
    return some;
  }
};

// The form of an input of a dtype that is as precise as the weight, or nearly (int8).
Form form_of(const Weight& weight, Dtype input);

size_t input_bytes(Form form, int64_t m, int64_t k);

// The values from one row of an input to the next.
int64_t input_stride(Form form, int64_t k);

// Fills memory (input_bytes, aligned to 64) with m rows that are x_stride values apart. In the form int8,
// rows with infinite or NaN values stay in float32, with which compute() is slow.
Input prepare(Form form, Dtype dtype, const void* x, int64_t x_stride, int64_t m, int64_t k, void* memory);

// The rows of a thread: always the same ones, so that they stay in its memory node. Multiples of group_rows.
std::pair<int64_t, int64_t> rows_of(const Weight& weight, int64_t thread, int64_t threads);

// y[i * y_stride + row - first] for m inputs and rows first to last. If these begin within a group of a
// quantised weight, all of that group is computed.
void compute(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
             int64_t y_stride);

// -- Rows in 8 bits, for keys and values -----------------------------------------------------------

constexpr int64_t int8_columns = 16;  // of a row, which one power of two multiplies

// Whole numbers times powers of two, 2^(exponent - 127); an exponent of 0 stands for 0.
struct Int8Rows {
  int64_t n, k;
  const int8_t* codes;
  int64_t stride;  // from one row to the next
  const uint8_t* exponents;  // [n][int8_blocks(k)], or null: the numbers are multiplied by 1
};

constexpr int64_t int8_blocks(int64_t k) { return (k + int8_columns - 1) / int8_columns; }

// y[i * y_stride + row] for m inputs of the form f32 and all rows.
void compute(const Int8Rows& rows, const Input& input, float* y, int64_t y_stride);

// -- Dense weights times many inputs in bf16, for processors with vectors ---------------------------
//
//   std::vector<uint8_t> repacked(repacked_bytes(last - first, k));
//   repack(weight, first, last, repacked.data());
//   multiply_many(repacked.data(), last - first, k, x, whole_blocks(k), m, Finish::replaces, y, y_stride);

bool multiplies_many();

// A number of columns filled up to whole blocks, with zeros: of each input.
int64_t whole_blocks(int64_t columns);

// The memory that some repacked rows take.
int64_t repacked_bytes(int64_t rows, int64_t k);

// Puts rows of a dense weight in the order of the product, rounded to bf16 where vectors of its products are
// the fastest here, else in float32.
void repack(const Weight& weight, int64_t first, int64_t last, void* to);

// What multiply_many does with a product: it replaces what is there, rounded to bf16 or not, or is added to
// it.
enum class Finish { replaces, rounds, adds };

// y[i * y_stride + row]: the product of input i with a repacked row. It writes whole groups of rows.
void multiply_many(const void* repacked, int64_t rows, int64_t k, const uint16_t* x, int64_t x_stride,
                   int64_t m, Finish finish, float* y, int64_t y_stride);

// Between the products of a prompt, on processors with conversions to bf16; else null.
struct PromptKernels {
  // Writes exp(x * scale - peak) in bf16, where `peak` is the largest x * scale, and returns the sum.
  float (*weigh)(float scale, const float* x, int64_t n, uint16_t* to, float& peak) = nullptr;
  // Writes activated(gate) * up in bf16, or activated(up) if `gate` is null.
  void (*silu)(const float* gate, const float* up, int64_t n, uint16_t* to) = nullptr;
  void (*gelu_tanh)(const float* gate, const float* up, int64_t n, uint16_t* to) = nullptr;
};
const PromptKernels& prompt_kernels();

// The values of rows first to last in float32, [last - first][k], rounded as GGUF defines them.
void dequantize(const Weight& weight, int64_t first, int64_t last, float* values);

// Chooses the instruction set for this process; 0: the best one. For tests.
void use_isa(int64_t number);

}  // namespace acclimate::inference
