// Rows in 8 bits times inputs in float32, for the vectors of one instruction set; included after simd_*.h.
#pragma once

#include "kernels.h"

namespace acclimate::inference::ACCLIMATE_ISA {

inline float power_of_two(uint8_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return power;
}

// One row times several inputs, whose sums stay in registers. Each sum goes through the columns in their
// order, so that an input's products do not depend on the others.
template <bool has_exponents, int inputs>
inline void multiply_int8_row(const int8_t* row, const uint8_t* exponents, int64_t k, const float* x,
                              int64_t x_stride, float* y, int64_t y_stride) {
  Floats sums[inputs];
  for (Floats& each : sums) {
    each = zero();
  }
  const auto add_products = [&](const int8_t* codes, int64_t column) {
    Floats values = load_i8(codes);
    if constexpr (has_exponents) {
      values = mul(values, power_of_two(exponents[column / int8_columns]));
    }
    for (int i = 0; i < inputs; ++i) {
      sums[i] = mul_add(values, load_f32(x + i * x_stride + column), sums[i]);
    }
  };
  int64_t column = 0;
  for (; column + 16 <= k; column += 16) {
    add_products(row + column, column);
  }
  if (column < k) {
    int8_t rest[16] = {};  // memory after the row must not be read
    __builtin_memcpy(rest, row + column, k - column);
    add_products(rest, column);
  }
  float found[inputs];
  if constexpr (inputs == 8) {  // of AVX-512
    sum_8(sums, found);
  } else {
    for (int i = 0; i < inputs; ++i) {
      found[i] = sum(sums[i]);
    }
  }
  for (int i = 0; i < inputs; ++i) {
    y[i * y_stride] = found[i];
  }
}

template <bool has_exponents>
inline void multiply_all_int8_rows(const Int8Rows& rows, const Input& input, float* y, int64_t y_stride) {
  const int64_t blocks = int8_blocks(rows.k), m = input.m;
  for (int64_t r = 0; r < rows.n; ++r) {
    const int8_t* row = rows.codes + r * rows.stride;
    const uint8_t* exponents = has_exponents ? rows.exponents + r * blocks : nullptr;
    const auto multiply = [&]<int inputs>(int64_t i) {
      multiply_int8_row<has_exponents, inputs>(row, exponents, rows.k,
                                               static_cast<const float*>(input.values) + i * input.stride,
                                               input.stride, y + i * y_stride + r, y_stride);
      return i + inputs;
    };
    int64_t i = 0;
    while (i + most_block_inputs <= m) {
      i = multiply.template operator()<most_block_inputs>(i);
    }
    if constexpr (most_block_inputs > 4) {
      i = i + 4 <= m ? multiply.template operator()<4>(i) : i;
    }
    if constexpr (most_block_inputs > 2) {
      i = i + 2 <= m ? multiply.template operator()<2>(i) : i;
    }
    if (i < m) {
      multiply.template operator()<1>(i);
    }
  }
}

void multiply_int8_rows(const Int8Rows& rows, const Input& input, float* y, int64_t y_stride) {
  if (rows.exponents != nullptr) {
    multiply_all_int8_rows<true>(rows, input, y, y_stride);
  } else {
    multiply_all_int8_rows<false>(rows, input, y, y_stride);
  }
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
