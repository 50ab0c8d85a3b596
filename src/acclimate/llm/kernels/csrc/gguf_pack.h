// Packs the blocks of a GGUF file for the kernels.
#pragma once

#include "linear.h"

namespace acclimate::inference {

// Packs one group: up to 16 rows of blocks that are row_bytes apart; the others become zeros.
void pack_group(WeightFormat format, const uint8_t* blocks, int64_t row_bytes, int64_t rows, int64_t k,
                uint8_t* group);

}  // namespace acclimate::inference
