// The kernels of one instruction set.
#pragma once

#include "linear.h"

namespace acclimate::inference {

using Product = void (*)(const Weight&, const Input&, int64_t first, int64_t last, float* y,
                         int64_t y_stride);

// Quantises one row; values from k on are zeros. Returns false if a value is infinite or NaN.
using Quantize = bool (*)(const float* x, int64_t padded, int8_t* codes, float* scales, float* scaled_sums,
                          int32_t* sums);

// With the powers of two of the rows' blocks, [n][blocks], or null.
using ProductOfInt8 = void (*)(const Int8Rows&, const float* powers, const Input&, float* y,
                               int64_t y_stride);

using Values = void (*)(WeightFormat format, const uint8_t* group, int64_t k, int64_t rows, float* values);
using Widen = void (*)(Dtype dtype, const uint16_t* from, int64_t count, float* to);

// Puts rows of a dense weight in the order of MultiplyRepacked, groups of 16 rows filled up with zeros to
// whole groups and a multiple of 32 columns: in bf16, [k / 2][16][2] each, or in float32, [k][16].
using RepackRows = void (*)(const Weight&, int64_t first, int64_t last, void* to);

// y[i * y_stride + row]: x[i * stride ...] * row, for all rows of the groups. Inputs are in bf16, filled up
// with zeros to a multiple of 32 columns.
using MultiplyRepacked = void (*)(const void* repacked, int64_t groups, int64_t k, const uint16_t* x,
                                  int64_t stride, int64_t m, Finish finish, float* y, int64_t y_stride);

// Divides m inputs into tiles of `most` and, for the rest, of 8, 4, 2 and 1: calls
// tile.operator()<inputs>(first).
template <int most, class Tile>
static inline void for_each_tile(int64_t m, const Tile& tile, int64_t first = 0) {
  for (; first + most <= m; first += most) {
    tile.template operator()<most>(first);
  }
  if constexpr (most > 1) {
    for_each_tile<(most > 8 ? 8 : most > 4 ? 4 : most / 2)>(m, tile, first);
  }
}

// The kernels of one instruction set. A null pointer: it has nothing better than a smaller instruction set.
struct Kernels {
  Product dense[3] = {};  // by the weight's dtype, for inputs in float32
  Product dense_bf16 = nullptr;  // for inputs and weights in bf16
  Product blocks = nullptr;  // for quantised weights and inputs in 8 bits
  Quantize quantize = nullptr;
  Values values = nullptr;
  Widen widen = nullptr;
  RepackRows repack_rows = nullptr;
  MultiplyRepacked multiply_repacked = nullptr;
  int64_t repacked_value_bytes = 0;
  PromptKernels prompt = {};
  ProductOfInt8 int8_rows = nullptr;
};

extern const Kernels plain_kernels, avx2_kernels, avx512_kernels, avx512_vnni_kernels, avx512_bf16_kernels,
    neon_kernels, neon_dot_kernels;

}  // namespace acclimate::inference
