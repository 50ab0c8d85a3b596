#include "gguf_pack.h"

#include <algorithm>
#include <cstring>

#include "layout.h"

namespace acclimate::inference {
namespace {

// Codes of 32 columns of each row of a group.
using Codes = uint8_t[group_rows][block_columns];

void pack_codes(int bits, const Codes& codes, uint8_t* block) {
  uint8_t quads[8][64];
  for (int quad = 0; quad < 8; ++quad) {
    for (int row = 0; row < group_rows; ++row) {
      std::memcpy(quads[quad] + 4 * row, &codes[row][4 * quad], 4);
    }
  }
  if (bits == 8) {
    std::memcpy(block, quads, sizeof(quads));
    return;
  }
  for (int quad = 0; quad < 4; ++quad) {
    for (int i = 0; i < 64; ++i) {
      block[64 * quad + i] = static_cast<uint8_t>((quads[quad][i] & 15) | quads[quad + 4][i] << 4);
    }
  }
  const int width = bits - 4;
  for (int vector = 0; vector < width; ++vector) {
    const int each = 8 / width;
    for (int i = 0; i < 64; ++i) {
      unsigned high = 0;
      for (int quad = 0; quad < each; ++quad) {
        high |= (quads[each * vector + quad][i] >> 4) << (width * quad);
      }
      block[256 + 64 * vector + i] = static_cast<uint8_t>(high);
    }
  }
}

// The codes of one row of a block: 8 words of 4 codes each, as little-endian processors order them.
using Quads = uint32_t[8];

// Stores a row of 4 or 8 bits without going through single codes.
void store_row(int bits, const Quads& quads, int64_t row, uint8_t* block) {
  for (int quad = 0; quad < bits; ++quad) {
    const uint32_t word = bits == 8 ? quads[quad] : quads[quad] | quads[quad + 4] << 4;
    std::memcpy(block + 64 * quad + 4 * row, &word, 4);
  }
}

// Reads a row of GGUF's Q8_0, whose codes are signed, or of 16 bytes with low nibbles first, then high ones.
void read_small_quads(int bits, const uint8_t* from, Quads& quads) {
  std::memcpy(quads, from, 4 * bits);
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
}

// Reads a row of block b of a super-block of Q4_K.
void read_super_quads(const uint8_t* from, int b, Quads& quads) {
  std::memcpy(quads, from + 16 + b / 2 * 32, sizeof(quads));
  for (uint32_t& quad : quads) {
    quad = quad >> (b % 2 * 4) & 0x0f0f0f0fu;
  }
}

// Four codes of 4 bits as four bytes.
uint32_t spread(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00ff00ffu;
  return (codes | codes << 4) & 0x0f0f0f0fu;
}

// Low nibbles first, then high ones; a fifth bit for each value, if there is one.
void read_small(int bits, const uint8_t* from, uint8_t* codes) {
  if (bits == 8) {
    for (int i = 0; i < 32; ++i) {
      codes[i] = from[i] ^ 128;  // the file's are signed
    }
    return;
  }
  uint32_t high = 0;
  if (bits == 5) {
    std::memcpy(&high, from, 4);
    from += 4;
  }
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<uint8_t>((from[i] & 15) | (high >> i & 1) << 4);
    codes[16 + i] = static_cast<uint8_t>(from[i] >> 4 | (high >> (16 + i) & 1) << 4);
  }
}

// Block b of the 8 of a super-block of Q4_K or Q5_K.
void read_super(int bits, const uint8_t* from, int b, uint8_t* codes) {
  const uint8_t* low = from + (bits == 5 ? 48 : 16) + b / 2 * 32;
  for (int i = 0; i < 32; ++i) {
    const int high = bits == 5 ? (from[16 + i] >> b & 1) << 4 : 0;
    codes[i] = static_cast<uint8_t>((low[i] >> (b % 2 * 4) & 15) | high);
  }
}

void read_q6(const uint8_t* from, int b, uint8_t* codes) {
  const uint8_t* low = from + b / 4 * 64 + b % 2 * 32;
  const uint8_t* high = from + 128 + b / 4 * 32;
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<uint8_t>((low[i] >> (b % 4 / 2 * 4) & 15) | (high[i] >> (b % 4 * 2) & 3) << 4);
  }
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
  const bool is_fast = layout.bits == 4 || layout.bits == 8;
  Codes codes{};
  for (int64_t b = 0; b < count; ++b) {
    const int part = static_cast<int>(b % 8);
    uint8_t* block = group + at.codes + b * layout.code_bytes;
    if (is_fast && rows < group_rows) {
      std::memset(block, 0, layout.code_bytes);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = blocks + row * row_bytes;
      const uint8_t* small = nullptr;
      switch (layout.scales) {
        case Scales::block:
        case Scales::block_and_low:
          from += b * layout.gguf_bytes;
          std::memcpy(group + b * 32 + 2 * row, from, 2);
          if (layout.scales == Scales::block_and_low) {
            std::memcpy(group + at.low + b * 32 + 2 * row, from + 2, 2);
            from += 2;
          }
          small = from + 2;
          break;
        case Scales::exponent:
          from += b * layout.gguf_bytes;
          group[b * 16 + row] = from[0];
          small = from + 1;
          break;
        case Scales::super_block:
          from += b / 8 * layout.gguf_bytes;
          std::memcpy(group + b / 8 * 32 + 2 * row, from, 2);
          std::memcpy(group + at.low_scale + b / 8 * 32 + 2 * row, from + 2, 2);
          group[at.block_scale + b * 16 + row] = read_scale(from + 4, part, false);
          group[at.block_low + b * 16 + row] = read_scale(from + 4, part, true);
          if (is_fast) {
            Quads quads;
            read_super_quads(from, part, quads);
            store_row(layout.bits, quads, row, block);
          } else {
            read_super(layout.bits, from, part, codes[row]);
          }
          break;
        case Scales::super_signed_block: {
          from += b / 8 * layout.gguf_bytes;
          std::memcpy(group + b / 8 * 32 + 2 * row, from, 2);
          uint16_t high;
          std::memcpy(&high, from + 2, 2);
          const int low = from[4 + part / 2] >> (4 * (part % 2)) & 15;
          group[at.block_scale + b * 16 + row] =
              static_cast<uint8_t>((low | (high >> (2 * part) & 3) << 4) - 32);
          small = from + 8 + 16 * part;
          break;
        }
        case Scales::super_half_block:
          from += b / 8 * layout.gguf_bytes;
          std::memcpy(group + b / 8 * 32 + 2 * row, from + layout.gguf_halves, 2);
          group[at.block_scale + b * 32 + row] = from[192 + 2 * part];
          group[at.block_scale + b * 32 + 16 + row] = from[192 + 2 * part + 1];
          read_q6(from, part, codes[row]);
          break;
        case Scales::row:
        case Scales::row_and_block:
        case Scales::block_and_zero:
          break;  // not in files
      }
      if (small != nullptr && is_fast) {
        Quads quads;
        read_small_quads(layout.bits, small, quads);
        store_row(layout.bits, quads, row, block);
      } else if (small != nullptr) {
        read_small(layout.bits, small, codes[row]);
      }
    }
    if (!is_fast) {
      pack_codes(layout.bits, codes, block);
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
  const bool is_fast = words.bits == 4 && layout.bits == 4 && words.order != WordOrder::awq &&
                       words.skip == 0 && words.flip == 0;
  Codes codes{};
  for (int64_t b = 0; b < count; ++b) {
    const int64_t begin = b * block_columns, end = std::min(begin + block_columns, k);
    uint8_t* block = group + at.codes + b * layout.code_bytes;
    if (is_fast && end - begin == block_columns) {
      std::memset(block, 0, rows < group_rows ? layout.code_bytes : 0);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t own = first_row + row, first = begin / 8;
        Quads quads;
        for (int64_t word = 0; word < 4; ++word) {
          const uint32_t held = words.order == WordOrder::by_row
                                    ? words.from[own * words.words + first + word]
                                    : words.from[(first + word) * words.rows + own];
          quads[2 * word] = spread(held & 0xffff);
          quads[2 * word + 1] = spread(held >> 16);
        }
        store_row(4, quads, row, block);
      }
      continue;
    }
    if (end - begin < block_columns) {
      std::memset(codes, 0, sizeof(codes));
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = first_row + row;
      if (words.order == WordOrder::awq) {
        const int64_t word = (words.skip + own) / per, place = awq_place[(words.skip + own) % per];
        for (int64_t column = begin; column < end; ++column) {
          const uint32_t held = words.from[column * words.words + word];
          codes[row][column - begin] = static_cast<uint8_t>((held >> (4 * place) & mask) ^ words.flip);
        }
        continue;
      }
      for (int64_t column = begin; column < end;) {
        const int64_t word = (words.skip + column) / per, part = (words.skip + column) % per;
        const int64_t stop = std::min(column + per - part, end);
        uint32_t held = words.order == WordOrder::by_row ? words.from[own * words.words + word]
                                                         : words.from[word * words.rows + own];
        for (held >>= words.bits * part; column < stop; ++column, held >>= words.bits) {
          codes[row][column - begin] = static_cast<uint8_t>((held & mask) ^ words.flip);
        }
      }
    }
    pack_codes(layout.bits, codes, block);
  }
}

}  // namespace acclimate::inference
