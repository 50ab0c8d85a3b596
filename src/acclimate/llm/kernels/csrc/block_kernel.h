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

// Adds the products of some groups' codes with one quad of some inputs.
template <int bits, int quad, Codebook codebook, int groups, int inputs>
inline void add_quad(Ints (&sums)[groups][inputs], const uint8_t* const (&blocks)[groups], const int8_t* x,
                     int64_t stride) {
  Bytes codes[groups];
  if constexpr (inputs == 1) {
    // The hardware prefetcher follows codes that are read in the order of their addresses. The compiler would
    // read them in another one: decoding with q8_0 is then up to 13% slower on Zen 4.
    __asm__ volatile("" ::: "memory");
  }
#pragma GCC unroll 16
  for (int group = 0; group < groups; ++group) {
    codes[group] = codes_of<bits, quad, codebook>(blocks[group]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 16
    for (int group = 0; group < groups; ++group) {
      sums[group][i] =
          dot<number_bits(bits, codebook)>(sums[group][i], codes[group], x + i * stride + 4 * quad);
    }
  }
}

// Adds quads 0 to 3 or 4 to 7.
template <int bits, int half, Codebook codebook = Codebook::none, int groups, int inputs>
inline void add_half(Ints (&sums)[groups][inputs], const uint8_t* const (&blocks)[groups], const int8_t* x,
                     int64_t stride) {
  add_quad<bits, 4 * half, codebook>(sums, blocks, x, stride);
  add_quad<bits, 4 * half + 1, codebook>(sums, blocks, x, stride);
  add_quad<bits, 4 * half + 2, codebook>(sums, blocks, x, stride);
  add_quad<bits, 4 * half + 3, codebook>(sums, blocks, x, stride);
}

// Whether the products of a group with so many inputs take longer than reading it. Then it is read while the
// group before it is multiplied, else memory is idle for that time: eight inputs are 1.6 times faster on
// Zen 4. For fewer inputs this replaces the hardware prefetcher, and is slower.
constexpr bool reads_ahead(int bits, int inputs) { return 2 * inputs > bits; }

// Groups of rows, one after the other, times some inputs; y[group][i] gets 16 values. next: the group to ask
// memory for. Sums stay in registers only if the compiler unrolls the loops.
template <WeightFormat format, int groups, int inputs>
inline void multiply_groups(const uint8_t* first_group, int64_t group_stride, int64_t blocks,
                            const Input& input, int64_t first_input, const uint8_t* next,
                            Floats (&y)[groups][inputs]) {
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
  const uint8_t* group[groups];
  const uint8_t* codes[groups];
  Floats scale[groups], low_scale[groups], totals[groups][inputs];
#pragma GCC unroll 16
  for (int g = 0; g < groups; ++g) {
    group[g] = first_group + g * group_stride;
    codes[g] = group[g] + at.codes;
    scale[g] = low_scale[g] = zero();
    if constexpr (layout.scales == Scales::row || layout.scales == Scales::row_and_block) {
      scale[g] = load_f32(group[g]);
      if constexpr (layout.scales == Scales::row_and_block) {
        low_scale[g] = load_f32(group[g] + at.low_scale);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < inputs; ++i) {
      totals[g][i] = zero();
    }
    request_start(group[g], codes[g]);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    if constexpr (inputs == 1 && bits == 8) {
      // The hardware prefetcher follows scales and codes, and falls behind: 14% faster on Zen 4. Codes of
      // fewer bits it brings in time.
      for (int line = 0; line < layout.code_bytes; line += 64) {
        prefetch_ahead(codes[0] + 1024 + line);
      }
    }
    if constexpr (reads_ahead(bits, inputs)) {
      constexpr int bytes = groups * (layout.code_bytes + 64);  // of codes and scales
      for (int line = 0; line < bytes; line += 64) {
        prefetch_ahead(next + line);
      }
      next += bytes;
    }
    if constexpr (layout.scales == Scales::super_block || layout.scales == Scales::super_half_block ||
                  layout.scales == Scales::super_signed_block) {
      if (b % 8 == 0) {
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
          scale[g] = load_f16(group[g] + b / 8 * 32);
          if constexpr (layout.scales == Scales::super_block) {
            low_scale[g] = load_f16(group[g] + at.low_scale + b / 8 * 32);
          }
        }
      }
    }
    Ints sums[groups][inputs];
    // Begins the sums with what the codes' offset adds to them.
    const auto begin = [&](auto sum_of_codes) {
#pragma GCC unroll 16
      for (int i = 0; i < inputs; ++i) {
        const Ints start = set(offset == 0 ? 0 : -offset * sum_of_codes(x_codes + (i * x_blocks + b) * 2));
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
          sums[g][i] = start;
        }
      }
    };
    // Adds the sums times the scales of inputs and rows.
    const auto finish = [&](const Floats(&factors)[groups]) {
#pragma GCC unroll 16
      for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
          totals[g][i] =
              mul_add(mul(to_floats(sums[g][i]), x_scales[i * x_blocks + b]), factors[g], totals[g][i]);
        }
      }
    };
    if constexpr (layout.scales == Scales::super_half_block) {
      Floats factors[groups];
      begin([](const int32_t* both) { return both[0]; });
      add_half<bits, 0>(sums, codes, x, stride);
#pragma GCC unroll 16
      for (int g = 0; g < groups; ++g) {
        factors[g] = mul(load_i8(group[g] + at.block_scale + b * 32), scale[g]);
      }
      finish(factors);
      begin([](const int32_t* both) { return both[1]; });
      add_half<bits, 1>(sums, codes, x, stride);
#pragma GCC unroll 16
      for (int g = 0; g < groups; ++g) {
        factors[g] = mul(load_i8(group[g] + at.block_scale + b * 32 + 16), scale[g]);
      }
      finish(factors);
    } else {
      begin([](const int32_t* both) { return both[0] + both[1]; });
      add_half<bits, 0, layout.codebook>(sums, codes, x, stride);
      add_half<bits, 1, layout.codebook>(sums, codes, x, stride);
      if constexpr (layout.scales == Scales::row) {
#pragma GCC unroll 16
        for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 16
          for (int g = 0; g < groups; ++g) {
            totals[g][i] = mul_add(to_floats(sums[g][i]), x_scales[i * x_blocks + b], totals[g][i]);
          }
        }
      } else {
        Floats factors[groups], low[groups];
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
          if constexpr (layout.scales == Scales::block) {
            factors[g] = load_f16(group[g] + b * 32);
          } else if constexpr (layout.scales == Scales::block_and_low) {
            factors[g] = load_f16(group[g] + b * 32);
            low[g] = load_f16(group[g] + at.low + b * 32);
          } else if constexpr (layout.scales == Scales::block_and_zero) {
            factors[g] = load_f16(group[g] + b * 32);
            low[g] = mul(load_i8(group[g] + at.zero + b * 16), factors[g]);
          } else if constexpr (layout.scales == Scales::exponent) {
            factors[g] = load_exponents(group[g] + b * 16);
          } else if constexpr (layout.scales == Scales::super_signed_block) {
            factors[g] = mul(load_i8(group[g] + at.block_scale + b * 16), scale[g]);
          } else {
            factors[g] = mul(load_u8(group[g] + at.block_scale + b * 16), scale[g]);
            low[g] = mul(load_u8(group[g] + at.block_low + b * 16), low_scale[g]);
          }
        }
        finish(factors);
        if constexpr (layout.scales != Scales::block && layout.scales != Scales::exponent &&
                      layout.scales != Scales::super_signed_block) {
#pragma GCC unroll 16
          for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 16
            for (int g = 0; g < groups; ++g) {
              if constexpr (layout.scales == Scales::block_and_low) {
                totals[g][i] = mul_add(low[g], x_sums[i * x_blocks + b], totals[g][i]);
              } else {
                totals[g][i] = sub_mul(low[g], x_sums[i * x_blocks + b], totals[g][i]);
              }
            }
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int g = 0; g < groups; ++g) {
      codes[g] += layout.code_bytes;
    }
    x += block_columns;
  }
