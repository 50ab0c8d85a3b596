// Pinned host memory: ordinary host memory that is known to be pinned.
#pragma once

#include <c10/core/Allocator.h>

namespace sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace sim
