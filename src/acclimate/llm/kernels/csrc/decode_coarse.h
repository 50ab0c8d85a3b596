// The coarse copy of a group of 16 rows: 5 bits for each value, with a scale and a low for each block; or the
// first 4 bits of codes of 5.
#pragma once

#include <cstdint>

namespace acclimate::inference::decode {

// Rounds the blocks of 16 rows, each of which begins `stride` words of 32 bits after the one before: a value
// in float32, or two in bfloat16. The codes are laid out as in the format q5_1. Writes the sum of the squares
// of the errors, and of the values, for each row.
void round_to_5_bits(bool is_bf16, const uint32_t* words, int64_t stride, int64_t blocks, uint8_t* scales,
                     uint8_t* lows, uint8_t* codes, float* errors, float* squares);

// Leaves out the last bit of the codes of some blocks of int5; the others are laid out as in int4.
void leave_out_last_bit(const uint8_t* codes, int64_t blocks, uint8_t* to);

}  // namespace acclimate::inference::decode
