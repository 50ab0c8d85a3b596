// The kernels of every dtype and reduction. This file is compiled once for each instruction set, and offers
// its kernels through a function whose name ACCLIMATE_FIND_REDUCE says. Everything else is local to the
// compilation, or the linker could pick the wrong copy.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace acclimate_comm {
namespace {

// -- numbers in memory and in registers --------------------------------------------------------------

template <class To, class From>
inline To bits_as(From value) {
  To result;
  static_assert(sizeof result == sizeof value);
  memcpy(&result, &value, sizeof result);
  return result;
}

template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored value) { return value; }
  static Stored store(Value value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored value) { return bits_as<float>(static_cast<uint32_t>(value) << 16); }
  // To nearest, ties to even; a NaN stays one.
  static Stored store(Value value) {
    const auto bits = bits_as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<Stored>(value != value ? (bits >> 16) | 0x40 : rounded);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored value) {
    const uint32_t shifted = static_cast<uint32_t>(value & 0x7fff) << 13;
    // 2^112 corrects the exponent, of subnormal numbers too.
    const auto finite = bits_as<uint32_t>(bits_as<float>(shifted) * 0x1p112f);
    const uint32_t size = shifted >= 0x0f800000 ? shifted | 0x7f800000 : finite;
    return bits_as<float>(size | (static_cast<uint32_t>(value & 0x8000) << 16));
  }
  static Stored store(Value value) {
    const auto bits = bits_as<uint32_t>(value);
    const uint32_t size = bits & 0x7fffffff;
    const uint32_t normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    // One half has the unit in the last place of fp16's subnormal numbers, so the addition rounds to it.
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000;
    uint32_t result = size < 0x38800000 ? subnormal : normal;
    result = size >= 0x477ff000 ? 0x7c00 : result;
    result = size > 0x7f800000 ? 0x7e00 : result;
    return static_cast<Stored>(result | ((bits >> 16) & 0x8000));
  }
};

struct Bool {
  using Stored = uint8_t;
  using Value = uint8_t;
  static Value load(Stored value) { return value != 0; }
  static Stored store(Value value) { return value; }
};

template <class T>
struct Complex {
  struct Value {
    T real, imaginary;
    friend Value operator*(Value a, Value b) {
      return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
    }
  };
  using Stored = Value;
  static Value load(Stored value) { return value; }
  static Stored store(Value value) { return value; }
};

// -- reductions --------------------------------------------------------------------------------------

template <class T>
constexpr bool kIsSignedInteger = std::is_integral_v<T> && std::is_signed_v<T>;

template <class T>
using UnsignedOf =
    typename std::conditional_t<kIsSignedInteger<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

// Integers wrap around, as torch's do.
struct Sum {
  template <class T>
  static T combine(T a, T b) {
    using U = UnsignedOf<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
  template <class T>
  static T finish(T value, int) {
    return value;
  }
};

struct Average : Sum {
  template <class T>
  static T finish(T value, int divisor) {
    // Not narrowed to T, which may be too small for the number of ranks.
    return static_cast<T>(value / divisor);
  }
};

struct Product : Sum {
  template <class T>
  static T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = UnsignedOf<T>;
      // Unsigned 16-bit numbers become signed ints, whose product can overflow.
      return static_cast<T>(1u * static_cast<U>(a) * static_cast<U>(b));
    } else {
      return a * b;
    }
  }
};

