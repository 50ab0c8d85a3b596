// The codes of quantised weights as bytes, for the vectors of one instruction set; included after simd_*.h.
#pragma once

#include <array>
#include <cstdint>

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

}  // namespace acclimate::inference::ACCLIMATE_ISA
