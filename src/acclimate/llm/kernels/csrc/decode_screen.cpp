#include "decode_screen.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "decode_coarse.h"
#include "decode_math.h"
#include "huge_pages.h"
#include "layout.h"

namespace acclimate::inference::decode {
namespace {

WeightFormat coarse_format(const Weight& head) {
  return head.format == WeightFormat::dense ? WeightFormat::q5_1 : WeightFormat::int4;
}

constexpr int64_t least_values = int64_t{4} << 20;  // fewer stay in a cache
constexpr int64_t tile_rows = 512;  // of a checksum
constexpr int64_t huge_page = int64_t{2} << 20;
// Covers the rounding errors of the bounds themselves, which are computed in float32.
constexpr float rounded_up = 1.001f;

int64_t groups_of(const Weight& weight) { return (weight.n + group_rows - 1) / group_rows; }
int64_t tiles_of(const Weight& weight) { return (weight.n + tile_rows - 1) / tile_rows; }

// The largest error of a product that float32 sums cause, relative to the norm of the row times that of the
// input.
float lost_by_sums(int64_t k) { return static_cast<float>(2 * k + 128) * 0x1p-24f; }

}  // namespace

void Screen::Free::operator()(uint8_t* memory) const { std::free(memory); }

bool Screen::suits(const Weight& head) {
  return (head.format == WeightFormat::dense || head.format == WeightFormat::int5) &&
         head.n * head.k >= least_values;
}

Screen::Screen(const Weight& head)
    : head_(head), errors_(groups_of(head)), norms_(groups_of(head)), checksums_(tiles_of(head)) {
  const WeightFormat format = coarse_format(head);
  const int64_t stride = group_bytes(format, head.k);
  const int64_t bytes = (groups_of(head) * stride + huge_page - 1) / huge_page * huge_page;
  memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(huge_page, bytes)));
  if (memory_ == nullptr) {
    throw std::bad_alloc();
  }
  request_huge_pages(memory_.get(), bytes);
  coarse_ = {format, Dtype::f32, head.n, head.k, memory_.get(), stride};
}

void Screen::fill(int thread, int threads) {
  const auto [first, last] = rows_of(head_, thread, threads);
  std::vector<uint32_t> memory(group_rows * whole_blocks(head_.k));
  FilePages pages;
  for (int64_t row = first; row < last; row += group_rows) {
    if (head_.format == WeightFormat::int5) {
      cut_group(row / group_rows);
    } else {
      fill_group(row / group_rows, memory);
    }
    was_read(pages, row, std::min(row + group_rows, last));
  }
  const int64_t tiles = tiles_of(head_);
  for (int64_t tile = tiles * thread / threads; tile < tiles * (thread + 1) / threads; ++tile) {
    checksums_[tile] = checksum(tile);
    was_read(pages, tile * tile_rows, std::min((tile + 1) * tile_rows, head_.n));
  }
}

void Screen::fill_group(int64_t group, std::vector<uint32_t>& memory) {
  const bool is_bf16 = head_.dtype == Dtype::bf16;
  const int64_t value_bytes = is_bf16 ? 2 : 4, columns = whole_blocks(head_.k);
  const int64_t first = group * group_rows, rows = std::min(group_rows, head_.n - first);
  const uint8_t* from = head_.data + first * head_.stride;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
  int64_t stride = head_.stride / sizeof(uint32_t);
  if (rows < group_rows || columns != head_.k || head_.dtype == Dtype::f16 || head_.stride % 4 != 0 ||
      reinterpret_cast<uintptr_t>(from) % alignof(uint32_t) != 0) {
    std::fill(memory.begin(), memory.end(), 0);
    stride = columns * value_bytes / sizeof(uint32_t);
    for (int64_t row = 0; row < rows; ++row) {
      uint32_t* to = memory.data() + row * stride;
      if (is_bf16) {
        std::memcpy(to, from + row * head_.stride, head_.k * value_bytes);
      } else {
        dequantize(head_, first + row, first + row + 1, reinterpret_cast<float*>(to));
      }
    }
    words = memory.data();
  }
  uint8_t* to = memory_.get() + group * coarse_.stride;
  const Offsets at = offsets_of(layout_of(coarse_.format), columns / block_columns);
  float errors[group_rows], squares[group_rows];
  round_to_5_bits(is_bf16, words, stride, columns / block_columns, to, to + at.low, to + at.codes, errors,
                  squares);
  float most_error = 0, most_norm = 0;
  for (int64_t row = 0; row < rows; ++row) {
    float error = errors[row], norm = squares[row];
    if (!std::isfinite(error) || !std::isfinite(norm)) {
      error = norm = std::numeric_limits<float>::infinity();  // such a row is never ruled out
    }
    most_error = std::max(most_error, std::sqrt(error));
    most_norm = std::max(most_norm, std::sqrt(norm));
  }
  errors_[group] = (most_error + lost_by_sums(head_.k) * most_norm) * rounded_up;
  norms_[group] = most_norm * (rounded_up + lost_by_sums(head_.k));
}