#pragma GCC unroll 16
  for (int g = 0; g < groups; ++g) {
#pragma GCC unroll 16
    for (int i = 0; i < inputs; ++i) {
      y[g][i] = layout.scales == Scales::row ? mul(totals[g][i], scale[g]) : totals[g][i];
    }
  }
}

template <WeightFormat format, int groups, int inputs>
inline void multiply_inputs(const uint8_t* group, int64_t group_stride, int64_t blocks, const Input& input,
                            int64_t first_input, const uint8_t* next, int64_t rows, float* y,
                            int64_t y_stride) {
  Floats result[groups][inputs];
  multiply_groups<format, groups, inputs>(group, group_stride, blocks, input, first_input, next, result);
  for (int g = 0; g < groups; ++g) {
    for (int i = 0; i < inputs; ++i) {
      float* to = y + (first_input + i) * y_stride + g * group_rows;
      if (rows - g * group_rows >= group_rows) {
        store(to, result[g][i]);
      } else {
        float values[group_rows];
        store(values, result[g][i]);
        for (int64_t row = 0; row < rows - g * group_rows; ++row) {
          to[row] = values[row];
        }
      }
    }
  }
}

// Multiplies whole runs of `groups` groups from `row` on, and returns the first row that is left. A group is
// read from memory once: for further inputs it is in the cache.
template <WeightFormat format, int groups, int most>
int64_t multiply_rows_of(const Weight& weight, const Input& input, int64_t row, int64_t last, float* y,
                         int64_t y_stride) {
  const int64_t blocks = padded_columns(format, weight.k) / block_columns;
  for (; row + (groups - 1) * group_rows < last; row += groups * group_rows, y += groups * group_rows) {
    const uint8_t* group = weight.data + row / group_rows * weight.stride;
    const int64_t rows = last - row < groups * group_rows ? last - row : groups * group_rows;
    // Also beyond `last`: the next group is often this thread's as well.
    const uint8_t* next = row + 2 * groups * group_rows <= weight.n ? group + groups * weight.stride : group;
    for_each_tile<most>(input.m, [&]<int inputs>(int64_t i) {
      multiply_inputs<format, groups, inputs>(group, weight.stride, blocks, input, i, next, rows, y,
                                              y_stride);
      next = group;
    });
  }
  return row;
}

template <WeightFormat format>
void multiply_blocks(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
                     int64_t y_stride) {
  int64_t row = first;
  if constexpr (many_groups > 1) {
    // An input's codes are then loaded once for several groups.
    if (input.m > most_block_inputs) {
      row = multiply_rows_of<format, many_groups, many_inputs>(weight, input, row, last, y, y_stride);
    }
  }
  multiply_rows_of<format, 1, most_block_inputs>(weight, input, row, last, y + row - first, y_stride);
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
