// Dense weights times many inputs in bf16, in float32, for x86 processors whose vectors have no
// products of bf16, or slow ones; included after simd_avx2.h or simd_avx512.h.
//
// Rows are first widened in the order of the product, 16 at a time: [k][16 rows]. A vector holds a column of
// all 16 rows, and an input's value is the same for all of them. Each sum goes through the columns in their
// order, so that it does not depend on what else is multiplied.
#include "repacked.h"
#include "rounding.h"

namespace acclimate::inference::ACCLIMATE_ISA {

// Turns 8 rows of 8 values into 8 columns.
inline void turn_8(__m256 (&rows)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

inline __m256 widened_8(Dtype dtype, const uint8_t* from) {
  if (dtype == Dtype::f32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (dtype == Dtype::f16) {
    return _mm256_cvtph_ps(halves);
  }
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

template <Dtype dtype>
inline void widen_group(const Weight& weight, int64_t first, int64_t rows, float* to) {
  constexpr int64_t size = dtype == Dtype::f32 ? 4 : 2;
  const int64_t columns = (weight.k + block_columns - 1) / block_columns * block_columns;
  for (int64_t half = 0; half < 16; half += 8) {
    for (int64_t column = 0; column < columns; column += 8) {
      const int64_t left = weight.k - column;
      __m256 values[8];
      for (int64_t row = 0; row < 8; ++row) {
        const uint8_t* from = weight.data + (first + half + row) * weight.stride + column * size;
        if (half + row >= rows || left <= 0) {
          values[row] = _mm256_setzero_ps();
        } else if (left >= 8) {
          values[row] = widened_8(dtype, from);
        } else {
          uint8_t rest[8 * size] = {};  // memory after the row must not be read
          __builtin_memcpy(rest, from, left * size);
          values[row] = widened_8(dtype, rest);
        }
      }
      turn_8(values);
      for (int64_t i = 0; i < 8; ++i) {
        _mm256_storeu_ps(to + (column + i) * 16 + half, values[i]);
      }
    }
  }
}

void widen_rows(const Weight& weight, int64_t first, int64_t last, void* repacked) {
  auto* to = static_cast<float*>(repacked);
  for (int64_t row = first; row < last; row += group_rows, to += repacked_columns(weight.k) * group_rows) {
    if (weight.dtype == Dtype::f32) {
      widen_group<Dtype::f32>(weight, row, last - row, to);
    } else if (weight.dtype == Dtype::bf16) {
      widen_group<Dtype::bf16>(weight, row, last - row, to);
    } else {
      widen_group<Dtype::f16>(weight, row, last - row, to);
    }
  }
}

// Columns whose weights, of one group, stay in the first cache.
constexpr int64_t wide_columns = 256;

void multiply_wide(const void* from, int64_t groups, int64_t k, const uint16_t* x, int64_t stride, int64_t m,
                   Finish finish, float* y, int64_t y_stride) {
  constexpr int64_t together = 24;  // inputs that are widened together, and stay in the first cache
  alignas(64) float wide[together * wide_columns];
  const int64_t all = repacked_columns(k), size = all * group_rows;
  bool adds = finish == Finish::adds;
  for (int64_t column = 0; column < all; column += wide_columns, adds = true) {
    const int64_t columns = all - column < wide_columns ? all - column : wide_columns;
    const float* weights = static_cast<const float*>(from) + column * group_rows;
    for (int64_t first = 0; first < m; first += together) {
      const int64_t some_inputs = m - first < together ? m - first : together;
      for (int64_t input = 0; input < some_inputs; ++input) {
        for (int64_t c = 0; c < columns; c += 16) {
          store(wide + input * wide_columns + c, load_bf16(x + (first + input) * stride + column + c));
        }
      }
      const auto tile = [&]<int some, int inputs>(int64_t group, int64_t input) {
        const float* rows = weights + group * size;
        const float* values = wide + input * wide_columns;
        float* to = y + (first + input) * y_stride + group * group_rows;
        const auto add_products = [&](Floats(&sums)[inputs][some]) {
          for (int64_t c = 0; c < columns; ++c) {
            Floats row[some];
#pragma GCC unroll 16
            for (int i = 0; i < some; ++i) {
              row[i] = load_f32(rows + i * size + c * 16);
            }
#pragma GCC unroll 16
            for (int i = 0; i < inputs; ++i) {
              const Floats value = set_floats(values[i * wide_columns + c]);
#pragma GCC unroll 16
              for (int j = 0; j < some; ++j) {
                sums[i][j] = mul_add(row[j], value, sums[i][j]);
              }
            }
          }
        };
        multiply_tile_of<some, inputs>(adds, to, y_stride, add_products, [](Floats sum) { return sum; });
      };
      for_each_tile_of<wide_inputs, wide_groups>(some_inputs, groups, tile);
    }
  }
  for (int64_t input = 0; finish == Finish::rounds && input < m; ++input) {
    float* to = y + input * y_stride;
    for (int64_t c = 0; c < groups * group_rows; ++c) {
      to[c] = rounded<Dtype::bf16>(to[c]);
    }
  }
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
