// Exits with 0 if compute() agrees with dequantize(), in double, for every format and 1 to 16 inputs, if some
// rows have the bits that they have among all, and if it reads nothing else when its inputs are overwritten,
// as those of a late thread are. Prints a digest of
// the values and the largest error relative to its bound.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "gguf_pack.h"
#include "layout.h"
#include "linear.h"

using namespace acclimate::inference;

namespace {

uint32_t state = 1;
uint32_t next_random() { return state = state * 1664525 + 1013904223; }
float uniform() { return static_cast<float>(next_random() >> 8) / 0x1p24f; }

uint64_t digest = 1469598103934665603u;
void note(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  digest = (digest ^ bits) * 1099511628211u;
}

// A block with usual scales: its float16 numbers are between 2^-7 and 2^-6, or it is 2^-8.
void fill(const Layout& layout, std::vector<uint8_t>& blocks) {
  for (uint8_t& byte : blocks) {
    byte = static_cast<uint8_t>(next_random() >> 24);
  }
  const bool has_low = layout.scales == Scales::block_and_low || layout.scales == Scales::super_block;
  for (size_t at = 0; at < blocks.size(); at += layout.gguf_bytes) {
    if (layout.scales == Scales::exponent) {
      blocks[at] = 0x78;
      continue;
    }
    blocks[at + layout.gguf_halves + 1] = 0x20;
    if (has_low) {
      blocks[at + layout.gguf_halves + 3] = 0x20;
    }
  }
}

struct Kind {
  WeightFormat format;
  Dtype dtype;
};

const Kind kinds[] = {
    {WeightFormat::dense, Dtype::f32},
    {WeightFormat::dense, Dtype::bf16},
    {WeightFormat::dense, Dtype::f16},
#define WEIGHT_FORMAT(name, ...) {WeightFormat::name, Dtype::f32},
#include "formats.def"
};

}  // namespace

int main() {
  constexpr int64_t n = 37, k = 512;
  double worst = 0;
  for (const auto [format, dtype] : kinds) {
    const Layout layout = layout_of(format);
    std::vector<uint8_t> data;
    int64_t stride;
    if (format != WeightFormat::dense && layout.gguf_bytes == 0) {
      continue;  // packed in Python
    }
    if (format == WeightFormat::dense) {
      stride = k * (dtype == Dtype::f32 ? 4 : 2);
      data.resize(n * stride);
      for (int64_t i = 0; i < n * k; ++i) {
        const float value = uniform() - 0.5f;
        const uint16_t half = static_cast<uint16_t>(0x3000 | (next_random() >> 16 & 0x8fff));
        if (dtype == Dtype::f32) {
          std::memcpy(&data[4 * i], &value, 4);
        } else {
          std::memcpy(&data[2 * i], &half, 2);
        }
      }
    } else {
      const int64_t row_bytes = k / layout.columns * layout.gguf_bytes;
      std::vector<uint8_t> blocks(n * row_bytes);
      fill(layout, blocks);
      stride = group_bytes(format, k);
      data.resize((n + 15) / 16 * stride);
      for (int64_t row = 0; row < n; row += 16) {
        pack_group(format, blocks.data() + row * row_bytes, row_bytes, n - row < 16 ? n - row : 16, k,
                   data.data() + row / 16 * stride);
      }
    }
    const Weight weight{format, dtype, n, k, data.data(), stride};
    std::vector<float> values(n * k), x(16 * k), y(16 * n);
    dequantize(weight, 0, n, values.data());
    for (float value : values) {
      note(value);
    }
    for (float& value : x) {
      value = uniform() - 0.5f;
    }
    for (int64_t m : {1, 2, 3, 16}) {
      const Form form = form_of(weight, Dtype::f32);
      void* memory = std::aligned_alloc(64, (input_bytes(form, m, k) + 63) / 64 * 64);
      const Input input = prepare(form, Dtype::f32, x.data(), k, m, k, memory);
      compute(weight, input, 0, n, y.data(), n);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t row = 0; row < n; ++row) {
          double exact = 0, x_norm = 0, w_norm = 0;
          for (int64_t c = 0; c < k; ++c) {
            exact += static_cast<double>(x[i * k + c]) * values[row * k + c];
            x_norm += static_cast<double>(x[i * k + c]) * x[i * k + c];
            w_norm += static_cast<double>(values[row * k + c]) * values[row * k + c];
          }
          const double error = std::fabs(y[i * n + row] - exact) / std::sqrt(x_norm * w_norm);
          const double bound = format == WeightFormat::dense ? 3e-7 : 4e-3;
          worst = error / bound > worst ? error / bound : worst;
          if (!(error <= bound)) {
            std::printf("format %d dtype %d, %ld inputs: error %g\n", static_cast<int>(format),
                        static_cast<int>(dtype), static_cast<long>(m), error);
            return 1;
          }
        }
      }
      for (const auto& [first, last] : {std::pair{5, 37}, {3, 9}, {16, 21}, {20, 36}, {15, 17}, {30, 32}}) {
        std::vector<float> some(m * (last - first) + 1, 7.0f);
        compute(weight, input, first, last, some.data(), last - first);
        for (int64_t i = 0; i < m; ++i) {
          if (std::memcmp(&some[i * (last - first)], &y[i * n + first], (last - first) * sizeof(float))) {
            std::printf("format %d, rows %d to %d: other bits\n", static_cast<int>(format), first, last);
            return 1;
          }
        }
        if (some.back() != 7.0f) {
          std::printf("format %d, rows %d to %d: writes too far\n", static_cast<int>(format), first, last);
          return 1;
        }
      }
      // NaN as a number, and far away as an index.
      std::fill_n(static_cast<uint32_t*>(memory), input_bytes(form, m, k) / 4, 0x7fffffffu);
      compute(weight, input, 0, n, y.data(), n);
      std::free(memory);
    }
  }
  std::printf("%016lx %.3f\n", static_cast<unsigned long>(digest), worst);
}
