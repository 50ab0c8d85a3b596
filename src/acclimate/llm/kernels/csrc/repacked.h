// What the products of repacked rows share: tiles of sums that stay in registers; included after simd_*.h.
#pragma once

#include "kernels.h"
#include "layout.h"

namespace acclimate::inference::ACCLIMATE_ISA {

inline int64_t repacked_columns(int64_t k) { return (k + block_columns - 1) / block_columns * block_columns; }

// Loads sums of `inputs` inputs and `groups` groups from y, or begins with zeros, calls add_products(sums)
// and stores what finished(sum) returns. They stay in registers only if the compiler unrolls the loops.
template <int groups, int inputs, class AddProducts, class Finished>
inline void multiply_tile_of(bool adds, float* y, int64_t y_stride, AddProducts add_products,
                             Finished finished) {
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
      store(y + i * y_stride + group * 16, finished(sums[i][group]));
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
