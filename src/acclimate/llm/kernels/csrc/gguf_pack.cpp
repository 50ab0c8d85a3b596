#include "gguf_pack.h"

#include <algorithm>
#include <cstring>

#include "layout.h"

namespace acclimate::inference {
namespace {

// The codes of one row of a block: 8 words of 4 codes each, as little-endian processors order them.
using Quads = uint32_t[8];

// Stores a row of a block.
void store_row(int bits, const Quads& quads, int64_t row, uint8_t* block) {
  uint8_t* to = block + 4 * row;
  if (bits == 8) {
    for (int quad = 0; quad < 8; ++quad) {
      std::memcpy(to + 64 * quad, &quads[quad], 4);
    }
    return;
  }
  for (int quad = 0; quad < 4; ++quad) {
    const uint32_t both = (quads[quad] & 0x0f0f0f0fu) | (quads[quad + 4] & 0x0f0f0f0fu) << 4;
    std::memcpy(to + 64 * quad, &both, 4);
  }
  const int width = bits - 4;
  for (int vector = 0; vector < width; ++vector) {
    const int together = 8 / width;
    uint32_t high = 0;
    for (int quad = 0; quad < together; ++quad) {
      high |= (quads[together * vector + quad] >> 4 & 0x0f0f0f0fu) << (width * quad);
    }
    std::memcpy(to + 256 + 64 * vector, &high, 4);
  }
}

// Low nibbles first, then high ones; before them a fifth bit for each value, if there is one. Codes of 8 bits
// are signed in the file.
void read_small(int bits, const uint8_t* from, Quads& quads) {
  uint32_t high = 0;
  if (bits == 5) {
    std::memcpy(&high, from, 4);
    from += 4;
  }
  std::memcpy(quads, from, bits == 8 ? 32 : 16);
  if (bits == 8) {
    for (uint32_t& quad : quads) {
      quad ^= 0x80808080u;
    }
    return;
  }
  for (int quad = 0; quad < 4; ++quad) {
    quads[quad + 4] = quads[quad] >> 4 & 0x0f0f0f0fu;
    quads[quad] &= 0x0f0f0f0fu;
  }
  if (bits == 5) {
    for (int quad = 0; quad < 8; ++quad) {
      const uint32_t four = high >> (4 * quad) & 15;
      quads[quad] |= (four * 0x00204081u & 0x01010101u) << 4;  // a bit for each byte
    }
  }
}

// Block b of the 8 of a super-block of Q4_K or Q5_K.
void read_super(int bits, const uint8_t* from, int b, Quads& quads) {
  Quads high{};
  if (bits == 5) {
    std::memcpy(high, from + 16, sizeof(high));
  }
  std::memcpy(quads, from + (bits == 5 ? 48 : 16) + b / 2 * 32, sizeof(quads));
  for (int quad = 0; quad < 8; ++quad) {
    quads[quad] = (quads[quad] >> (b % 2 * 4) & 0x0f0f0f0fu) | (high[quad] >> b & 0x01010101u) << 4;
  }
}

void read_q6(const uint8_t* from, int b, Quads& quads) {
  Quads high;
  std::memcpy(quads, from + b / 4 * 64 + b % 2 * 32, sizeof(quads));
  std::memcpy(high, from + 128 + b / 4 * 32, sizeof(high));
  for (int quad = 0; quad < 8; ++quad) {
    quads[quad] = (quads[quad] >> (b % 4 / 2 * 4) & 0x0f0f0f0fu) | (high[quad] >> (b % 4 * 2) & 0x03030303u)
                                                                       << 4;
  }
}

// Four codes of 4 bits as four bytes.
uint32_t spread(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00ff00ffu;
  return (codes | codes << 4) & 0x0f0f0f0fu;
}

// Scale or low number b of the 12 bytes that hold 8 of each.
uint8_t read_scale(const uint8_t* packed, int b, bool is_low) {
  const uint8_t* own = packed + (is_low ? 4 : 0);
  if (b < 4) {
    return own[b] & 63;
  }
  const uint8_t rest = packed[4 + b];
  return static_cast<uint8_t>((is_low ? rest >> 4 : rest & 15) | (own[b - 4] >> 2 & 48));
}

}  // namespace

void pack_group(WeightFormat format, const uint8_t* blocks, int64_t row_bytes, int64_t rows, int64_t k,
                uint8_t* group) {
  const Layout layout = layout_of(format);
  const int64_t count = k / block_columns;
  const Offsets at = offsets_of(layout, count);
  std::memset(group, 0, at.codes);
  for (int64_t b = 0; b < count; ++b) {
    const int part = static_cast<int>(b % 8);
    uint8_t* block = group + at.codes + b * layout.code_bytes;
    if (rows < group_rows) {
      std::memset(block, 0, layout.code_bytes);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = blocks + row * row_bytes;
      Quads quads;
      switch (layout.scales) {
        case Scales::block:
        case Scales::block_and_low:
          from += b * layout.gguf_bytes;
          std::memcpy(group + b * 32 + 2 * row, from, 2);
          if (layout.scales == Scales::block_and_low) {
            std::memcpy(group + at.low + b * 32 + 2 * row, from + 2, 2);
            from += 2;
          }
          read_small(layout.bits, from + 2, quads);
          break;
        case Scales::exponent:
          from += b * layout.gguf_bytes;
          group[b * 16 + row] = from[0];
          read_small(layout.bits, from + 1, quads);
          break;
        case Scales::super_block:
          from += b / 8 * layout.gguf_bytes;
          std::memcpy(group + b / 8 * 32 + 2 * row, from, 2);
          std::memcpy(group + at.low_scale + b / 8 * 32 + 2 * row, from + 2, 2);
          group[at.block_scale + b * 16 + row] = read_scale(from + 4, part, false);
          group[at.block_low + b * 16 + row] = read_scale(from + 4, part, true);
          read_super(layout.bits, from, part, quads);
          break;
        case Scales::super_signed_block: {
          from += b / 8 * layout.gguf_bytes;
          std::memcpy(group + b / 8 * 32 + 2 * row, from, 2);
          uint16_t high;
          std::memcpy(&high, from + 2, 2);
          const int low = from[4 + part / 2] >> (4 * (part % 2)) & 15;
          group[at.block_scale + b * 16 + row] =
              static_cast<uint8_t>((low | (high >> (2 * part) & 3) << 4) - 32);
          read_small(layout.bits, from + 8 + 16 * part, quads);
          break;
        }
        case Scales::super_half_block:
          from += b / 8 * layout.gguf_bytes;
          std::memcpy(group + b / 8 * 32 + 2 * row, from + layout.gguf_halves, 2);
          group[at.block_scale + b * 32 + row] = from[192 + 2 * part];
          group[at.block_scale + b * 32 + 16 + row] = from[192 + 2 * part + 1];
          read_q6(from, part, quads);
          break;
        case Scales::row:
        case Scales::row_and_block:
        case Scales::block_and_zero:
          return;  // not in files
      }
      store_row(layout.bits, quads, row, block);
    }
  }
}

void pack_words(WeightFormat format, const Words& words, int64_t first_row, int64_t rows, int64_t k,
                uint8_t* group) {
  constexpr int awq_place[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of each of 8 rows in a word
  const Layout layout = layout_of(format);
  const int64_t count = padded_columns(format, k) / block_columns, per = 32 / words.bits;
  const uint32_t mask = (uint32_t{1} << words.bits) - 1;
  const Offsets at = offsets_of(layout, count);
  // Of a row, in one of the orders of successive columns.
  const auto word_at = [&](int64_t row, int64_t word) {
    return words.order == WordOrder::by_row ? words.from[row * words.words + word]
                                            : words.from[word * words.rows + row];
  };
  const bool is_fast = words.bits == 4 && layout.bits == 4 && words.order != WordOrder::awq &&
                       words.skip == 0 && words.flip == 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t begin = b * block_columns, end = std::min(begin + block_columns, k);
    uint8_t* block = group + at.codes + b * layout.code_bytes;
    std::memset(block, 0, rows < group_rows ? layout.code_bytes : 0);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = first_row + row;
      Quads quads{};
      uint8_t* codes = reinterpret_cast<uint8_t*>(quads);
      if (is_fast && end - begin == block_columns) {
        for (int64_t word = 0; word < 4; ++word) {
          const uint32_t held = word_at(own, begin / 8 + word);
          quads[2 * word] = spread(held & 0xffff);
          quads[2 * word + 1] = spread(held >> 16);
        }
      } else if (words.order == WordOrder::awq) {
        const int64_t word = (words.skip + own) / per, place = awq_place[(words.skip + own) % per];
        for (int64_t column = begin; column < end; ++column) {
          const uint32_t held = words.from[column * words.words + word];
          codes[column - begin] = static_cast<uint8_t>((held >> (4 * place) & mask) ^ words.flip);
        }
      } else {
        for (int64_t column = begin; column < end;) {
          const int64_t word = (words.skip + column) / per, part = (words.skip + column) % per;
          const int64_t stop = std::min(column + per - part, end);
          uint32_t held = word_at(own, word);
          for (held >>= words.bits * part; column < stop; ++column, held >>= words.bits) {
            codes[column - begin] = static_cast<uint8_t>((held & mask) ^ words.flip);
          }
        }
      }
      store_row(layout.bits, quads, row, block);
    }
  }
}

}  // namespace acclimate::inference
