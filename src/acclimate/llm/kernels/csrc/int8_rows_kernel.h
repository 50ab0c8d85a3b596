// Rows in 8 bits times inputs in float32, for the vectors of one instruction set; included after simd_*.h.
#pragma once

#include "kernels.h"

namespace acclimate::inference::ACCLIMATE_ISA {

// Some rows times some inputs, whose sums stay in registers. Each sum goes through the columns in their
// order, so that an input's products do not depend on the others.
template <bool has_powers, int count, int inputs>
inline void multiply_int8_tile(const Int8Rows& rows, const float* powers, int64_t row, const float* x,
                               int64_t x_stride, float* y, int64_t y_stride) {
  static_assert(int8_columns == 16);  // a vector has one power of two
  const int64_t k = rows.k, blocks = int8_blocks(k);
  const int8_t* codes = rows.codes + row * rows.stride;
  Floats sums[count * inputs];
  for (Floats& sum : sums) {
    sum = zero();
  }
  const auto add_products = [&](const int8_t* from, int64_t stride, int64_t block) {
    Floats values[count];
#pragma GCC unroll 8
    for (int r = 0; r < count; ++r) {
      values[r] = load_i8(from + r * stride);
      if constexpr (has_powers) {
        values[r] = mul(values[r], powers[(row + r) * blocks + block]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < inputs; ++i) {
      const Floats input = load_f32(x + i * x_stride + block * 16);
#pragma GCC unroll 8
      for (int r = 0; r < count; ++r) {
        sums[r * inputs + i] = mul_add(values[r], input, sums[r * inputs + i]);
      }
    }
  };
  const int64_t whole = k / 16;
  for (int64_t block = 0; block < whole; ++block) {
    add_products(codes + block * 16, rows.stride, block);
  }
  if (whole < blocks) {
    int8_t rest[count][16] = {};  // memory after a row must not be read
    for (int r = 0; r < count; ++r) {
      __builtin_memcpy(rest[r], codes + r * rows.stride + whole * 16, k - whole * 16);
    }
    add_products(rest[0], 16, whole);
  }
  float found[count * inputs];
  if constexpr (count * inputs == 8) {  // of AVX-512
    sum_8(sums, found);
  } else {
    for (int i = 0; i < count * inputs; ++i) {
      found[i] = sum(sums[i]);
    }
  }
  for (int r = 0; r < count; ++r) {
    for (int i = 0; i < inputs; ++i) {
      y[i * y_stride + row + r] = found[r * inputs + i];
    }
  }
}

// Some rows, which stay in the first caches, times all inputs.
template <bool has_powers>
inline void multiply_int8_inputs(const Int8Rows& rows, const float* powers, int64_t row, int64_t last,
                                 const Input& input, float* y, int64_t y_stride) {
  for_each_tile<most_block_inputs>(input.m, [&]<int inputs>(int64_t i) {
    constexpr int together = most_block_inputs / inputs;
    const float* x = static_cast<const float*>(input.values) + i * input.stride;
    int64_t r = row;
    for (; r + together <= last; r += together) {
      multiply_int8_tile<has_powers, together, inputs>(rows, powers, r, x, input.stride, y + i * y_stride,
                                                       y_stride);
    }
    for (; r < last; ++r) {
      multiply_int8_tile<has_powers, 1, inputs>(rows, powers, r, x, input.stride, y + i * y_stride, y_stride);
    }
  });
}

void multiply_int8_rows(const Int8Rows& rows, const float* powers, const Input& input, float* y,
                        int64_t y_stride) {
  for (int64_t row = 0; row < rows.n; row += most_block_inputs) {
    const int64_t last = row + most_block_inputs < rows.n ? row + most_block_inputs : rows.n;
    if (powers != nullptr) {
      multiply_int8_inputs<true>(rows, powers, row, last, input, y, y_stride);
    } else {
      multiply_int8_inputs<false>(rows, powers, row, last, input, y, y_stride);
    }
  }
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
