// Sums, products and the like over the same element of several ranks, on the best instruction set here.
#pragma once

#include <cstddef>

#include "call.h"

namespace acclimate_comm {

// Combines the sources in their order, so that all ranks get the same bits. `to` may be one of them.
// Half-precision numbers are combined in fp32 and rounded once. An average divides the sum by `divisor`,
// which is 1 where more sources follow.
using Reduce = void (*)(void* to, const void* const* from, int sources, size_t elements, int divisor);

// nullptr where the reduction does not exist for the dtype: the bits of floats, the order of complex numbers.
Reduce find_reduce(Dtype dtype, Op op);

// What this machine runs: "avx512", "avx2" or "plain".
const char* instruction_set();

}  // namespace acclimate_comm
