// Where the fields and codes of a group are; see acclimate.llm.kernels.schemes.
//
// Functions are static: files are compiled for several instruction sets, and the linker would keep one copy.
#pragma once

#include "linear.h"

namespace acclimate::inference {

constexpr int64_t block_columns = 32;

enum class Scales {
  row,  // scale f32 for the row
  row_and_block,  // and 8 bits for each block, and lows alike
  block,  // f16 for each block
  block_and_low,  // and a low
  super_block,  // scale and low f16 for 256 columns, 8 bits for each block
  super_half_block,  // scale f16 for 256 columns, 8 bits signed for each 16 columns
};

struct Layout {
  int bits, offset;
  Scales scales;
  int code_bytes;  // of a block in a group
  int gguf_bytes;  // of a block in a file
  int gguf_columns;
};

static constexpr Layout layout_of(Scheme scheme) {
  switch (scheme) {
    case Scheme::int8:
      return {8, 128, Scales::row, 512, 0, 32};
    case Scheme::int4:
      return {4, 0, Scales::row_and_block, 256, 0, 32};
    case Scheme::int5:
      return {5, 0, Scales::row_and_block, 320, 0, 32};
    case Scheme::q4_0:
      return {4, 8, Scales::block, 256, 18, 32};
    case Scheme::q4_1:
      return {4, 0, Scales::block_and_low, 256, 20, 32};
    case Scheme::q5_0:
      return {5, 16, Scales::block, 320, 22, 32};
    case Scheme::q5_1:
      return {5, 0, Scales::block_and_low, 320, 24, 32};
    case Scheme::q8_0:
      return {8, 128, Scales::block, 512, 34, 32};
    case Scheme::q4_k:
      return {4, 0, Scales::super_block, 256, 144, 256};
    case Scheme::q5_k:
      return {5, 0, Scales::super_block, 320, 176, 256};
    case Scheme::q6_k:
      return {6, 32, Scales::super_half_block, 384, 210, 256};
    case Scheme::dense:
      break;
  }
  return {};
}

// Calls function.operator()<scheme>() for a scheme of blocks that is known when the program runs, and does
// nothing for dense weights.
template <class Function>
static void with_scheme(Scheme scheme, Function function) {
  switch (scheme) {
    case Scheme::int8:
      return function.template operator()<Scheme::int8>();
    case Scheme::int4:
      return function.template operator()<Scheme::int4>();
    case Scheme::int5:
      return function.template operator()<Scheme::int5>();
    case Scheme::q4_0:
      return function.template operator()<Scheme::q4_0>();
    case Scheme::q4_1:
      return function.template operator()<Scheme::q4_1>();
    case Scheme::q5_0:
      return function.template operator()<Scheme::q5_0>();
    case Scheme::q5_1:
      return function.template operator()<Scheme::q5_1>();
    case Scheme::q8_0:
      return function.template operator()<Scheme::q8_0>();
    case Scheme::q4_k:
      return function.template operator()<Scheme::q4_k>();
    case Scheme::q5_k:
      return function.template operator()<Scheme::q5_k>();
    case Scheme::q6_k:
      return function.template operator()<Scheme::q6_k>();
    case Scheme::dense:
      break;
  }
}

// Bytes from the start of a group; the scales come first.
struct Offsets {
  int64_t low_scale, block_scale, block_low, codes;
};

static constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static constexpr int64_t padded_columns(Scheme scheme, int64_t k) {
  const int64_t columns = scheme == Scheme::dense ? block_columns : layout_of(scheme).gguf_columns;
  return (k + columns - 1) / columns * columns;
}

static constexpr Offsets offsets_of(const Layout& layout, int64_t blocks) {
  const int64_t row = 64, halves = aligned(blocks * 32), bytes = aligned(blocks * 16);
  const int64_t super = aligned(blocks / 8 * 32);
  switch (layout.scales) {
    case Scales::row:
      return {0, 0, 0, row};
    case Scales::row_and_block:
      return {row, 2 * row, 2 * row + bytes, 2 * row + 2 * bytes};
    case Scales::block:
      return {0, 0, 0, halves};
    case Scales::block_and_low:
      return {halves, 0, 0, 2 * halves};
    case Scales::super_block:
      return {super, 2 * super, 2 * super + bytes, 2 * super + 2 * bytes};
    case Scales::super_half_block:
      return {0, super, 0, super + halves};
  }
  return {};
}

static constexpr int64_t group_bytes(Scheme scheme, int64_t k) {
  const Layout layout = layout_of(scheme);
  const int64_t blocks = padded_columns(scheme, k) / block_columns;
  return offsets_of(layout, blocks).codes + blocks * layout.code_bytes;
}

}  // namespace acclimate::inference
