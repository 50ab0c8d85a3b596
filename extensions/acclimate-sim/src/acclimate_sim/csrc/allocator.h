// Memory of a device: host memory with an owner, a limit and statistics.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>

namespace sim {

struct Block {
  c10::DataPtr host;
  size_t bytes;
  c10::DeviceIndex device;
  AccessLog uses;  // empty unless sync=check
  Block *before = nullptr, *after = nullptr;  // in the list of all blocks
};

c10::Allocator* device_allocator();

// Turns host memory that an operator filled into memory of a device. The address stays the same.
c10::DataPtr adopt(c10::DataPtr host, size_t bytes, c10::DeviceIndex device);

// The allocation that a pointer of sim memory belongs to; null for an empty one.
Block* block_of(const c10::DataPtr& pointer) noexcept;

// The device that an address belongs to, or -1.
c10::DeviceIndex device_of(const void* address);

}  // namespace sim