// The copy has the head's scales and lows, except that its smallest step is twice as large.
void Screen::cut_group(int64_t group) {
  const uint8_t* from = head_.data + group * head_.stride;
  uint8_t* to = memory_.get() + group * coarse_.stride;
  const int64_t blocks = whole_blocks(head_.k) / block_columns;
  const Offsets at = offsets_of(layout_of(coarse_.format), blocks);
  std::memcpy(to, from, at.codes);
  float scales[group_rows], low_scales[group_rows], most = 0;
  std::memcpy(scales, from, sizeof(scales));
  std::memcpy(low_scales, from + at.low_scale, sizeof(low_scales));
  for (int64_t row = 0; row < group_rows; ++row) {
    // A value is scale * block scale * code - low scale * block low; the block's two have 8 bits, the code 5.
    most = std::max(most, std::fabs(scales[row]) * (255 * 31) + std::fabs(low_scales[row]) * 255);
    scales[row] *= 2;
  }
  std::memcpy(to, scales, sizeof(scales));
  leave_out_last_bit(from + at.codes, blocks, to + at.codes);
  const float length = std::sqrt(static_cast<float>(head_.k)) * most;  // an upper bound of a row's norm
  errors_[group] = std::isfinite(length) ? 2 * lost_by_sums(head_.k) * length * rounded_up
                                         : std::numeric_limits<float>::infinity();
  norms_[group] = 0;
}

Input Screen::with_starts(Input rounded, std::vector<int32_t>& starts) const {
  if (head_.format != WeightFormat::int5) {
    return rounded;
  }
  const int64_t blocks = rounded.stride / block_columns;
  starts.resize(std::max(starts.size(), static_cast<size_t>(rounded.m * blocks)));
  const int8_t* codes = static_cast<const int8_t*>(rounded.values);
  for (int64_t block = 0; block < rounded.m * blocks; ++block, codes += block_columns) {
    int32_t positive = 0;
    for (int64_t i = 0; i < block_columns; ++i) {
      positive += codes[i] > 0 ? codes[i] : 0;
    }
    starts[block] = (positive + 1) / 2;  // a step of the copy is two of the head's
  }
  rounded.starts = starts.data();
  return rounded;
}

uint64_t Screen::checksum(int64_t tile) const {
  if (head_.format != WeightFormat::dense) {
    constexpr int64_t groups = tile_rows / group_rows;
    const int64_t first = tile * groups, last = std::min(first + groups, groups_of(head_));
    return checksum(head_.data + first * head_.stride, last - first, head_.stride, head_.stride);
  }
  const int64_t first = tile * tile_rows, last = std::min(first + tile_rows, head_.n);
  return checksum(head_.data + first * head_.stride, last - first, head_.stride,
                  head_.k * (head_.dtype == Dtype::f32 ? 4 : 2));
}

uint64_t Screen::checksum(const uint8_t* from, int64_t rows, int64_t stride, int64_t bytes) {
  uint32_t lanes[64] = {};
  for (int64_t row = 0; row < rows; ++row) {
    mix(from + row * stride, bytes, lanes);
  }
  uint64_t sum = 0;
  for (const uint32_t lane : lanes) {
    sum = (sum ^ lane) * 0x9e3779b97f4a7c15u;
    sum ^= sum >> 29;
  }
  return sum;
}

bool Screen::is_current(int thread, int threads) const {
  const int64_t tiles = tiles_of(head_);
  FilePages pages;
  return is_current(pages, tiles * thread / threads * tile_rows, tiles * (thread + 1) / threads * tile_rows);
}

bool Screen::is_current(FilePages& pages, int64_t first_row, int64_t last_row) const {
  bool same = true;
  for (int64_t row = (first_row + tile_rows - 1) / tile_rows * tile_rows; row < std::min(last_row, head_.n);
       row += tile_rows) {
    same = same && checksums_[row / tile_rows] == checksum(row / tile_rows);
    was_read(pages, row, std::min(row + tile_rows, head_.n));
  }
  return same;
}

// Few rows are read again.
void Screen::was_read(FilePages& pages, int64_t first, int64_t last) const {
  if (head_.format == WeightFormat::dense) {  // else no file has it
    pages.was_read(head_.data + first * head_.stride, (last - first) * head_.stride);
  }
}

Screen::Lengths Screen::lengths_of(const float* x, const Input& rounded, int64_t row) {
  const int8_t* codes = static_cast<const int8_t*>(rounded.values) + row * rounded.stride;
  const float* scales = rounded.scales + row * (rounded.stride / block_columns);
  double length = 0, error = 0;
  for (int64_t i = 0; i < rounded.k; ++i) {
    const double value = static_cast<double>(codes[i]) * scales[i / block_columns];
    length += value * value;
    error += (x[i] - value) * (x[i] - value);
  }
  return {static_cast<float>(std::sqrt(length)) * rounded_up,
          static_cast<float>(std::sqrt(error)) * rounded_up};
}

}  // namespace acclimate::inference::decode
