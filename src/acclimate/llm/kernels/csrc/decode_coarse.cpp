#include "decode_coarse.h"

#include <cstring>

#include "clones.h"
#include "layout.h"

namespace acclimate::inference::decode {
namespace {

// A vector holds one column of all 16 rows, so that no operation goes across a vector. The compiler maps
// these vectors to the processor's registers.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int32_t least_half = 113 << 23, most_half = 143 << 23;  // exponents of normal numbers in float16
constexpr int32_t lost_bits = 0x1fff;  // of a float32 that becomes a float16
constexpr int32_t sign_bit = INT32_MIN, infinite = 0x7f800000;

// Stores float32 values, given as bits, as float16. They must be representable in it, and not subnormal.
ACCLIMATE_INLINE void store_halves(const Ints& bits, uint8_t* to) {
  const Ints magnitude = bits & ~sign_bit, half = (magnitude >> 13) - (112 << 10);
  const Ints bounded = magnitude == 0 ? magnitude : half < 0x7c00 ? half : half * 0 + 0x7c00;
  const Halves halves = __builtin_convertvector(bounded | (bits >> 16 & 0x8000), Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

template <bool is_bf16>
ACCLIMATE_INLINE void round_rows(const uint32_t* words, int64_t stride, int64_t blocks, uint8_t* scales,
                                 uint8_t* lows, uint8_t* codes, float* errors, float* squares) {
  constexpr int64_t block_words = is_bf16 ? block_columns / 2 : block_columns;
  constexpr float shift = 12582912.0f;  // rounds to a whole number
  Floats error = {}, square = {};
  for (int64_t block = 0; block < blocks; ++block, words += block_words) {
    alignas(64) uint32_t turned[block_words][group_rows];
    for (int64_t row = 0; row < group_rows; ++row) {
      for (int64_t i = 0; i < block_words; ++i) {
        turned[i][row] = words[row * stride + i];
      }
    }
    Floats columns[block_columns];
    for (int64_t i = 0; i < block_words; ++i) {
      Ints word;
      std::memcpy(&word, turned[i], sizeof(word));
      if constexpr (is_bf16) {
        columns[2 * i] = (Floats)(word << 16);
        columns[2 * i + 1] = (Floats)(word & ~0xffff);
      } else {
        columns[i] = (Floats)word;
      }
    }
    Floats least = columns[0], most = columns[0];
    for (int64_t column = 1; column < block_columns; ++column) {
      least = columns[column] < least ? columns[column] : least;
      most = columns[column] > most ? columns[column] : most;
    }
    // Any scale and low are valid, since the errors are computed from them; an infinite one gives infinite
    // errors.
    Ints low_bits = (Ints)least & ~lost_bits, low_magnitude = low_bits & ~sign_bit;
    low_bits = low_magnitude < least_half ? low_bits * 0 : low_bits;
    low_bits = low_magnitude < most_half ? low_bits : (low_bits & sign_bit) | infinite;
    Ints scale_bits = ((Ints)((most - least) / 31.0f) + lost_bits) & ~(lost_bits | sign_bit);
    scale_bits = scale_bits > least_half ? scale_bits : scale_bits * 0 + least_half;
    scale_bits = scale_bits < most_half ? scale_bits : scale_bits * 0 + infinite;
    store_halves(scale_bits, scales + block * sizeof(Halves));
    store_halves(low_bits, lows + block * sizeof(Halves));
    const Floats low = (Floats)low_bits, scale = (Floats)scale_bits, inverse = 1.0f / scale;
    const Floats none = {}, most_code = none + 31.0f;
    Ints quads[block_columns / 4] = {}, fifth = {};
    for (int64_t column = 0; column < block_columns; ++column) {
      const Floats value = columns[column], nearest = ((value - low) * inverse + shift) - shift;
      const Floats above = nearest > none ? nearest : none;  // also for NaN
      const Floats code = above < most_code ? above : most_code;
      const Floats lost = value - (code * scale + low);
      error += lost * lost;
      square += value * value;
      quads[column / 4] |= __builtin_convertvector(code, Ints) << (column % 4 * 8);
    }
    for (int64_t quad = 0; quad < 4; ++quad, codes += sizeof(Ints)) {
      const Ints lower = quads[quad], upper = quads[quad + 4];
      const Ints both = (lower & 0x0f0f0f0f) | (upper & 0x0f0f0f0f) << 4;
      fifth |= (lower >> 4 & 0x01010101) << quad | (upper >> 4 & 0x01010101) << (quad + 4);
      std::memcpy(codes, &both, sizeof(both));
    }
    std::memcpy(codes, &fifth, sizeof(fifth));
    codes += sizeof(fifth);
  }
  std::memcpy(errors, &error, sizeof(error));
  std::memcpy(squares, &square, sizeof(square));
}

}  // namespace

ACCLIMATE_CLONES void leave_out_last_bit(const uint8_t* codes, int64_t blocks, uint8_t* to) {
  constexpr int64_t vector = 64;
  for (int64_t block = 0; block < blocks; ++block, codes += 5 * vector, to += 4 * vector) {
    uint8_t first_bits[vector];
    std::memcpy(first_bits, codes + 4 * vector, vector);
    for (int quad = 0; quad < 4; ++quad) {
      for (int64_t i = 0; i < vector; ++i) {
        const int rest = codes[quad * vector + i] >> 1 & 0x77;
        const int first = (first_bits[i] >> quad & 1) << 3 | (first_bits[i] >> (quad + 4) & 1) << 7;
        to[quad * vector + i] = static_cast<uint8_t>(rest | first);
      }
    }
  }
}

ACCLIMATE_CLONES void round_to_5_bits(bool is_bf16, const uint32_t* words, int64_t stride, int64_t blocks,
                                      uint8_t* scales, uint8_t* lows, uint8_t* codes, float* errors,
                                      float* squares) {
  if (is_bf16) {
    round_rows<true>(words, stride, blocks, scales, lows, codes, errors, squares);
  } else {
    round_rows<false>(words, stride, blocks, scales, lows, codes, errors, squares);
  }
}

}  // namespace acclimate::inference::decode
