// Element-wise reductions over several ranks, in the machine's best instruction set unless another is chosen.
#pragma once

#include <cstddef>
#include <cstdint>

#include "call.h"

namespace acclimate_comm {

// Combines the sources in their order, so that all ranks get the same bits. `to` may be one of them.
// Half-precision numbers are combined in fp32 and rounded once. An average divides the sum by `divisor`,
// which is 1 if a later call adds more sources.
using Reduce = void (*)(void* to, const void* const* from, int sources, size_t elements, int divisor);

// nullptr if the dtype has no such reduction: bitwise ones of floats, MIN and MAX of complex numbers.
Reduce find_reduce(Dtype dtype, Op op);

// Chooses the instruction set of later calls, numbered as in ops/csrc/isa.h; false if this machine lacks it.
bool use_isa(int64_t number);

}  // namespace acclimate_comm
