// What the products of repacked rows share: reading groups quad by quad, and tiles of sums that stay in
// registers; included after simd_*.h.
#pragma once

#include <utility>

#include "codes.h"
#include "kernels.h"
#include "layout.h"
#include "scales.h"

namespace acclimate::inference::ACCLIMATE_ISA {

inline int64_t repacked_columns(int64_t k) { return (k + block_columns - 1) / block_columns * block_columns; }

// Calls repack_dense(row, to) for 16 rows of a dense weight, and for each quad of 16 rows of a quantised one
// repack_quad.operator()<format, quad>(block, scale, low, to).
template <class Value, class RepackDense, class RepackQuad>
inline void repack_groups(const Weight& weight, int64_t first, int64_t last, Value* to,
                          RepackDense repack_dense, RepackQuad repack_quad) {
  const int64_t columns = repacked_columns(weight.k);
  for (int64_t row = first; row < last; row += group_rows, to += columns * group_rows) {
    if (weight.format == WeightFormat::dense) {
      repack_dense(row, to);
      continue;
    }
    const uint8_t* group = weight.data + row / group_rows * weight.stride;
    with_format(weight.format, [&]<WeightFormat format>() {
      constexpr Layout layout = layout_of(format);
      const Offsets at = offsets_of(layout, padded_columns(format, weight.k) / block_columns);
      for (int64_t b = 0; b < columns / block_columns; ++b) {
        const BlockScales scales = scales_of_block<format>(group, at, b);
        const uint8_t* block = group + at.codes + b * layout.code_bytes;
        Value* block_to = to + b * block_columns * group_rows;
        [&]<int... quads>(std::integer_sequence<int, quads...>) {
          (repack_quad.template operator()<format, quads>(block, quads < 4 ? scales.first : scales.second,
                                                          scales.low, block_to),
           ...);
        }(std::make_integer_sequence<int, 8>());
      }
    });
  }
}

// Loads sums of `inputs` inputs and `groups` groups from y, or begins with zeros, calls add_products(sums)
// and stores them. They stay in registers only if the compiler unrolls the loops.
template <int groups, int inputs, class AddProducts>
inline void multiply_tile_of(bool adds, float* y, int64_t y_stride, AddProducts add_products) {
  Floats sums[inputs][groups];
#pragma GCC unroll 16
  for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 16
    for (int group = 0; group < groups; ++group) {
      sums[i][group] = adds ? load_f32(y + i * y_stride + group * 16) : zero();
    }
  }
  add_products(sums);
#pragma GCC unroll 16
  for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 16
    for (int group = 0; group < groups; ++group) {
      store(y + i * y_stride + group * 16, sums[i][group]);
    }
  }
}

// Divides groups into `together` at a time, and inputs into tiles of at most `most`: calls
// tile.operator()<groups, inputs>(group, first_input).
template <int most, int together, class Tile>
inline void for_each_tile_of(int64_t m, int64_t groups, Tile tile) {
  for_each_tile<together>(groups, [&]<int some>(int64_t group) {
    for_each_tile<most>(m, [&]<int inputs>(int64_t i) { tile.template operator()<some, inputs>(group, i); });
  });
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
