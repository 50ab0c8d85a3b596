#include "linear.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../../../ops/csrc/isa.h"
#include "kernels.h"
#include "layout.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace acclimate::inference {
namespace {

void add(Kernels& chosen, const Kernels& better) {
  for (int i = 0; i < 3; ++i) {
    chosen.dense[i] = better.dense[i] != nullptr ? better.dense[i] : chosen.dense[i];
  }
  chosen.dense_bf16 = better.dense_bf16 != nullptr ? better.dense_bf16 : chosen.dense_bf16;
  chosen.blocks = better.blocks != nullptr ? better.blocks : chosen.blocks;
  chosen.quantize = better.quantize != nullptr ? better.quantize : chosen.quantize;
  chosen.values = better.values != nullptr ? better.values : chosen.values;
  chosen.widen = better.widen != nullptr ? better.widen : chosen.widen;
  chosen.int8_rows = better.int8_rows != nullptr ? better.int8_rows : chosen.int8_rows;
  if (better.multiply_repacked != nullptr) {
    chosen.repack_rows = better.repack_rows;
    chosen.multiply_repacked = better.multiply_repacked;
    chosen.repacked_value_bytes = better.repacked_value_bytes;
    chosen.prompt = better.prompt;
  }
}

// The kernels of an instruction set, and where it has none of its own those of the sets before it.
Kernels kernels_of(Isa isa) {
  Kernels chosen{};
#define ACCLIMATE_ADD(name, ...) \
  if (isa >= Isa::name) {        \
    add(chosen, name##_kernels); \
  }
  ACCLIMATE_ISAS(ACCLIMATE_ADD)
#if defined(__x86_64__)
  // "avx512" has no vectors for products of bytes of its own: it uses VNNI if there is, else AVX2's.
  if (isa >= Isa::avx512 && __builtin_cpu_supports("avx512vnni")) {
    add(chosen, avx512_vnni_kernels);
  }
#elif defined(__aarch64__)
  if (isa >= Isa::neon) {
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) {
      add(chosen, neon_dot_kernels);
    }
#elif defined(__APPLE__)
    add(chosen, neon_dot_kernels);  // all of its processors have them
#endif
  }
#endif
  return chosen;
}

// Intel's cores take longer for a vector of bf16 products than for the same products in float32: on Emerald
// Rapids 43 billion products a second, against 88 billion in float32. Only these kernels multiply in bf16, so
// other ops use best_isa().
Isa fastest_isa() {
#if defined(__x86_64__)
  if (best_isa() == Isa::avx512_bf16 && __builtin_cpu_is("intel")) {
    return Isa::avx512;
  }
#endif
  return best_isa();
}

const Kernels* find_kernels(Isa isa) {
  static const auto all = [] {
    std::array<Kernels, std::size(isas)> made{};
    std::transform(std::begin(isas), std::end(isas), made.begin(), kernels_of);
    return made;
  }();
  const Isa wanted = isa == Isa::best ? fastest_isa() : isa;
  return &all[std::find(std::begin(isas), std::end(isas), wanted) - std::begin(isas)];
}

std::atomic<const Kernels*> used_kernels{find_kernels(Isa::best)};

const Kernels& kernels() { return *used_kernels.load(std::memory_order_relaxed); }

int64_t value_bytes(Form form) { return form == Form::f32 ? 4 : form == Form::bf16 ? 2 : 1; }

void powers_of_two(const uint8_t* exponents, int64_t count, float* powers) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(exponents[i]) << 23;
    std::memcpy(powers + i, &bits, sizeof(bits));
  }
}

void widen(Dtype dtype, const void* from, int64_t count, float* to) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, from, count * sizeof(float));
  } else {
    kernels().widen(dtype, static_cast<const uint16_t*>(from), count, to);
  }
}

const void* row_of(const void* x, Dtype dtype, int64_t x_stride, int64_t row) {
  return static_cast<const uint8_t*>(x) + row * x_stride * (dtype == Dtype::f32 ? 4 : 2);
}

Input prepare_f32(Dtype dtype, const void* x, int64_t x_stride, int64_t m, int64_t k, void* memory) {
  const int64_t stride = input_stride(Form::f32, k);
  float* to = static_cast<float*>(memory);
  for (int64_t i = 0; i < m; ++i) {
    widen(dtype, row_of(x, dtype, x_stride, i), k, to + i * stride);
    std::fill(to + i * stride + k, to + (i + 1) * stride, 0.0f);
  }
  return {Form::f32, m, k, stride, memory, nullptr, nullptr, nullptr};
}

Input prepare_bf16(const void* x, int64_t x_stride, int64_t m, int64_t k, void* memory) {
  const int64_t stride = input_stride(Form::bf16, k);
  uint16_t* to = static_cast<uint16_t*>(memory);
  for (int64_t i = 0; i < m; ++i) {
    std::memcpy(to + i * stride, row_of(x, Dtype::bf16, x_stride, i), k * sizeof(uint16_t));
    std::fill(to + i * stride + k, to + (i + 1) * stride, uint16_t{0});
  }
  return {Form::bf16, m, k, stride, memory, nullptr, nullptr, nullptr};
}

