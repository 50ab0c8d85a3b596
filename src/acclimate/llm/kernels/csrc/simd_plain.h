// Vectors in plain C++. A "vector" has 16 lanes for the 16 rows of a group.
#include <cstdint>
#include <cstring>

namespace acclimate::inference::ACCLIMATE_ISA {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0);
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {  // zero or denormal
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline float bf16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

constexpr int most_inputs = 1;  // inputs whose sums fit into the registers
constexpr int most_block_inputs = most_inputs;
constexpr int many_groups = 1, many_inputs = most_block_inputs;

struct Floats {
  float x[16];
};
struct Ints {
  int32_t x[16];
};
struct Bytes {
  uint8_t x[64];
};

#define LANES(expression)        \
  for (int i = 0; i < 16; ++i) { \
    r.x[i] = (expression);       \
  }                              \
  return r

inline Floats zero() { return {}; }
inline Floats add(Floats a, Floats b) {
  Floats r;
  LANES(a.x[i] + b.x[i]);
}
inline Floats mul(Floats a, Floats b) {
  Floats r;
  LANES(a.x[i] * b.x[i]);
}
inline Floats mul(Floats a, float b) {
  Floats r;
  LANES(a.x[i] * b);
}
inline Floats mul_add(Floats a, Floats b, Floats c) {
  Floats r;
  LANES(a.x[i] * b.x[i] + c.x[i]);
}
inline Floats mul_add(Floats a, float b, Floats c) {
  Floats r;
  LANES(a.x[i] * b + c.x[i]);
}
inline Floats sub_mul(Floats a, float b, Floats c) {
  Floats r;
  LANES(c.x[i] - a.x[i] * b);
}
inline Floats load_f32(const void* from) {
  Floats r;
  std::memcpy(r.x, from, 64);
  return r;
}
inline Floats load_f16(const void* from) {
  uint16_t halves[16];
  std::memcpy(halves, from, 32);
  Floats r;
  LANES(half_to_float(halves[i]));
}
inline Floats load_bf16(const void* from) {
  uint16_t halves[16];
  std::memcpy(halves, from, 32);
  Floats r;
  LANES(bf16_to_float(halves[i]));
}
inline Floats load_u8(const void* from) {
  Floats r;
  LANES(static_cast<const uint8_t*>(from)[i]);
}
inline Floats load_i8(const void* from) {
  Floats r;
  LANES(static_cast<const int8_t*>(from)[i]);
}
inline Floats to_floats(Ints a) {
  Floats r;
  LANES(static_cast<float>(a.x[i]));
}
inline void store(float* to, Floats a) { std::memcpy(to, a.x, 64); }
inline float sum(Floats a) {
  float total = 0;
  for (float value : a.x) {
    total += value;
  }
  return total;
}
inline Ints set(int32_t a) {
  Ints r;
  LANES(a);
}

inline Bytes load_bytes(const uint8_t* from) {
  Bytes r;
  std::memcpy(r.x, from, 64);
  return r;
}
#undef LANES
#define LANES(expression)        \
  for (int i = 0; i < 64; ++i) { \
    r.x[i] = (expression);       \
  }                              \
  return r
inline Bytes low_bits(Bytes a) {
  Bytes r;
  LANES(a.x[i] & 15);
}
inline Bytes high_bits(Bytes a) {
  Bytes r;
  LANES(a.x[i] >> 4);
}
// The numbers of a table of 16 that codes of 4 bits stand for.
inline Bytes look_up(const uint8_t* table, Bytes codes) {
  Bytes r;
  for (int i = 0; i < 64; ++i) {
    r.x[i] = table[codes.x[i]];
  }
  return r;
}
// 2^(x - 128) of 16 bytes x; 0 for 0 and 1, for which it is denormal.
inline Floats load_exponents(const void* from) {
  Floats r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t exponent = static_cast<const uint8_t*>(from)[i];
    const uint32_t bits = exponent == 0 ? 0 : (exponent - 1) << 23;
    std::memcpy(&r.x[i], &bits, sizeof(bits));
  }
  return r;
}
// Adds bit `from` of each byte as bit 4.
template <int from>
inline Bytes with_bit(Bytes a, Bytes bits) {
  Bytes r;
  LANES(a.x[i] | (bits.x[i] >> from & 1) << 4);
}
// Adds bits `from` and `from + 1` of each byte as bits 4 and 5.
template <int from>
inline Bytes with_bits(Bytes a, Bytes bits) {
  Bytes r;
  LANES(a.x[i] | (bits.x[i] >> from & 3) << 4);
}
#undef LANES

// Whether dot() takes 8-bit codes as they are, so that their offset has to be subtracted.
constexpr bool wide_codes_have_offset = true;

// Adds to each row the product of its four codes and four inputs.
template <int bits>
inline Ints dot(Ints sums, Bytes codes, const int8_t* x) {
  for (int row = 0; row < 16; ++row) {
    for (int i = 0; i < 4; ++i) {
      sums.x[row] += codes.x[4 * row + i] * x[i];
    }
  }
  return sums;
}

inline void prefetch(const void*) {}

constexpr int64_t bytes_ahead = 0;  // the next rows
inline void prefetch_ahead(const void* at) { prefetch(at); }

}  // namespace acclimate::inference::ACCLIMATE_ISA
