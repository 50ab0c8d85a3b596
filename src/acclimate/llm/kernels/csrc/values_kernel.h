// The codes, scales and values of quantised weights, for the vectors of one instruction set; included after
// simd_*.h.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "kernels.h"
#include "layout.h"

namespace acclimate::inference::ACCLIMATE_ISA {

// The codes of quad `quad` of a block, or the numbers that they stand for.
template <int bits, int quad, Codebook codebook>
inline Bytes codes_of(const uint8_t* block) {
  if constexpr (bits == 8) {
    return load_bytes(block + 64 * quad);
  } else {
    const Bytes both = load_bytes(block + 64 * (quad % 4));
    const Bytes low = quad < 4 ? low_bits(both) : high_bits(both);
    if constexpr (bits == 5) {
      return with_bit<quad>(low, load_bytes(block + 256));
    } else if constexpr (bits == 6) {
      return with_bits<2 * (quad % 4)>(low, load_bytes(block + 256 + 64 * (quad / 4)));
    } else if constexpr (codebook != Codebook::none) {
      static constexpr std::array<uint8_t, 16> numbers = numbers_of(codebook);
      return look_up(numbers.data(), low);
    } else {
      return low;
    }
  }
}

// A value is code * first + low, and code * second + low from column 16 of the block on; for the 16 rows of a
// group.
struct BlockScales {
  Floats first, second, low;
};

// at: the result of offsets_of() for the group's blocks.
template <WeightFormat format>
inline BlockScales scales_of_block(const uint8_t* group, const Offsets& at, int64_t b) {
  constexpr Layout layout = layout_of(format);
  Floats first, low = zero();
  if constexpr (layout.scales == Scales::row) {
    first = load_f32(group);
  } else if constexpr (layout.scales == Scales::row_and_block) {
    first = mul(load_u8(group + at.block_scale + b * 16), load_f32(group));
    low = mul(mul(load_u8(group + at.block_low + b * 16), load_f32(group + at.low_scale)), -1.0f);
  } else if constexpr (layout.scales == Scales::super_block) {
    first = mul(load_u8(group + at.block_scale + b * 16), load_f16(group + b / 8 * 32));
    low =
        mul(mul(load_u8(group + at.block_low + b * 16), load_f16(group + at.low_scale + b / 8 * 32)), -1.0f);
  } else if constexpr (layout.scales == Scales::super_half_block) {
    first = mul(load_i8(group + at.block_scale + b * 32), load_f16(group + b / 8 * 32));
  } else if constexpr (layout.scales == Scales::super_signed_block) {
    first = mul(load_i8(group + at.block_scale + b * 16), load_f16(group + b / 8 * 32));
  } else if constexpr (layout.scales == Scales::exponent) {
    first = load_exponents(group + b * 16);
  } else {
    first = load_f16(group + b * 32);
    if constexpr (layout.scales == Scales::block_and_low) {
      low = load_f16(group + at.low + b * 32);
    } else if constexpr (layout.scales == Scales::block_and_zero) {
      low = mul(mul(load_i8(group + at.zero + b * 16), first), -1.0f);
    }
  }
  Floats second = first;
  if constexpr (layout.scales == Scales::super_half_block) {
    second = mul(load_i8(group + at.block_scale + b * 32 + 16), load_f16(group + b / 8 * 32));
  }
  return {first, second, low};
}

// One block of a group as codes[row][column].
template <int bits, Codebook codebook>
inline void read_codes(const uint8_t* block, uint8_t (&codes)[group_rows][block_columns]) {
  const auto read_quad = [&]<int quad>() {
    const Bytes of_rows = codes_of<bits, quad, codebook>(block);
    for (int row = 0; row < group_rows; ++row) {
      __builtin_memcpy(&codes[row][4 * quad], reinterpret_cast<const uint8_t*>(&of_rows) + 4 * row, 4);
    }
  };
  [&]<int... quads>(std::integer_sequence<int, quads...>) {
    (read_quad.template operator()<quads>(), ...);
  }(std::make_integer_sequence<int, 8>());
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
    const BlockScales scales = scales_of_block<format>(group, at, b);
    float scale[2][group_rows], low[group_rows];
    store(scale[0], scales.first);
    store(scale[1], scales.second);
    store(low, scales.low);
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