// Where the parts of an input in 8 bits begin.
struct Int8Memory {
  int64_t stride, codes, scales, scaled_sums, sums, wide, end;

  Int8Memory(int64_t m, int64_t k) : stride(input_stride(Form::int8, k)) {
    const int64_t blocks = stride / block_columns;
    codes = 0;
    scales = aligned(m * stride);
    scaled_sums = scales + aligned(m * blocks * 4);
    sums = scaled_sums + aligned(m * blocks * 4);
    wide = sums + aligned(m * blocks * 8);
    end = wide + aligned(m * stride * 4);
  }
};

Input prepare_int8(Dtype dtype, const void* x, int64_t x_stride, int64_t m, int64_t k, void* memory) {
  const Int8Memory at(m, k);
  const int64_t blocks = at.stride / block_columns;
  uint8_t* base = static_cast<uint8_t*>(memory);
  int8_t* codes = reinterpret_cast<int8_t*>(base + at.codes);
  float* scales = reinterpret_cast<float*>(base + at.scales);
  float* scaled_sums = reinterpret_cast<float*>(base + at.scaled_sums);
  int32_t* sums = reinterpret_cast<int32_t*>(base + at.sums);
  float* wide = reinterpret_cast<float*>(base + at.wide);
  int32_t exact = 0;  // rows that stay in float32
  for (int64_t i = 0; i < m; ++i) {
    float* own = wide + exact * at.stride;
    widen(dtype, row_of(x, dtype, x_stride, i), k, own);
    std::fill(own + k, own + at.stride, 0.0f);
    if (!kernels().quantize(own, at.stride, codes + i * at.stride, scales + i * blocks,
                            scaled_sums + i * blocks, sums + i * 2 * blocks)) {
      scales[i * blocks] = std::numeric_limits<float>::quiet_NaN();
      sums[i * 2 * blocks] = exact++;
    }
  }
  return {Form::int8, m, k, at.stride, codes, scales, scaled_sums, sums, wide, m};
}

// Products of an input in float32 with the values of a quantised weight: slow, for infinity and NaN.
void compute_with_values(const Weight& weight, const float* x, int64_t first, int64_t last, float* y) {
  std::vector<float> values(group_rows * weight.k);
  for (int64_t row = first; row < last; row += group_rows) {
    const int64_t rows = std::min(group_rows, last - row);
    dequantize(weight, row, row + rows, values.data());
    for (int64_t r = 0; r < rows; ++r) {
      float total = 0;
      for (int64_t column = 0; column < weight.k; ++column) {
        total += values[r * weight.k + column] * x[column];
      }
      y[row - first + r] = total;
    }
  }
}

// Whole groups of a quantised weight times inputs in 8 bits, of which a few may have stayed in float32. A
// thread of a team that is late reads what the next input has overwritten: nobody uses its results, but it
// must not read elsewhere.
void compute_groups(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
                    int64_t y_stride) {
  kernels().blocks(weight, input, first, last, y, y_stride);
  const int64_t blocks = input.stride / block_columns;
  for (int64_t i = 0; blocks > 0 && i < input.m; ++i) {
    const int64_t number = input.sums[i * 2 * blocks];
    if (std::isnan(input.scales[i * blocks]) && number >= 0 && number < input.exact_rows) {
      compute_with_values(weight, input.exact + number * input.stride, first, last, y + i * y_stride);
    }
  }
}

// The same for rows that may begin within a group, which is then computed whole.
void compute_blocks(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
                    int64_t y_stride) {
  const int64_t before = first % group_rows, end = std::min(first - before + group_rows, last);
  if (before == 0) {
    return compute_groups(weight, input, first, last, y, y_stride);
  }
  for (int64_t i = 0; i < input.m; i += max_rows) {
    const Input some = input.rows(i, std::min(max_rows, input.m - i));
    float group[max_rows * group_rows];
    compute_groups(weight, some, first - before, end, group, group_rows);
    for (int64_t j = 0; j < some.m; ++j) {
      const float* own = group + j * group_rows;
      std::copy(own + before, own + end - first + before, y + (i + j) * y_stride);
    }
  }
  if (end < last) {
    compute_groups(weight, input, end, last, y + end - first, y_stride);
  }
}

}  // namespace

Form form_of(const Weight& weight, Dtype input) {
  if (weight.format != WeightFormat::dense) {
    return Form::int8;
  }
  const bool has_bf16 = kernels().dense_bf16 != nullptr;
  return has_bf16 && weight.dtype == Dtype::bf16 && input == Dtype::bf16 ? Form::bf16 : Form::f32;
}

