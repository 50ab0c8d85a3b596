// Packs the blocks of a GGUF file, and codes in 32-bit words, for the kernels.
#pragma once

#include "linear.h"

namespace acclimate::inference {

// Packs one group: up to 16 rows of blocks that are row_bytes apart; the others become zeros.
void pack_group(WeightFormat format, const uint8_t* blocks, int64_t row_bytes, int64_t rows, int64_t k,
                uint8_t* group);

// How 32-bit words hold codes; acclimate.llm.kernels.words has the same numbers.
enum class WordOrder : int32_t {
  by_row,  // [rows][words] of successive columns
  by_word,  // [words][rows] of successive columns
  awq,  // [columns][words] of successive rows, in AWQ's order
};

struct Words {
  const uint32_t* from;
  int64_t rows;  // of the matrix
  int64_t words;  // of a row, of all columns, or of a column
  int bits;
  WordOrder order;
  int64_t skip;  // codes of the first word
  uint8_t flip;  // bits that are inverted
};

// Packs the codes of the group of rows that begins with a row; the group's fields are not written.
void pack_words(WeightFormat format, const Words& words, int64_t first_row, int64_t rows, int64_t k,
                uint8_t* group);

}  // namespace acclimate::inference
