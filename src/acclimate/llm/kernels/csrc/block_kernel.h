// Quantised weights times inputs in 8 bits, for the vectors of one instruction set; included after simd_*.h.
#include "kernels.h"
#include "layout.h"
#include "values_kernel.h"

namespace acclimate::inference::ACCLIMATE_ISA {

// Prefetches the scales of a group and its first codes in order. This starts the hardware prefetcher, which
// then follows the codes.
inline void request_start(const uint8_t* group, const uint8_t* codes) {
  constexpr int64_t first_codes = 1024;
  for (const uint8_t* line = group; line < codes + first_codes; line += 64) {
    prefetch(line);
  }
}

template <int bits, int quad, Codebook codebook, int inputs>
inline void add_quad(Ints (&sums)[inputs], const uint8_t* block, const int8_t* x, int64_t stride) {
  const Bytes codes = codes_of<bits, quad, codebook>(block);
  for (int i = 0; i < inputs; ++i) {
    sums[i] = dot<number_bits(bits, codebook)>(sums[i], codes, x + i * stride + 4 * quad);
  }
}

// Adds quads 0 to 3 or 4 to 7.
template <int bits, int half, Codebook codebook = Codebook::none, int inputs>
inline void add_half(Ints (&sums)[inputs], const uint8_t* block, const int8_t* x, int64_t stride) {
  add_quad<bits, 4 * half, codebook>(sums, block, x, stride);
  add_quad<bits, 4 * half + 1, codebook>(sums, block, x, stride);
  add_quad<bits, 4 * half + 2, codebook>(sums, block, x, stride);
  add_quad<bits, 4 * half + 3, codebook>(sums, block, x, stride);
}

// Whether the products of a group with so many inputs take longer than reading it. Then it is read while the
// group before it is multiplied, else memory is idle for that time: eight inputs are 1.6 times faster on
// Zen 4. For fewer inputs this replaces the hardware prefetcher, and is slower.
constexpr bool reads_ahead(int bits, int inputs) { return 2 * inputs > bits; }

// One group of rows times some inputs; y[i] gets 16 values. next: the group to ask memory for.
template <WeightFormat format, int inputs>
inline void multiply_group(const uint8_t* group, int64_t blocks, const Input& input, int64_t first_input,
                           const uint8_t* next, Floats (&y)[inputs]) {
  constexpr Layout layout = layout_of(format);
  constexpr int bits = layout.bits;
  constexpr bool has_wide_codes = number_bits(bits, layout.codebook) == 8;
  constexpr int offset = has_wide_codes && !wide_codes_have_offset ? 0 : layout.offset;
  // An input may have more blocks than the weight, since it is padded for weights of any format.
  const int64_t stride = input.stride, x_blocks = stride / block_columns;
  const Offsets at = offsets_of(layout, blocks);
  const int8_t* x = static_cast<const int8_t*>(input.values) + first_input * stride;
  const float* x_scales = input.scales + first_input * x_blocks;
  const float* x_sums = input.scaled_sums + first_input * x_blocks;
  const int32_t* x_codes = input.sums + first_input * 2 * x_blocks;
  const uint8_t* codes = group + at.codes;
  Floats scale = zero(), low_scale = zero();
  if constexpr (layout.scales == Scales::row || layout.scales == Scales::row_and_block) {
    scale = load_f32(group);
    if constexpr (layout.scales == Scales::row_and_block) {
      low_scale = load_f32(group + at.low_scale);
    }
  }
  for (int i = 0; i < inputs; ++i) {
    y[i] = zero();
  }
  request_start(group, codes);
  for (int64_t b = 0; b < blocks; ++b) {
    if constexpr (inputs == 1 && bits == 8) {
      // The hardware prefetcher follows scales and codes, and falls behind: 14% faster on Zen 4. Codes of
      // fewer bits it brings in time.
      for (int line = 0; line < layout.code_bytes; line += 64) {
        prefetch_ahead(codes + 1024 + line);
      }
    }
    if constexpr (reads_ahead(bits, inputs)) {
      constexpr int bytes = layout.code_bytes + 64;  // of codes and scales
      for (int line = 0; line < bytes; line += 64) {
        prefetch_ahead(next + line);
      }
      next += bytes;
    }
    if constexpr (layout.scales == Scales::super_block || layout.scales == Scales::super_half_block ||
                  layout.scales == Scales::super_signed_block) {
      if (b % 8 == 0) {
        scale = load_f16(group + b / 8 * 32);
        if constexpr (layout.scales == Scales::super_block) {
          low_scale = load_f16(group + at.low_scale + b / 8 * 32);
        }
      }
    }
    Ints sums[inputs];
    if constexpr (layout.scales == Scales::super_half_block) {
      for (int i = 0; i < inputs; ++i) {
        sums[i] = set(-offset * x_codes[(i * x_blocks + b) * 2]);
      }
      add_half<bits, 0>(sums, codes, x, stride);
      const Floats first = mul(load_i8(group + at.block_scale + b * 32), scale);
      for (int i = 0; i < inputs; ++i) {
        y[i] = mul_add(mul(to_floats(sums[i]), x_scales[i * x_blocks + b]), first, y[i]);
        sums[i] = set(-offset * x_codes[(i * x_blocks + b) * 2 + 1]);
      }
      add_half<bits, 1>(sums, codes, x, stride);
      const Floats second = mul(load_i8(group + at.block_scale + b * 32 + 16), scale);
      for (int i = 0; i < inputs; ++i) {
        y[i] = mul_add(mul(to_floats(sums[i]), x_scales[i * x_blocks + b]), second, y[i]);
      }
    } else {
      for (int i = 0; i < inputs; ++i) {
        if constexpr (offset != 0) {
          const int32_t* both = x_codes + (i * x_blocks + b) * 2;
          sums[i] = set(-offset * (both[0] + both[1]));
        } else {
          sums[i] = set(0);
        }
      }
      add_half<bits, 0, layout.codebook>(sums, codes, x, stride);
      add_half<bits, 1, layout.codebook>(sums, codes, x, stride);
      if constexpr (layout.scales == Scales::row) {
        for (int i = 0; i < inputs; ++i) {
          y[i] = mul_add(to_floats(sums[i]), x_scales[i * x_blocks + b], y[i]);
        }
      } else {
        Floats block_scale, low;
        if constexpr (layout.scales == Scales::block) {
          block_scale = load_f16(group + b * 32);
        } else if constexpr (layout.scales == Scales::block_and_low) {
          block_scale = load_f16(group + b * 32);
          low = load_f16(group + at.low + b * 32);
        } else if constexpr (layout.scales == Scales::block_and_zero) {
          block_scale = load_f16(group + b * 32);
          low = mul(load_i8(group + at.zero + b * 16), block_scale);
        } else if constexpr (layout.scales == Scales::exponent) {
          block_scale = load_exponents(group + b * 16);
        } else if constexpr (layout.scales == Scales::super_signed_block) {
          block_scale = mul(load_i8(group + at.block_scale + b * 16), scale);
        } else {
          block_scale = mul(load_u8(group + at.block_scale + b * 16), scale);
          low = mul(load_u8(group + at.block_low + b * 16), low_scale);
        }
        for (int i = 0; i < inputs; ++i) {
          y[i] = mul_add(mul(to_floats(sums[i]), x_scales[i * x_blocks + b]), block_scale, y[i]);
          if constexpr (layout.scales == Scales::block_and_low) {
            y[i] = mul_add(low, x_sums[i * x_blocks + b], y[i]);
          } else if constexpr (layout.scales != Scales::block && layout.scales != Scales::exponent &&
                               layout.scales != Scales::super_signed_block) {
            y[i] = sub_mul(low, x_sums[i * x_blocks + b], y[i]);
          }
        }
      }
    }
    codes += layout.code_bytes;
    x += block_columns;
  }
  if constexpr (layout.scales == Scales::row) {
    for (int i = 0; i < inputs; ++i) {
      y[i] = mul(y[i], scale);
    }
  }
}

template <WeightFormat format, int inputs>
inline void multiply_inputs(const uint8_t* group, int64_t blocks, const Input& input, int64_t first_input,
                            const uint8_t* next, int64_t rows, float* y, int64_t y_stride) {
  Floats result[inputs];
  multiply_group<format, inputs>(group, blocks, input, first_input, next, result);
  for (int i = 0; i < inputs; ++i) {
    float* to = y + (first_input + i) * y_stride;
    if (rows == group_rows) {
      store(to, result[i]);
    } else {
      float values[group_rows];
      store(values, result[i]);
      for (int64_t row = 0; row < rows; ++row) {
        to[row] = values[row];
      }
    }
  }
}

// A group is read from memory once: for further inputs it is in the cache.
template <WeightFormat format>
void multiply_blocks(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
                     int64_t y_stride) {
  const int64_t blocks = padded_columns(format, weight.k) / block_columns;
  for (int64_t row = first; row < last; row += group_rows) {
    const uint8_t* group = weight.data + row / group_rows * weight.stride;
    const int64_t rows = last - row < group_rows ? last - row : group_rows;
    // Also beyond `last`: the next group is often this thread's as well.
    const uint8_t* next = row + group_rows < weight.n ? group + weight.stride : group;
    float* to = y + row - first;
    for_each_tile<most_block_inputs>(input.m, [&]<int inputs>(int64_t i) {
      multiply_inputs<format, inputs>(group, blocks, input, i, next, rows, to, y_stride);
      next = group;
    });
  }
}

void multiply_blocks(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
                     int64_t y_stride) {
  with_format(weight.format, [&]<WeightFormat format>() {
    multiply_blocks<format>(weight, input, first, last, y, y_stride);
  });
}

// Magnitudes are compared by their bits, as integers, because the compiler vectorises such loops.
inline int32_t largest_magnitude(const float* x) {
  int32_t bits[block_columns], largest = 0;
  __builtin_memcpy(bits, x, sizeof(bits));
  for (int i = 0; i < block_columns; ++i) {
    const int32_t magnitude = bits[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

bool quantize(const float* x, int64_t padded, int8_t* codes, float* scales, float* scaled_sums,
              int32_t* sums) {
  constexpr int32_t infinite = 0x7f800000;
  const int64_t blocks = padded / block_columns;
  int32_t largest_of_all = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t largest = largest_magnitude(x + b * block_columns);
    largest_of_all = largest > largest_of_all ? largest : largest_of_all;
    __builtin_memcpy(scales + b, &largest, sizeof(largest));
  }
  float* factors = scaled_sums;
  for (int64_t b = 0; b < blocks; ++b) {
    // 127 / a denormal is infinite; so small a block counts as zeros.
    const float largest = scales[b], factor = 127.0f / largest;
    const bool counts = factor < 3e38f;
    factors[b] = counts ? factor : 0.0f;
    scales[b] = counts ? largest / 127.0f : 0.0f;
  }
  for (int64_t b = 0; b < blocks; ++b, x += block_columns, codes += block_columns) {
    const float factor = factors[b];
    alignas(64) float whole[block_columns];
    for (int i = 0; i < block_columns; ++i) {
      // Rounds to nearest, ties to even: adding this number shifts the fraction out.
      constexpr float shift = 12582912.0f;
      whole[i] = (x[i] * factor + shift) - shift;
    }
    for (int i = 0; i < block_columns; ++i) {
      codes[i] = static_cast<int8_t>(static_cast<int32_t>(whole[i]));
    }
    // Sums of so few whole numbers are exact. The compiler would add integers one by one.
    const float totals[2] = {sum(load_f32(whole)), sum(load_f32(whole + 16))};
    sums[2 * b] = static_cast<int32_t>(totals[0]);
    sums[2 * b + 1] = static_cast<int32_t>(totals[1]);
    scaled_sums[b] = scales[b] * (totals[0] + totals[1]);
  }
  return largest_of_all < infinite;
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