// Rows are padded to whole vectors of each kernel, and to whole super-blocks. Rows of floating-point numbers
// are an odd number of cache lines apart: with a power of two all of them would map to a few lines of the L1
// cache.
int64_t input_stride(Form form, int64_t k) {
  const int64_t multiple = form == Form::int8 ? 256 : 32;
  const int64_t whole = (k + multiple - 1) / multiple * multiple;
  if (form == Form::int8) {
    return whole;
  }
  const int64_t line = 64 / value_bytes(form);
  return whole / line % 2 == 0 ? whole + line : whole;
}

size_t input_bytes(Form form, int64_t m, int64_t k) {
  const int64_t own = m * input_stride(form, k) * value_bytes(form);
  return static_cast<size_t>(form == Form::int8 ? Int8Memory(m, k).end : own);
}

Input prepare(Form form, Dtype dtype, const void* x, int64_t x_stride, int64_t m, int64_t k, void* memory) {
  switch (form) {
    case Form::bf16:
      return prepare_bf16(x, x_stride, m, k, memory);
    case Form::int8:
      return prepare_int8(dtype, x, x_stride, m, k, memory);
    case Form::f32:
      break;
  }
  return prepare_f32(dtype, x, x_stride, m, k, memory);
}

std::pair<int64_t, int64_t> rows_of(const Weight& weight, int64_t thread, int64_t threads) {
  const int64_t groups = (weight.n + group_rows - 1) / group_rows;
  const auto begin = [&](int64_t t) { return std::min(groups * t / threads * group_rows, weight.n); };
  return {begin(thread), begin(thread + 1)};
}

void compute(const Weight& weight, const Input& input, int64_t first, int64_t last, float* y,
             int64_t y_stride) {
  if (weight.format == WeightFormat::dense) {
    const Product product =
        input.form == Form::bf16 ? kernels().dense_bf16 : kernels().dense[static_cast<int>(weight.dtype)];
    product(weight, input, first, last, y, y_stride);
  } else {
    compute_blocks(weight, input, first, last, y, y_stride);
  }
}

void compute(const Int8Rows& rows, const Input& input, float* y, int64_t y_stride) {
  if (rows.exponents == nullptr) {
    return kernels().int8_rows(rows, nullptr, input, y, y_stride);
  }
  constexpr int64_t together = 64;  // rows whose powers of two stay in the first cache
  const int64_t blocks = int8_blocks(rows.k);
  std::vector<float> powers(together * blocks);
  for (int64_t row = 0; row < rows.n; row += together) {
    const int64_t some = std::min(together, rows.n - row);
    powers_of_two(rows.exponents + row * blocks, some * blocks, powers.data());
    const Int8Rows own{some, rows.k, rows.codes + row * rows.stride, rows.stride, nullptr};
    kernels().int8_rows(own, powers.data(), input, y + row, y_stride);
  }
}

bool multiplies_many() { return kernels().multiply_repacked != nullptr; }

int64_t whole_blocks(int64_t columns) {
  return (columns + block_columns - 1) / block_columns * block_columns;
}

int64_t repacked_bytes(int64_t rows, int64_t k) {
  const int64_t whole_groups = (rows + group_rows - 1) / group_rows * group_rows;
  return whole_groups * whole_blocks(k) * kernels().repacked_value_bytes;
}

void repack(const Weight& weight, int64_t first, int64_t last, void* to) {
  kernels().repack_rows(weight, first, last, to);
}

void multiply_many(const void* repacked, int64_t rows, int64_t k, const uint16_t* x, int64_t x_stride,
                   int64_t m, Finish finish, float* y, int64_t y_stride) {
  kernels().multiply_repacked(repacked, (rows + group_rows - 1) / group_rows, k, x, x_stride, m, finish, y,
                              y_stride);
}

const PromptKernels& prompt_kernels() { return kernels().prompt; }

void dequantize(const Weight& weight, int64_t first, int64_t last, float* values) {
  if (weight.format == WeightFormat::dense) {
    for (int64_t row = first; row < last; ++row) {
      widen(weight.dtype, weight.data + row * weight.stride, weight.k, values + (row - first) * weight.k);
    }
    return;
  }
  std::vector<float> group;
  for (int64_t row = first; row < last;) {
    const int64_t lane = row % group_rows;
    const int64_t rows = std::min(group_rows - lane, last - row);
    const uint8_t* data = weight.data + row / group_rows * weight.stride;
    float* to = values + (row - first) * weight.k;
    if (lane == 0) {
      kernels().values(weight.format, data, weight.k, rows, to);
    } else {
      group.resize(group_rows * weight.k);
      kernels().values(weight.format, data, weight.k, lane + rows, group.data());
      std::memcpy(to, group.data() + lane * weight.k, rows * weight.k * sizeof(float));
    }
    row += rows;
  }
}

void use_isa(int64_t number) {
  const auto isa = static_cast<Isa>(number);
  if (runs_here(isa)) {
    used_kernels.store(find_kernels(isa), std::memory_order_relaxed);
  }
}

}  // namespace acclimate::inference
