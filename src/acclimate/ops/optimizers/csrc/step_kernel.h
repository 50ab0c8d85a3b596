// The loop of every optimizer, compiled once per instruction set; included between simd_<set>.h and
// simd_end.h. A Rule (adam_rule.h) updates one vector of parameters and state.
//
// The loop is limited by memory bandwidth: each stream is read once and written once, and conversions happen
// in registers.

constexpr int64_t vectors_per_unit = 4;
constexpr int64_t unit_elements = vectors_per_unit * V::lanes;
static_assert(block_elements % unit_elements == 0, "a block is a whole number of units");

ACCLIMATE_INLINE void load_unit(const Stream& from, int64_t i, V* to) {
  const float* const wide = reinterpret_cast<const float*>(from.data) + i;
  const uint16_t* const narrow = reinterpret_cast<const uint16_t*>(from.data) + i;
  if (from.dtype == Dtype::f32) {
    for (int64_t k = 0; k < vectors_per_unit; ++k) {
      to[k] = load_f32(wide + k * V::lanes);
    }
  } else if (from.dtype == Dtype::bf16) {
    for (int64_t k = 0; k < vectors_per_unit; ++k) {
      to[k] = load_bf16(narrow + k * V::lanes);
    }
  } else {
    for (int64_t k = 0; k < vectors_per_unit; ++k) {
      to[k] = load_f16(narrow + k * V::lanes);
    }
  }
}

ACCLIMATE_INLINE void store_unit(const Stream& to, int64_t i, const V* from) {
  float* const wide = reinterpret_cast<float*>(to.data) + i;
  uint16_t* const narrow = reinterpret_cast<uint16_t*>(to.data) + i;
  if (to.dtype == Dtype::f32) {
    for (int64_t k = 0; k < vectors_per_unit; ++k) {
      store_f32(wide + k * V::lanes, from[k]);
    }
  } else if (to.dtype == Dtype::bf16) {
    for (int64_t k = 0; k < vectors_per_unit; ++k) {
      store_bf16(narrow + k * V::lanes, from[k]);
    }
  } else {
    for (int64_t k = 0; k < vectors_per_unit; ++k) {
      store_f16(narrow + k * V::lanes, from[k]);
    }
  }
}

ACCLIMATE_INLINE void stream_unit(const Stream& to, int64_t i, const V* from) {
  uint16_t* const out = reinterpret_cast<uint16_t*>(to.data) + i;
  for (int64_t k = 0; k < vectors_per_unit; k += 2) {
    if (to.dtype == Dtype::bf16) {
      stream_bf16(out + k * V::lanes, from[k], from[k + 1]);
    } else {
      stream_f16(out + k * V::lanes, from[k], from[k + 1]);
    }
  }
}

// One block ahead: on Zen, farther was up to a fifth slower, since the hardware prefetches as well.
constexpr int64_t prefetch_bytes = 256;

ACCLIMATE_INLINE void prefetch(const Stream& from, int64_t i) {
  const int64_t size = size_of(from.dtype);
  const char* const ahead = from.data + i * size + prefetch_bytes;
  for (int64_t offset = 0; offset < block_elements * size; offset += 64) {
    __builtin_prefetch(ahead + offset, 0, 3);
  }
}

template <class Rule>
ACCLIMATE_INLINE void step_block(const Row& row, const typename Rule::Vectors& rule, int64_t begin) {
  for (int64_t i = begin; i < begin + block_elements; i += unit_elements) {
    V parameter[vectors_per_unit], gradient[vectors_per_unit], state[max_states][vectors_per_unit];
    load_unit(row.parameter, i, parameter);
    load_unit(row.gradient, i, gradient);
    for (int s = 0; s < Rule::states; ++s) {
      load_unit(row.state[s], i, state[s]);
    }
    for (int64_t k = 0; k < vectors_per_unit; ++k) {
      Rule::step(rule, parameter[k], gradient[k], state[0][k], state[1][k]);
    }
    store_unit(row.parameter, i, parameter);
    for (int s = 0; s < Rule::states; ++s) {
      store_unit(row.state[s], i, state[s]);
    }
    if (row.stream_output) {
      stream_unit(row.output, i, parameter);
    } else if (row.output.data != nullptr) {
      store_unit(row.output, i, parameter);
    }
  }
}

// The last elements of a tensor are copied to a full block, so that they are computed like all others.
template <class Rule>
ACCLIMATE_KERNEL void step_tail(const Row& row, const typename Rule::Vectors& rule, int64_t begin) {
  alignas(64) char buffers[3 + max_states][block_elements * 4] = {};
  Row tail = row;
  tail.stream_output = false;
  Stream* const streams[] = {&tail.parameter, &tail.gradient, &tail.output, &tail.state[0], &tail.state[1]};
  const int64_t count = row.elements - begin;
  for (int s = 0; s < 3 + Rule::states; ++s) {
    Stream& stream = *streams[s];
    if (stream.data != nullptr) {
      const int64_t size = size_of(stream.dtype);
      std::memcpy(buffers[s], stream.data + begin * size, count * size);
      stream.data = buffers[s];
    }
  }
  step_block<Rule>(tail, rule, 0);
  const Stream* const written[] = {&row.parameter, nullptr, &row.output, &row.state[0], &row.state[1]};
  for (int s = 0; s < 3 + Rule::states; ++s) {
    if (written[s] != nullptr && written[s]->data != nullptr) {
      const int64_t size = size_of(written[s]->dtype);
      std::memcpy(written[s]->data + begin * size, buffers[s], count * size);
    }
  }
}

// Updates the elements [begin, end) of a tensor; begin is a multiple of block_elements.
template <class Rule>
ACCLIMATE_KERNEL void step_range(const Row& row, const typename Rule::Coefficients& coefficients,
                                 int64_t begin, int64_t end) {
  const typename Rule::Vectors rule = Rule::broadcast_all(coefficients);
  int64_t i = begin;
  for (; i + block_elements <= end; i += block_elements) {
    prefetch(row.parameter, i);
    prefetch(row.gradient, i);
    for (int s = 0; s < Rule::states; ++s) {
      prefetch(row.state[s], i);
    }
    step_block<Rule>(row, rule, i);
  }
  if (i < end) {
    step_tail<Rule>(row, rule, i);
  }
  if (row.stream_output) {
    fence();
  }
}
