// Where the fields and codes of a group are; acclimate.llm.kernels.formats describes their order.
//
// Functions are static: files are compiled for several instruction sets, and the linker would keep one copy.
#pragma once

#include <array>
#include <optional>

#include "linear.h"

namespace acclimate::inference {

constexpr int64_t block_columns = 32;

// The lists of fields in formats.def.
enum class Scales {
#define SCALES(name, ...) name,
#include "formats.def"
};

// The codebooks in formats.def.
enum class Codebook {
  none,
#define CODEBOOK(name, ...) name,
#include "formats.def"
};

// The numbers that codes of 4 bits stand for.
static constexpr std::array<uint8_t, 16> numbers_of(Codebook codebook) {
  switch (codebook) {
#define CODEBOOK(name, ...) \
  case Codebook::name:      \
    return {__VA_ARGS__};
#include "formats.def"
    case Codebook::none:
      break;
  }
  return {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// The bits of the numbers that codes stand for: some products of bytes need fewer than 8, or all 8.
static constexpr int number_bits(int bits, Codebook codebook) {
  int most = 0;
  for (const uint8_t number : numbers_of(codebook)) {
    most = number > most ? number : most;
  }
  return most > 63 ? 8 : bits;
}

// The columns of an indivisible block: those of the widest field.
static constexpr int columns_of(Scales scales) {
  int most = block_columns;
  switch (scales) {
#define FIELD(name, type, columns) most = columns > most ? columns : most;
#define SCALES(name, fields) \
  case Scales::name:         \
    fields break;
#include "formats.def"
  }
  return most;
}

// The columns of formats.def, and what follows from them.
struct Layout {
  int bits, offset;
  Scales scales;
  int gguf_bytes = 0;  // of a block in a file; 0: files have no such blocks
  int gguf_halves = 0;
  Codebook codebook = Codebook::none;
  int code_bytes = bits * group_rows * block_columns / 8;  // of a block in a group
  int columns = columns_of(scales);  // of an indivisible block
};

static constexpr Layout layout_of(WeightFormat format) {
  switch (format) {
#define WEIGHT_FORMAT(name, ...) \
  case WeightFormat::name:       \
    return {__VA_ARGS__};
#include "formats.def"
    case WeightFormat::dense:
      break;
  }
  return {};
}

// The format with a number of a caller's; none: there is none.
static constexpr std::optional<WeightFormat> find_format(int64_t number) {
  switch (number) {
#define WEIGHT_FORMAT(name, ...)                 \
  case static_cast<int64_t>(WeightFormat::name): \
    return WeightFormat::name;
#include "formats.def"
    case static_cast<int64_t>(WeightFormat::dense):
      return WeightFormat::dense;
  }
  return std::nullopt;
}

// Calls function.operator()<format>() for a format of blocks that is known when the program runs, and does
// nothing for dense weights.
template <class Function>
static void with_format(WeightFormat format, Function function) {
  switch (format) {
#define WEIGHT_FORMAT(name, ...) \
  case WeightFormat::name:       \
    return function.template operator()<WeightFormat::name>();
#include "formats.def"
    case WeightFormat::dense:
      break;
  }
}

// Where each field of a group begins, and its codes, in bytes from the group's start.
struct Offsets {
  int64_t scale, low, zero, exponent, low_scale, block_scale, block_low, codes;
};

static constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static constexpr int64_t padded_columns(WeightFormat format, int64_t k) {
  const int64_t columns = layout_of(format).columns;
  return (k + columns - 1) / columns * columns;
}

static constexpr Offsets offsets_of(const Layout& layout, int64_t blocks) {
  constexpr int64_t f32 = 4, f16 = 2, u8 = 1, i8 = 1;  // bytes
  // Of a row: one value for so many columns, or for the whole row.
  const auto values = [blocks](int64_t columns) {
    return columns == 0 ? 1 : blocks * block_columns / columns;
  };
  Offsets at{};
  switch (layout.scales) {
#define FIELD(name, type, columns) \
  at.name = at.codes;              \
  at.codes += aligned(values(columns) * group_rows * type);
#define SCALES(name, fields) \
  case Scales::name:         \
    fields break;
#include "formats.def"
  }
  return at;
}

static constexpr int64_t group_bytes(WeightFormat format, int64_t k) {
  const Layout layout = layout_of(format);
  const int64_t blocks = padded_columns(format, k) / block_columns;
  return offsets_of(layout, blocks).codes + blocks * layout.code_bytes;
}

}  // namespace acclimate::inference