// A NaN of any rank is the result, as in torch.minimum and torch.maximum.
struct Min : Sum {
  template <class T>
  static T combine(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Max : Sum {
  template <class T>
  static T combine(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};
struct And : Sum {
  template <class T>
  static T combine(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or : Sum {
  template <class T>
  static T combine(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor : Sum {
  template <class T>
  static T combine(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// -- loops -------------------------------------------------------------------------------------------

constexpr size_t kBlock = 512;

// The bytes per step of a loop, and how many bytes ahead it prefetches the sources. Widening and rounding
// take so many instructions that the hardware prefetcher fetches too few lines ahead.
constexpr size_t kStepBytes = 512, kAheadBytes = 4096;
inline void prefetch_step(const void* from) {
  for (size_t line = 0; line < kStepBytes; line += 64) {
    __builtin_prefetch(static_cast<const char*>(from) + kAheadBytes + line);
  }
}

template <class Type, class Rule>
void reduce(void* to, const void* const* from, int sources, size_t elements, int divisor) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  auto* const out = static_cast<Stored*>(to);
  const auto source = [from](int i) { return static_cast<const Stored*>(from[i]); };
  if (sources == 2) {
    const Stored* const a = source(0);
    const Stored* const b = source(1);
    const size_t step = sizeof(Stored) < sizeof(Value) ? kStepBytes / sizeof(Stored) : elements;
    for (size_t begin = 0; begin < elements; begin += step) {
      const size_t end = elements - begin < step ? elements : begin + step;
      if (step != elements) {
        prefetch_step(a + begin);
        prefetch_step(b + begin);
      }
#pragma GCC ivdep
      for (size_t i = begin; i < end; i++) {
        out[i] = Type::store(Rule::finish(Rule::combine(Type::load(a[i]), Type::load(b[i])), divisor));
      }
    }
    return;
  }
  Value block[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = elements - begin < kBlock ? elements - begin : kBlock;
    const Stored* const first = source(0) + begin;
    for (size_t i = 0; i < count; i++) block[i] = Type::load(first[i]);
    for (int s = 1; s < sources; s++) {
      const Stored* const next = source(s) + begin;
      for (size_t i = 0; i < count; i++) block[i] = Rule::combine(block[i], Type::load(next[i]));
    }
    for (size_t i = 0; i < count; i++) out[begin + i] = Type::store(Rule::finish(block[i], divisor));
  }
}

// Compilers do not vectorise the fp16 conversions in the loops above.
#if defined(__AVX512F__)
constexpr size_t kLanes = 16;
using Lanes = __m512;
inline Lanes load_half(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store_half(uint16_t* to, Lanes value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes divide(Lanes a, float b) { return _mm512_div_ps(a, _mm512_set1_ps(b)); }
#elif defined(__F16C__)
constexpr size_t kLanes = 8;
using Lanes = __m256;
inline Lanes load_half(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_half(uint16_t* to, Lanes value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes divide(Lanes a, float b) { return _mm256_div_ps(a, _mm256_set1_ps(b)); }
#endif

#if defined(__F16C__)
template <class Rule, bool kAverage>
void sum_halves(void* to, const void* const* from, int sources, size_t elements, int divisor) {
  constexpr int kMostSources = kMostRanks;
  auto* const out = static_cast<uint16_t*>(to);
  const size_t whole = elements / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    Lanes sum = load_half(static_cast<const uint16_t*>(from[0]) + i);
    for (int s = 1; s < sources; s++) sum = add(sum, load_half(static_cast<const uint16_t*>(from[s]) + i));
    store_half(out + i, kAverage ? divide(sum, static_cast<float>(divisor)) : sum);
  }
  const void* rest[kMostSources];
  for (int s = 0; s < sources; s++) rest[s] = static_cast<const uint16_t*>(from[s]) + whole;
  reduce<Float16, Rule>(out + whole, rest, sources, elements - whole, divisor);
}
#endif

// Complex numbers are summed part by part.
template <class T, class Rule>
void reduce_parts(void* to, const void* const* from, int sources, size_t elements, int divisor) {
  reduce<Plain<T>, Rule>(to, from, sources, 2 * elements, divisor);
}

// A library that only sums need not compile the other reductions, which take most of the time.
#if defined(ACCLIMATE_ONLY_SUMS)
constexpr bool kOnlySums = true;
#else
constexpr bool kOnlySums = false;
#endif

template <class Type>
Reduce arithmetic(Op op) {
  if (op == Op::kSum) return reduce<Type, Sum>;
  if constexpr (!kOnlySums) {
    if (op == Op::kAvg) return reduce<Type, Average>;
    if (op == Op::kProduct) return reduce<Type, Product>;
    if (op == Op::kMin) return reduce<Type, Min>;
    if (op == Op::kMax) return reduce<Type, Max>;
  }
  return nullptr;
}

template <class Type>
Reduce bitwise(Op op) {
  if constexpr (!kOnlySums) {
    if (op == Op::kBand) return reduce<Type, And>;
    if (op == Op::kBor) return reduce<Type, Or>;
    if (op == Op::kBxor) return reduce<Type, Xor>;
  }
  return nullptr;
}

Reduce halves(Op op) {
#if defined(__F16C__)
  if (op == Op::kSum) return sum_halves<Sum, false>;
  if (op == Op::kAvg && !kOnlySums) return sum_halves<Average, true>;
#endif
  return arithmetic<Float16>(op);
}

// The dtypes and reductions that training and inference use most.
Reduce find_float(Dtype dtype, Op op) {
  switch (dtype) {
    case Dtype::kFloat16:
      return halves(op);
    case Dtype::kBFloat16:
      return arithmetic<BFloat16>(op);
    case Dtype::kFloat32:
      return arithmetic<Plain<float>>(op);
    case Dtype::kFloat64:
      return arithmetic<Plain<double>>(op);
    default:
      return nullptr;
  }
}

#if defined(ACCLIMATE_EVERY_DTYPE)
template <class T>
Reduce integers(Op op) {
  const Reduce found = arithmetic<Plain<T>>(op);
  return found != nullptr ? found : bitwise<Plain<T>>(op);
}

// Reductions of bool, with torch's rules for sums and products.
Reduce truths(Op op) {
  switch (op) {
    case Op::kSum:
    case Op::kMax:
    case Op::kBor:
      return reduce<Bool, Or>;
    case Op::kProduct:
    case Op::kMin:
    case Op::kBand:
      return reduce<Bool, And>;
    case Op::kBxor:
      return reduce<Bool, Xor>;
    default:
      return nullptr;
  }
}

template <class T>
Reduce complexes(Op op) {
  if (op == Op::kSum) return reduce_parts<T, Sum>;
  if constexpr (!kOnlySums) {
    if (op == Op::kAvg) return reduce_parts<T, Average>;
    if (op == Op::kProduct) return reduce<Complex<T>, Product>;
  }
  return nullptr;
}

Reduce find_any(Dtype dtype, Op op) {
  switch (dtype) {
    case Dtype::kUInt8:
      return integers<uint8_t>(op);
    case Dtype::kInt8:
      return integers<int8_t>(op);
    case Dtype::kInt16:
      return integers<int16_t>(op);
    case Dtype::kInt32:
      return integers<int32_t>(op);
    case Dtype::kInt64:
      return integers<int64_t>(op);
    case Dtype::kUInt16:
      return integers<uint16_t>(op);
    case Dtype::kUInt32:
      return integers<uint32_t>(op);
    case Dtype::kUInt64:
      return integers<uint64_t>(op);
    case Dtype::kComplex64:
      return complexes<float>(op);
    case Dtype::kComplex128:
      return complexes<double>(op);
    case Dtype::kBool:
      return truths(op);
    default:
      return find_float(dtype, op);
  }
}

#endif

}  // namespace

#if defined(ACCLIMATE_EVERY_DTYPE)
Reduce ACCLIMATE_FIND_REDUCE(Dtype dtype, Op op) { return find_any(dtype, op); }
#else
Reduce ACCLIMATE_FIND_REDUCE(Dtype dtype, Op op) { return find_float(dtype, op); }
#endif

}  // namespace acclimate_comm
