// Pinned host memory: ordinary host memory that is registered as pinned.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// Memory that torch did not allocate is pinned between these two calls, as with cudaHostRegister.
void register_pinned(uintptr_t address, size_t bytes);
void unregister_pinned(uintptr_t address);

}  // namespace sim
