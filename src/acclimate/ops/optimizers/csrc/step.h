// One optimizer step over a group of tensors: the data for a kernel of any instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace acclimate {

enum class Dtype : int32_t { f32, bf16, f16 };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// The elements of a block; a thread gets whole blocks.
constexpr int64_t block_elements = 64;
constexpr int max_states = 2;

struct Stream {
  char* data = nullptr;
  Dtype dtype = Dtype::f32;
};

// A tensor's parameter, gradient, optimizer state, and optionally a copy of the parameter to write.
struct Row {
  Stream parameter, gradient, state[max_states], output;
  int64_t elements = 0;
  bool stream_output = false;  // the output bypasses the cache
  bool is_aligned = false;  // all addresses are multiples of 16
};

}  // namespace acclimate
