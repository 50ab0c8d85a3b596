// One optimizer step over a group of tensors: the data a kernel needs, whatever its instruction set.
#pragma once

#include <cstdint>

#include "simd/dtype.h"

namespace acclimate {

// Kernels work on blocks of this many elements; a thread gets whole blocks.
constexpr int64_t block_elements = 64;
constexpr int max_states = 2;

struct Stream {
  char* data = nullptr;
  Dtype dtype = Dtype::f32;
};

// A tensor's parameter, gradient, optimizer state, and where given a copy of the parameter to write.
struct Row {
  Stream parameter, gradient, state[max_states], output;
  int64_t elements = 0;
  bool stream_output = false;  // the output is written past the cache
  bool is_aligned = false;  // all addresses are multiples of 16
};

}  // namespace acclimate
