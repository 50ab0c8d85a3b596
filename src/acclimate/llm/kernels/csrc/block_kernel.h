// Quantised weights times inputs in 8 bits, for the vectors of one instruction set; included after simd_*.h.
#include "clones.h"
#include "codes.h"
#include "kernels.h"
#include "layout.h"

namespace acclimate::inference::ACCLIMATE_ISA {

// Prefetches the scales of a group and its first codes in order. This starts the hardware prefetcher, which
// then follows the codes. Prefetching further ahead replaces the hardware prefetcher, and was slower on
// Zen 4.
inline void request_start(const uint8_t* group, const uint8_t* codes) {
  constexpr int64_t first_codes = 1024;
  for (const uint8_t* line = group; line < codes + first_codes; line += 64) {
    prefetch(line);
  }
}

// Sums of a tile of inputs stay in registers only if the compiler unrolls these loops.
#define FOR_INPUTS _Pragma("GCC unroll 16") for (int i = 0; i < inputs; ++i)

template <int bits, int quad, Codebook codebook, int inputs>
inline void add_quad(Ints (&sums)[inputs], const uint8_t* block, const int8_t* x, int64_t stride) {
  const Bytes codes = codes_of<bits, quad, codebook>(block);
  FOR_INPUTS { sums[i] = dot<number_bits(bits, codebook)>(sums[i], codes, x + i * stride + 4 * quad); }
}

// Adds quads 0 to 3 or 4 to 7.
template <int bits, int half, Codebook codebook = Codebook::none, int inputs>
inline void add_half(Ints (&sums)[inputs], const uint8_t* block, const int8_t* x, int64_t stride) {
  add_quad<bits, 4 * half, codebook>(sums, block, x, stride);
  add_quad<bits, 4 * half + 1, codebook>(sums, block, x, stride);
  add_quad<bits, 4 * half + 2, codebook>(sums, block, x, stride);
  add_quad<bits, 4 * half + 3, codebook>(sums, block, x, stride);
}

// Adds quads first to last of which `quads` has the bits.
template <int bits, int first, int last, Codebook codebook, int inputs>
ACCLIMATE_INLINE void add_quads(Ints (&sums)[inputs], const uint8_t* block, const int8_t* x, int64_t stride,
                                unsigned quads) {
  if (quads >> first & 1) {
    add_quad<bits, first, codebook>(sums, block, x, stride);
  }
  if constexpr (first < last) {
    add_quads<bits, first + 1, last, codebook>(sums, block, x, stride, quads);
  }
}

// AVX-512 has registers for these products beside the others'. Elsewhere they are a function of their own, so
// that the others stay in registers: AVX2's took up to 12 % longer without.
#if defined(__AVX512F__)
#define BESIDE_OTHERS ACCLIMATE_INLINE
#else
#define BESIDE_OTHERS __attribute__((noinline))
#endif

template <int bits, int first, int last, Codebook codebook, int inputs>
BESIDE_OTHERS void multiply_quads(Ints (&products)[inputs], const uint8_t* block, const int8_t* x,
                                  int64_t stride, unsigned quads) {
  FOR_INPUTS { products[i] = set(0); }
  add_quads<bits, first, last, codebook>(products, block, x, stride, quads);
}
#undef BESIDE_OTHERS

// Adds the products of the high parts, of which only few blocks have any.
template <int bits, int first, int last, Codebook codebook = Codebook::none, int inputs>
ACCLIMATE_INLINE void add_high(Ints (&sums)[inputs], const uint8_t* block, const int8_t* high, int64_t stride,
                               unsigned quads) {
  constexpr unsigned these = (2u << last) - (1u << first);
  if ((quads & these) != 0) [[unlikely]] {
    Ints products[inputs];
    multiply_quads<bits, first, last, codebook>(products, block, high, stride, quads);
    FOR_INPUTS { sums[i] = add_128_times(sums[i], products[i]); }
  }
}

// One group of rows times some inputs; y[i] gets 16 values.
template <WeightFormat format, int inputs>
ACCLIMATE_INLINE void multiply_group(const uint8_t* group, int64_t blocks, const Input& input,
                                     int64_t first_input, Floats (&y)[inputs]) {
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
  const int8_t* high = input.high + first_input * stride;
  const uint8_t* high_quads = input.high_quads + first_input * x_blocks;
  const uint8_t* codes = group + at.codes;
  Floats scale = zero(), low_scale = zero();
  if constexpr (layout.scales == Scales::row || layout.scales == Scales::row_and_block) {
    scale = load_f32(group);
    if constexpr (layout.scales == Scales::row_and_block) {
      low_scale = load_f32(group + at.low_scale);
    }
  }
  FOR_INPUTS { y[i] = zero(); }
  request_start(group, codes);
  for (int64_t b = 0; b < blocks; ++b) {
    if constexpr (layout.scales == Scales::super_block || layout.scales == Scales::super_half_block ||
                  layout.scales == Scales::super_signed_block) {
      if (b % 8 == 0) {
        scale = load_f16(group + b / 8 * 32);
        if constexpr (layout.scales == Scales::super_block) {
          low_scale = load_f16(group + at.low_scale + b / 8 * 32);
        }
      }
    }
    unsigned quads = 0;  // in which an input of the tile has high parts; those of the others are zeros
    FOR_INPUTS { quads |= high_quads[i * x_blocks + b]; }
    Ints sums[inputs];
    if constexpr (layout.scales == Scales::super_half_block) {
      FOR_INPUTS { sums[i] = set(-offset * x_codes[(i * x_blocks + b) * 2]); }
      add_half<bits, 0>(sums, codes, x, stride);
      add_high<bits, 0, 3>(sums, codes, high, stride, quads);
      const Floats first = mul(load_i8(group + at.block_scale + b * 32), scale);
      FOR_INPUTS {
        y[i] = mul_add(mul(to_floats(sums[i]), x_scales[i * x_blocks + b]), first, y[i]);
        sums[i] = set(-offset * x_codes[(i * x_blocks + b) * 2 + 1]);
      }
      add_half<bits, 1>(sums, codes, x, stride);
      add_high<bits, 4, 7>(sums, codes, high, stride, quads);
      const Floats second = mul(load_i8(group + at.block_scale + b * 32 + 16), scale);
      FOR_INPUTS { y[i] = mul_add(mul(to_floats(sums[i]), x_scales[i * x_blocks + b]), second, y[i]); }
    } else {
      FOR_INPUTS {
        if constexpr (offset != 0) {
          const int32_t* both = x_codes + (i * x_blocks + b) * 2;
          sums[i] = set(-offset * (both[0] + both[1]));
        } else {
          sums[i] = set(0);
        }
      }
      add_half<bits, 0, layout.codebook>(sums, codes, x, stride);
      add_half<bits, 1, layout.codebook>(sums, codes, x, stride);
      add_high<bits, 0, 7, layout.codebook>(sums, codes, high, stride, quads);
      if constexpr (layout.scales == Scales::row) {
        FOR_INPUTS { y[i] = mul_add(to_floats(sums[i]), x_scales[i * x_blocks + b], y[i]); }
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
        FOR_INPUTS {
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
    high += block_columns;
  }
  if constexpr (layout.scales == Scales::row) {
    FOR_INPUTS { y[i] = mul(y[i], scale); }
  }
}

template <WeightFormat format, int inputs>
inline void multiply_inputs(const uint8_t* group, int64_t blocks, const Input& input, int64_t first_input,
                            int64_t rows, float* y, int64_t y_stride) {
  Floats result[inputs];
  multiply_group<format, inputs>(group, blocks, input, first_input, result);
  FOR_INPUTS {
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

#undef FOR_INPUTS

// A group is read from memory once: for further inputs it is in the cache.
template <WeightFormat format>
void multiply_blocks(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
                     int64_t y_stride) {
  const int64_t blocks = padded_columns(format, weight.k) / block_columns;
  for (int64_t row = first; row < last; row += group_rows) {
    const uint8_t* group = weight.data + row / group_rows * weight.stride;
    const int64_t rows = last - row < group_rows ? last - row : group_rows;
    float* to = y + row - first;
    for_each_tile<most_block_inputs>(input.m, [&]<int inputs>(int64_t i) {
      multiply_inputs<format, inputs>(group, blocks, input, i, rows, to, y_stride);
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

// To the nearest whole number, ties to even: adding this number shifts the fraction out.
inline float round_to_even(float x) {
  constexpr float shift = 12582912.0f;
  return (x + shift) - shift;
}

// Divides whole numbers into 128 times a high part, which is 0 for those of 8 bits, and the rest. Returns the
// bits of the quads that have high parts.
inline uint8_t split(float (&whole)[block_columns], int8_t* high) {
  unsigned quads = 0;
  for (int i = 0; i < block_columns; ++i) {
    const float part = whole[i] > 127.0f || whole[i] < -127.0f ? round_to_even(whole[i] / 128.0f) : 0.0f;
    high[i] = static_cast<int8_t>(static_cast<int32_t>(part));
    whole[i] -= 128.0f * part;
    quads |= static_cast<unsigned>(part != 0.0f) << i / 4;
  }
  return static_cast<uint8_t>(quads);
}

// Language models have a few inputs that are much larger than all others, and 8 bits for such an input leave
// few for the 31 beside it. So a block whose largest value is more than 2.5 times that of an average block
// has the scale of an average one, and its larger values have high parts. In the demo model these are 6 % of
// the blocks, and the errors of products have 40 % of their variance; with 2 times they would be 9 % and have
// 35 %, with 4 times 3 % and 55 %. A row's scales depend on no other row.
bool quantize(const float* x, int64_t padded, Int8Row row) {
  constexpr int32_t infinite = 0x7f800000;
  constexpr float smallest = 1e-36f;  // 127 / it is finite
  const int64_t blocks = padded / block_columns;
  float *scales = row.scales, *factors = row.scaled_sums;
  int32_t largest_of_all = 0;
  float total = 0, used = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t largest = largest_magnitude(x + b * block_columns);
    largest_of_all = largest > largest_of_all ? largest : largest_of_all;
    __builtin_memcpy(scales + b, &largest, sizeof(largest));
    total += scales[b];
    used += largest != 0 ? 1.0f : 0.0f;
  }
  const float mean = total / used;  // NaN of zeros only
  const float average = mean > smallest ? mean : smallest;
  for (int64_t b = 0; b < blocks; ++b) {
    row.high_quads[b] = scales[b] > 2.5f * average;
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const float largest = scales[b], least = largest / 128.0f;
    const float range = largest <= 2.5f * average ? largest : least > average ? least : average;
    // 127 / a denormal is infinite; so small a block counts as zeros.
    const float factor = 127.0f / range;
    const bool counts = factor < 3e38f;
    factors[b] = counts ? factor : 0.0f;
    scales[b] = counts ? range / 127.0f : 0.0f;
  }
  __builtin_memset(row.high, 0, padded);
  int8_t* codes = row.codes;
  for (int64_t b = 0; b < blocks; ++b, x += block_columns, codes += block_columns) {
    const float factor = factors[b];
    alignas(64) float whole[block_columns];
    for (int i = 0; i < block_columns; ++i) {
      whole[i] = round_to_even(x[i] * factor);
    }
    // Sums of so few whole numbers are exact. The compiler would add integers one by one.
    const float totals[2] = {sum(load_f32(whole)), sum(load_f32(whole + 16))};
    if (row.high_quads[b] != 0) {
      row.high_quads[b] = split(whole, row.high + b * block_columns);
    }
    for (int i = 0; i < block_columns; ++i) {
      codes[i] = static_cast<int8_t>(static_cast<int32_t>(whole[i]));
    }
    row.sums[2 * b] = static_cast<int32_t>(totals[0]);
    row.sums[2 * b + 1] = static_cast<int32_t>(totals[1]);
    row.scaled_sums[b] = scales[b] * (totals[0] + totals[1]);
  }
  return largest_of_all < infinite;
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
