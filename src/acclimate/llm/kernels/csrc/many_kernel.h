// Dense weights times many inputs in bf16, for AVX-512 with products of bf16; included after
// simd_avx512.h.
//
// Rows are first put in the order of the product, 16 at a time: [k / 2][16 rows][2 columns]. One vector holds
// a pair of columns of all 16 rows, and a pair of an input's values is the same for all of them. Each sum
// goes through the columns in their order.
#pragma once

#include "repacked.h"

namespace acclimate::inference::ACCLIMATE_ISA {

// Turns 16 rows of 16 pairs into 16 pairs of 16 rows.
inline void turn(__m512i (&rows)[16]) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}

inline __m512i as_bf16(Dtype dtype, const uint8_t* from, int64_t column, __mmask32 columns) {
  if (dtype == Dtype::bf16) {
    return _mm512_maskz_loadu_epi16(columns, from + column * 2);
  }
  const auto low = static_cast<__mmask16>(columns), high = static_cast<__mmask16>(columns >> 16);
  Floats first, second;
  if (dtype == Dtype::f32) {
    first = _mm512_maskz_loadu_ps(low, from + column * 4);
    second = _mm512_maskz_loadu_ps(high, from + (column + 16) * 4);
  } else {
    const __m512i both = _mm512_maskz_loadu_epi16(columns, from + column * 2);
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
  }
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}

inline void repack_group(const Weight& weight, int64_t first, int64_t rows, uint16_t* to) {
  for (int64_t column = 0; column < weight.k; column += block_columns) {
    const int64_t left = weight.k - column;
    const __mmask32 columns = left < block_columns ? (1u << left) - 1 : 0xffffffffu;
    __m512i values[16];
    for (int row = 0; row < 16; ++row) {
      values[row] = row < rows
                        ? as_bf16(weight.dtype, weight.data + (first + row) * weight.stride, column, columns)
                        : _mm512_setzero_si512();
    }
    turn(values);
    for (int pair = 0; pair < 16; ++pair) {
      _mm512_storeu_si512(to + (column / 2 + pair) * 32, values[pair]);
    }
  }
}

void repack_rows(const Weight& weight, int64_t first, int64_t last, void* repacked) {
  auto* to = static_cast<uint16_t*>(repacked);
  for (int64_t row = first; row < last; row += group_rows, to += repacked_columns(weight.k) * group_rows) {
    repack_group(weight, row, last - row, to);
  }
}

inline __m256i in_bf16(Floats x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline Floats rounded(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(in_bf16(x)), 16));
}

void multiply_repacked(const void* from, int64_t groups, int64_t k, const uint16_t* x, int64_t stride,
                       int64_t m, Finish finish, float* y, int64_t y_stride) {
  constexpr int together = 12;  // inputs that stay in the first cache for all rows
  const int64_t size = repacked_columns(k) * group_rows;
  for (int64_t first = 0; first < m; first += together) {
    const auto tile = [&]<int some, int inputs>(int64_t group, int64_t input) {
      const uint16_t* rows = static_cast<const uint16_t*>(from) + group * size;
      const uint16_t* values = x + (first + input) * stride;
      float* to = y + (first + input) * y_stride + group * group_rows;
      const auto add_products = [&](Floats(&sums)[inputs][some]) {
        for (int64_t at = 0; at < size; at += 32) {
          __m512bh weights[some];
#pragma GCC unroll 16
          for (int i = 0; i < some; ++i) {
            weights[i] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(rows + i * size + at));
          }
#pragma GCC unroll 16
          for (int i = 0; i < inputs; ++i) {
            int32_t both;
            __builtin_memcpy(&both, values + i * stride + at / 16, sizeof(both));
            const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
#pragma GCC unroll 16
            for (int j = 0; j < some; ++j) {
              sums[i][j] = _mm512_dpbf16_ps(sums[i][j], weights[j], pair);
            }
          }
        }
      };
      const auto finished = [&](Floats sum) { return finish == Finish::rounds ? rounded(sum) : sum; };
      multiply_tile_of<some, inputs>(finish == Finish::adds, to, y_stride, add_products, finished);
    };
    for_each_tile_of<together, 2>(m - first < together ? m - first : together, groups, tile);
  }
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
