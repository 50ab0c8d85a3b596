// The values of quantised weights, for one instruction set, by loops that the compiler turns into vectors.
#include "kernels.h"
#include "layout.h"

namespace acclimate::inference::ACCLIMATE_ISA {

// One block of a group as codes[row][column].
template <int bits, Codebook codebook>
inline void read_codes(const uint8_t* block, uint8_t (&codes)[group_rows][block_columns]) {
  for (int quad = 0; quad < 8; ++quad) {
    uint8_t vector[64];
    for (int i = 0; i < 64; ++i) {
      if constexpr (bits == 8) {
        vector[i] = block[64 * quad + i];
      } else {
        const uint8_t both = block[64 * (quad % 4) + i];
        vector[i] = quad < 4 ? both & 15 : both >> 4;
        if constexpr (codebook != Codebook::none) {
          static constexpr std::array<uint8_t, 16> numbers = numbers_of(codebook);
          vector[i] = numbers[vector[i]];
        }
        if constexpr (bits == 5) {
          vector[i] |= (block[256 + i] >> quad & 1) << 4;
        } else if constexpr (bits == 6) {
          vector[i] |= (block[256 + 64 * (quad / 4) + i] >> (2 * (quad % 4)) & 3) << 4;
        }
      }
    }
    for (int row = 0; row < group_rows; ++row) {
      __builtin_memcpy(&codes[row][4 * quad], vector + 4 * row, 4);
    }
  }
}

// The values of one group, [rows][k].
template <WeightFormat format>
inline void group_values(const uint8_t* group, int64_t k, int64_t rows, float* values) {
  constexpr Layout layout = layout_of(format);
  const int64_t blocks = padded_columns(format, k) / block_columns;
  const Offsets at = offsets_of(layout, blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t codes[group_rows][block_columns];
    read_codes<layout.bits, layout.codebook>(group + at.codes + b * layout.code_bytes, codes);
    float scale[2][group_rows], low[group_rows] = {};
    if constexpr (layout.scales == Scales::row || layout.scales == Scales::row_and_block) {
      store(scale[0], load_f32(group));
    } else if constexpr (layout.scales == Scales::block || layout.scales == Scales::block_and_low ||
                         layout.scales == Scales::block_and_zero) {
      store(scale[0], load_f16(group + b * 32));
    } else if constexpr (layout.scales == Scales::exponent) {
      store(scale[0], load_exponents(group + b * 16));
    } else {
      store(scale[0], load_f16(group + b / 8 * 32));
    }
    if constexpr (layout.scales == Scales::block_and_low) {
      store(low, load_f16(group + at.low + b * 32));
    } else if constexpr (layout.scales == Scales::row_and_block) {
      store(low, load_f32(group + at.low_scale));
    } else if constexpr (layout.scales == Scales::super_block) {
      store(low, load_f16(group + at.low_scale + b / 8 * 32));
    }
    if constexpr (layout.scales == Scales::row_and_block || layout.scales == Scales::super_block) {
      for (int row = 0; row < group_rows; ++row) {
        scale[0][row] *= group[at.block_scale + b * 16 + row];
        low[row] = -(low[row] * group[at.block_low + b * 16 + row]);
      }
    } else if constexpr (layout.scales == Scales::block_and_zero) {
      const int8_t* zeros = reinterpret_cast<const int8_t*>(group + at.zero + b * 16);
      for (int row = 0; row < group_rows; ++row) {
        low[row] = -(scale[0][row] * zeros[row]);
      }
    } else if constexpr (layout.scales == Scales::super_signed_block) {
      const int8_t* factors = reinterpret_cast<const int8_t*>(group + at.block_scale + b * 16);
      for (int row = 0; row < group_rows; ++row) {
        scale[0][row] *= factors[row];
      }
    } else if constexpr (layout.scales == Scales::super_half_block) {
      const int8_t* factors = reinterpret_cast<const int8_t*>(group + at.block_scale + b * 32);
      for (int row = 0; row < group_rows; ++row) {
        scale[1][row] = scale[0][row] * factors[16 + row];
        scale[0][row] *= factors[row];
      }
    }
    constexpr bool has_low = layout.scales == Scales::block_and_low ||
                             layout.scales == Scales::block_and_zero ||
                             layout.scales == Scales::row_and_block || layout.scales == Scales::super_block;
    for (int64_t row = 0; row < rows; ++row) {
      float block[block_columns];
      for (int i = 0; i < block_columns; ++i) {
        const float factor = scale[layout.scales == Scales::super_half_block && i >= 16][row];
        block[i] = static_cast<float>(static_cast<int32_t>(codes[row][i]) - layout.offset) * factor;
        if constexpr (has_low) {
          block[i] += low[row];
        }
      }
      const int64_t column = b * block_columns;
      const int64_t count = k - column < block_columns ? k - column : block_columns;
      if (count == block_columns) {
        __builtin_memcpy(values + row * k + column, block, sizeof(block));
      } else {
        for (int64_t i = 0; i < count; ++i) {
          values[row * k + column + i] = block[i];
        }
      }
    }
  }
}

void values_of_group(WeightFormat format, const uint8_t* group, int64_t k, int64_t rows, float* values) {
  with_format(format, [&]<WeightFormat known>() { group_values<known>(group, k, rows, values); });
}

// Widens 16-bit values to float32.
void widen(Dtype dtype, const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    store(to + i, dtype == Dtype::bf16 ? load_bf16(from + i) : load_f16(from + i));
  }
  if (i < count) {
    uint16_t rest[16] = {};
    float wide[16];
    __builtin_memcpy(rest, from + i, (count - i) * sizeof(uint16_t));
    store(wide, dtype == Dtype::bf16 ? load_bf16(rest) : load_f16(rest));
    __builtin_memcpy(to + i, wide, (count - i) * sizeof(float));
  }
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
