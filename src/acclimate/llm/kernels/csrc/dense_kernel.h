// Dense weights times inputs, for the vectors of one instruction set; included after simd_*.h.
#include <type_traits>

#include "kernels.h"

namespace acclimate::inference::ACCLIMATE_ISA {

struct F32Weight {
  using Value = float;
  static Floats load(const float* from) { return load_f32(from); }
};
struct Bf16Weight {
  using Value = uint16_t;
  static Floats load(const uint16_t* from) { return load_bf16(from); }
};
struct F16Weight {
  using Value = uint16_t;
  static Floats load(const uint16_t* from) { return load_f16(from); }
};

// How a step multiplies 16 weights in float32.
template <class WeightType>
struct FloatStep {
  static constexpr int64_t values = 16;
  using Value = typename WeightType::Value;
  using InputValue = float;
  using Vector = Floats;
  using Sums = Floats;
  static Sums none() { return zero(); }
  static Vector weights(const Value* from) { return WeightType::load(from); }
  static Vector inputs(const float* from) { return load_f32(from); }
  static Sums multiply(Vector weights, Vector inputs, Sums sums) { return mul_add(weights, inputs, sums); }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same for 8 weights, in half the registers: sums of more rows and inputs stay in them.
template <Dtype dtype>
struct HalfStep {
  static constexpr int64_t values = 8;
  using Value = std::conditional_t<dtype == Dtype::f32, float, uint16_t>;
  using InputValue = float;
  using Vector = __m256;
  using Sums = __m256;
  static Sums none() { return _mm256_setzero_ps(); }
  static Vector weights(const Value* from) {
    if constexpr (dtype == Dtype::f32) {
      return _mm256_loadu_ps(from);
    } else {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return dtype == Dtype::f16 ? _mm256_cvtph_ps(halves) : bf16_to_floats(halves);
    }
  }
  static Vector inputs(const float* from) { return _mm256_loadu_ps(from); }
  static Sums multiply(Vector weights, Vector inputs, Sums sums) {
    return _mm256_fmadd_ps(weights, inputs, sums);
  }
};
#endif

#if defined(__AVX512BF16__)
// 32 products of bf16; sums of two round to nearest, and denormals count as zero.
struct Bf16Step {
  static constexpr int64_t values = 32;
  using Value = uint16_t;
  using InputValue = uint16_t;
  using Vector = __m512i;
  using Sums = Floats;
  static Sums none() { return zero(); }
  static Vector weights(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static Vector inputs(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static Floats multiply(Vector weights, Vector inputs, Floats sums) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(inputs));
  }
};
#endif

// Several weight rows times several inputs, whose sums stay in registers.
template <class Step, int rows, int inputs>
inline void multiply_tile(const uint8_t* weight, int64_t weight_stride, int64_t k, const Input& input,
                          int64_t first_input, const uint8_t* next, float* y, int64_t y_stride) {
  using Value = typename Step::Value;
  using InputValue = typename Step::InputValue;
  const InputValue* x = static_cast<const InputValue*>(input.values) + first_input * input.stride;
  typename Step::Sums sums[rows][inputs];
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < inputs; ++i) {
      sums[row][i] = Step::none();
    }
  }
  int64_t column = 0;
  for (; column + Step::values <= k; column += Step::values) {
    typename Step::Vector weights[rows];
    for (int row = 0; row < rows; ++row) {
      const uint8_t* from = weight + row * weight_stride + column * static_cast<int64_t>(sizeof(Value));
      weights[row] = Step::weights(reinterpret_cast<const Value*>(from));
      // Prefetches the next rows, in the order of their addresses.
      prefetch_ahead(next + (column * rows + row * Step::values) * static_cast<int64_t>(sizeof(Value)));
    }
    for (int i = 0; i < inputs; ++i) {
      const typename Step::Vector value = Step::inputs(x + i * input.stride + column);
      for (int row = 0; row < rows; ++row) {
        sums[row][i] = Step::multiply(weights[row], value, sums[row][i]);
      }
    }
  }
  if (column < k) {
    for (int row = 0; row < rows; ++row) {
      // The memory after the row must not be read.
      Value rest[Step::values] = {};
      const uint8_t* from = weight + row * weight_stride + column * static_cast<int64_t>(sizeof(Value));
      __builtin_memcpy(rest, from, (k - column) * sizeof(Value));
      const typename Step::Vector weights = Step::weights(rest);
      for (int i = 0; i < inputs; ++i) {
        sums[row][i] = Step::multiply(weights, Step::inputs(x + i * input.stride + column), sums[row][i]);
      }
    }
  }
  constexpr int products = rows * inputs;
  float found[products];
  int done = 0;
  if constexpr (most_inputs == 8) {  // of AVX-512
    for (; done + 8 <= products; done += 8) {
      sum_8(&sums[0][0] + done, found + done);
    }
  }
  for (; done < products; ++done) {
    found[done] = sum((&sums[0][0])[done]);
  }
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < inputs; ++i) {
      y[(first_input + i) * y_stride + row] = found[row * inputs + i];
    }
  }
}

