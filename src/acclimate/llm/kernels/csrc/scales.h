// The scales of a quantised weight's blocks, for the vectors of one instruction set; included after simd_*.h.
#pragma once

#include "layout.h"

namespace acclimate::inference::ACCLIMATE_ISA {

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

}  // namespace acclimate::inference::ACCLIMATE_ISA
