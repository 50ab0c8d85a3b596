// Element-wise reductions over several ranks, on the best instruction set of this machine.
#pragma once

#include <cstddef>

#include "call.h"

namespace acclimate_comm {

// Combines the sources in their order, so that all ranks get the same bits. `to` may be one of them.
// Half-precision numbers are combined in fp32 and rounded once. An average divides the sum by `divisor`,
// which is 1 if a later call adds more sources.
using Reduce = void (*)(void* to, const void* const* from, int sources, size_t elements, int divisor);

// nullptr if the dtype has no such reduction: bitwise ones of floats, MIN and MAX of complex numbers.
Reduce find_reduce(Dtype dtype, Op op);

// The instruction set in use: "avx512", "avx2" or "plain".
const char* instruction_set();

}  // namespace acclimate_comm