// One weight row times one input: the same additions as in a tile, so that an input's products do not depend
// on the others. The weight is read in the order of its addresses, which the processor's prefetcher follows.
template <class Step>
inline float multiply_row(const uint8_t* weight, int64_t k, const Input& input) {
  using Value = typename Step::Value;
  const auto* row = reinterpret_cast<const Value*>(weight);
  const auto* x = static_cast<const typename Step::InputValue*>(input.values);
  typename Step::Sums sums = Step::none();
  int64_t column = 0;
  for (; column + Step::values <= k; column += Step::values) {
    sums = Step::multiply(Step::weights(row + column), Step::inputs(x + column), sums);
  }
  if (column < k) {
    Value rest[Step::values] = {};  // memory after the row must not be read
    __builtin_memcpy(rest, row + column, (k - column) * sizeof(Value));
    sums = Step::multiply(Step::weights(rest), Step::inputs(x + column), sums);
  }
  return sum(sums);
}

// Rows from `row` on in tiles of `rows` rows and up to `most` inputs, whose sums stay in registers, and whose
// weights are prefetched so many bytes ahead. Returns the first row that is left.
template <class Step, int rows, int most, int64_t prefetched = bytes_ahead>
inline int64_t multiply_rows(const Weight& weight, const Input& input, int64_t row, int64_t last, float* y,
                             int64_t y_stride) {
  const auto at = [&](int64_t number) { return weight.data + number * weight.stride; };
  const int64_t far = weight.stride > 0 ? prefetched / weight.stride : 0;
  const int64_t ahead = far > rows ? far : rows;
  for (; row + rows <= last; row += rows, y += rows) {
    // Also beyond `last`: the next rows are often this thread's as well.
    const uint8_t* next = at(row + ahead + rows <= weight.n ? row + ahead : row);
    for_each_tile<most>(input.m, [&]<int inputs>(int64_t i) {
      multiply_tile<Step, rows, inputs>(at(row), weight.stride, weight.k, input, i, next, y, y_stride);
      next = at(row);
    });
  }
  return row;
}

template <class Step>
void multiply_dense(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
                    int64_t y_stride) {
  int64_t row = first;
  if (input.m == 1) {
    if constexpr (most_inputs == 8) {
      // One row's sum waits for the addition before, and a long input does not stay in the first cache: rows
      // of 16 KB are read at 53 GB/s eight at a time and at 40 one by one, on Zen 4 with memory of 55 GB/s.
      // In a step of Qwen3-0.6B, rows of 4 and 6 KB were 5% slower, as nothing fetches a product's first rows.
      constexpr int64_t long_row = 8192;
      if (weight.stride >= long_row) {
        row = multiply_rows<Step, 8, 1, 128 << 10>(weight, input, row, last, y, y_stride);
      }
    }
    for (; row < last; ++row) {
      y[row - first] = multiply_row<Step>(weight.data + row * weight.stride, weight.k, input);
    }
    return;
  }
  if constexpr (Step::values == 8) {
    row = multiply_rows<Step, 3, 4>(weight, input, row, last, y, y_stride);
  } else if constexpr (most_inputs == 8) {
    // As many sums as there are registers. An input that is not in the first cache takes as long to read as
    // two products, so that four rows are faster than two.
    switch (input.m) {
      case 2:
      case 3:
      case 4:
        row = multiply_rows<Step, 6, 4>(weight, input, row, last, y, y_stride);
        row = multiply_rows<Step, 4, 4>(weight, input, row, last, y + row - first, y_stride);
        break;
      case 5:
        row = multiply_rows<Step, 4, 5>(weight, input, row, last, y, y_stride);
        break;
      case 6:
        row = multiply_rows<Step, 4, 6>(weight, input, row, last, y, y_stride);
        break;
      case 7:
        row = multiply_rows<Step, 4, 7>(weight, input, row, last, y, y_stride);
        break;
      default:
        row = multiply_rows<Step, 4, 8>(weight, input, row, last, y, y_stride);
    }
  } else {
    row = multiply_rows<Step, most_inputs, most_inputs>(weight, input, row, last, y, y_stride);
  }
  multiply_rows<Step, 1, most_inputs>(weight, input, row, last, y + row - first, y_stride);
}

}  // namespace acclimate::inference::ACCLIMATE_ISA
