// The operators on packed weights; their schemas are in acclimate.llm.kernels.operators.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "gguf_pack.h"
#include "layout.h"
#include "linear.h"
#include "rounding.h"

namespace acclimate::inference {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The fewest bytes of weight worth a thread: about 2 us of reading.
constexpr int64_t bytes_per_thread = 32 << 10;
// Results that a thread keeps in float32 before it converts them.
constexpr int64_t tile_rows = 256;
constexpr int64_t shared_rows = 64;  // the most of a tile that any thread takes
// The most rows or columns of a weight: sums and products of sizes up to this do not overflow.
constexpr int64_t most_size = int64_t{1} << 40;

bool is_size(int64_t value) { return value >= 0 && value <= most_size; }

Dtype dtype_of(const Tensor& tensor, const char* role) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    default:
      STD_TORCH_CHECK(false, "The ", role, " is not of dtype float32, bfloat16 or float16.");
  }
}

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

void narrow(Dtype dtype, const float* from, int64_t count, void* to) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (dtype == Dtype::bf16) {
    std::transform(from, from + count, static_cast<uint16_t*>(to),
                   [](float value) { return static_cast<uint16_t>(rounded_bf16(value) >> 16); });
  } else {
    std::transform(from, from + count, static_cast<uint16_t*>(to),
                   [](float value) { return bits_of_f16(rounded<Dtype::f16>(value)); });
  }
}

Weight weight_of(const Tensor& data, int64_t number, int64_t n, int64_t k) {
  STD_TORCH_CHECK(data.is_cpu() && data.dim() == 2 && data.is_contiguous() && is_size(n) && is_size(k),
                  "A weight is not a contiguous matrix on the host.");
  const std::optional<WeightFormat> found = find_format(number);
  STD_TORCH_CHECK(found.has_value(), "There is no weight format with the number ", number, ".");
  Weight weight{};
  weight.format = *found;
  weight.n = n;
  weight.k = k;
  weight.data = static_cast<const uint8_t*>(data.data_ptr());
  if (weight.format == WeightFormat::dense) {
    weight.dtype = dtype_of(data, "weight");
    weight.stride = k * bytes_of(weight.dtype);
    STD_TORCH_CHECK(data.size(0) == n && data.size(1) == k, "A weight is not of shape [", n, ", ", k, "].");
  } else {
    weight.stride = group_bytes(weight.format, k);
    STD_TORCH_CHECK(data.scalar_type() == ScalarType::Byte && data.size(1) == weight.stride &&
                        data.size(0) == (n + group_rows - 1) / group_rows,
                    "The bytes of a weight do not match its format and shape [", n, ", ", k, "].");
  }
  return weight;
}

// The processors that this process can keep busy.
std::atomic<int64_t> most_threads{std::numeric_limits<int64_t>::max()};

int threads_for(int64_t bytes) {
  const int64_t useful = (bytes + bytes_per_thread - 1) / bytes_per_thread;
  const int64_t most = std::min<int64_t>(torch::stable::get_num_threads(), most_threads.load());
  return static_cast<int>(std::clamp<int64_t>(most, 1, std::max<int64_t>(useful, 1)));
}

int64_t bytes_of(const Weight& weight) {
  return weight.format == WeightFormat::dense ? weight.n * weight.stride
                                              : (weight.n + group_rows - 1) / group_rows * weight.stride;
}

// Calls function(thread, threads) for each of some threads, on torch's threads. These operators run between
// torch's, whose threads spin for milliseconds after each: threads of our own would compete with them for the
// same cores, and a product of 20 us took 2 ms.
template <class Function>
void run_threads(int threads, Function& function) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      function(static_cast<int>(thread), threads);
    }
  });
}

// Memory for prepared inputs, aligned, kept by each thread for its next call.
void* input_memory(size_t bytes) {
  thread_local std::vector<uint8_t> memory;
  if (memory.size() < bytes + 64) {
    memory.resize(bytes + 64);
  }
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// The inputs of an operator, row by row.
struct Rows {
  Tensor x;
  Dtype dtype;
  int64_t count;
  int64_t k;

  Rows(const Tensor& given, int64_t columns)
      : x(given.is_contiguous() ? given : torch::stable::contiguous(given)),
        dtype(dtype_of(given, "input")),
        count(1),
        k(columns) {
    STD_TORCH_CHECK(given.is_cpu() && given.dim() > 0 && given.size(given.dim() - 1) == columns,
                    "The input does not have the weight's ", columns, " columns.");
    for (int64_t d = 0; d + 1 < given.dim(); ++d) {
      count *= given.size(d);
    }
  }

  const uint8_t* row(int64_t i) const {
    return static_cast<const uint8_t*>(x.data_ptr()) + i * k * bytes_of(dtype);
  }
};

// Calls finish(thread, first input, inputs, first row, rows, results, stride) for tiles of results in
// float32: 16 inputs at a time are multiplied by a tile of rows that stays in the cache.
template <class Finish>
void multiply(const Weight& weight, const Rows& rows, const Finish& finish) {
  constexpr int64_t most_parts = 32, cached_bytes = 256 << 10;
  const Form form = form_of(weight, rows.dtype);
  const size_t part_bytes = aligned(input_bytes(form, max_rows, rows.k));
  const int64_t row_bytes = std::max<int64_t>(bytes_of(weight) / std::max<int64_t>(weight.n, 1), 1);
  std::array<Input, most_parts> inputs;
  for (int64_t begin = 0; begin < rows.count; begin += most_parts * max_rows) {
    const int64_t count = std::min(most_parts * max_rows, rows.count - begin);
    const int64_t parts = (count + max_rows - 1) / max_rows;
    uint8_t* memory = static_cast<uint8_t*>(
        input_memory(parts == 1 ? input_bytes(form, count, rows.k) : parts * part_bytes));
    auto prepare_parts = [&](int thread, int threads) {
      for (int64_t part = thread; part < parts; part += threads) {
        const int64_t first = part * max_rows;
        inputs[part] = prepare(form, rows.dtype, rows.row(begin + first), rows.k,
                               std::min(max_rows, count - first), rows.k, memory + part * part_bytes);
      }
    };
    run_threads(parts == 1 ? 1 : threads_for(count * rows.k * bytes_of(rows.dtype)), prepare_parts);
    const int64_t cached_rows = cached_bytes / row_bytes / group_rows * group_rows;
    const int64_t tile = parts == 1 ? tile_rows : std::clamp(cached_rows, group_rows, shared_rows);
    const auto multiply_tile = [&](int thread, int64_t row, int64_t last) {
      alignas(64) float results[max_rows * tile_rows];
      const int64_t end = std::min(row + tile, last);
      for (int64_t part = 0; part < parts; ++part) {
        compute(weight, inputs[part], row, end, results, tile_rows);
        finish(thread, begin + part * max_rows, inputs[part].m, row, end - row, results, tile_rows);
      }
    };
    std::atomic<int64_t> next{0};
    auto work = [&](int thread, int threads) {
      if (parts == 1) {  // reading the weight takes the time: a thread's rows are always the same
        const auto [first, last] = rows_of(weight, thread, threads);
        for (int64_t row = first; row < last; row += tile) {
          multiply_tile(thread, row, last);
        }
      } else {  // a thread that does not run delays one tile
        for (int64_t row = next.fetch_add(tile); row < weight.n; row = next.fetch_add(tile)) {
          multiply_tile(thread, row, weight.n);
        }
      }
    };
    run_threads(threads_for(bytes_of(weight)), work);
  }
}

// The sizes of a tensor whose last dimension has another size.
std::vector<int64_t> sizes_with(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    sizes.push_back(x.size(d));
  }
  sizes.push_back(last);
  return sizes;
}

Tensor linear(const Tensor& x, const Tensor& data, std::optional<Tensor> bias, int64_t number, int64_t n,
              int64_t k) {
  const Weight weight = weight_of(data, number, n, k);
  const Rows rows(x, k);
  const std::vector<int64_t> sizes = sizes_with(x, n);
  Tensor y = torch::stable::new_empty(rows.x, sizes);
  std::vector<float> added;
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->is_cpu() && bias->dim() == 1 && bias->size(0) == n, "A bias is not of shape [", n,
                    "].");
    const Tensor whole = torch::stable::contiguous(*bias);
    const Dtype dtype = dtype_of(whole, "bias");
    added.resize(n);
    dequantize({WeightFormat::dense, dtype, 1, n, static_cast<const uint8_t*>(whole.data_ptr()),
                n * bytes_of(dtype)},
               0, 1, added.data());
  }
  uint8_t* to = static_cast<uint8_t*>(y.mutable_data_ptr());
  const int64_t size = bytes_of(rows.dtype);
  multiply(weight, rows,
           [&](int, int64_t begin, int64_t m, int64_t row, int64_t count, float* results, int64_t stride) {
             for (int64_t i = 0; i < m; ++i) {
               float* own = results + i * stride;
               if (!added.empty()) {
                 for (int64_t r = 0; r < count; ++r) {
                   own[r] += added[row + r];
                 }
               }
               narrow(rows.dtype, own, count, to + ((begin + i) * n + row) * size);
             }
           });
  return y;
}

Tensor values(const Tensor& data, int64_t number, int64_t n, int64_t k, ScalarType dtype) {
  const Weight weight = weight_of(data, number, n, k);
  Tensor result = torch::stable::new_empty(data, {n, k}, dtype);
  const Dtype kind = dtype_of(result, "result");
  uint8_t* to = static_cast<uint8_t*>(result.mutable_data_ptr());
  auto work = [&](int thread, int threads) {
    const auto [first, last] = rows_of(weight, thread, threads);
    std::vector<float> wide(kind == Dtype::f32 ? 0 : group_rows * k);
    for (int64_t row = first; row < last; row += group_rows) {
      const int64_t end = std::min(row + group_rows, last);
      uint8_t* own = to + row * k * bytes_of(kind);
      if (kind == Dtype::f32) {
        dequantize(weight, row, end, reinterpret_cast<float*>(own));
      } else {
        dequantize(weight, row, end, wide.data());
        narrow(kind, wide.data(), (end - row) * k, own);
      }
    }
  };
  run_threads(threads_for(bytes_of(weight)), work);
  return result;
}

Tensor rows(const Tensor& data, const Tensor& ids, int64_t number, int64_t n, int64_t k, ScalarType dtype) {
  const Weight weight = weight_of(data, number, n, k);
  const Tensor whole = torch::stable::contiguous(ids);
  STD_TORCH_CHECK(
      whole.is_cpu() && (whole.scalar_type() == ScalarType::Long || whole.scalar_type() == ScalarType::Int),
      "Row numbers are not int64 or int32 on the host.");
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < whole.dim(); ++d) {
    sizes.push_back(whole.size(d));
  }
  sizes.push_back(k);
  Tensor result = torch::stable::new_empty(data, sizes, dtype);
  const Dtype kind = dtype_of(result, "result");
  uint8_t* to = static_cast<uint8_t*>(result.mutable_data_ptr());
  const bool is_long = whole.scalar_type() == ScalarType::Long;
  std::vector<float> wide(k);
  for (int64_t i = 0; i < whole.numel(); ++i) {
    const int64_t id = is_long ? static_cast<const int64_t*>(whole.data_ptr())[i]
                               : static_cast<const int32_t*>(whole.data_ptr())[i];
    STD_TORCH_CHECK(id >= 0 && id < n, "The weight has no row ", id, ", only ", n, ".");
    dequantize(weight, id, id + 1, wide.data());
    narrow(kind, wide.data(), k, to + i * k * bytes_of(kind));
  }
  return result;
}

// Requests huge pages for memory before it is written, as acclimate.host.huge_pages does in Python. It has no
// effect on little memory, or if the system refuses.
void request_huge_pages([[maybe_unused]] uint8_t* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t least_bytes = 4 << 20, page = 4096;
  if (bytes >= least_bytes) {
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = reinterpret_cast<uintptr_t>(data + bytes) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
}

// Returns a packed weight; pack(row, rows, group) writes a group of rows. Each thread writes, and so places,
// the rows that it will compute.
template <class Pack>
Tensor packed(const Tensor& like, WeightFormat format, int64_t n, int64_t k, const Pack& pack) {
  const int64_t groups = (n + group_rows - 1) / group_rows, stride = group_bytes(format, k);
  Tensor result = torch::stable::new_empty(like, {groups, stride});
  uint8_t* to = static_cast<uint8_t*>(result.mutable_data_ptr());
  request_huge_pages(to, groups * stride);
  const Weight weight{format, Dtype::f32, n, k, to, stride};
  auto work = [&](int thread, int threads) {
    const auto [first, last] = rows_of(weight, thread, threads);
    for (int64_t row = first; row < last; row += group_rows) {
      pack(row, std::min(group_rows, last - row), to + row / group_rows * stride);
    }
  };
  run_threads(threads_for(groups * stride), work);
  return result;
}

Tensor from_gguf(const Tensor& blocks, int64_t number, int64_t n, int64_t k) {
  const Tensor whole = torch::stable::contiguous(blocks);
  const WeightFormat kind = find_format(number).value_or(WeightFormat::dense);
  const Layout layout = layout_of(kind);
  STD_TORCH_CHECK(layout.gguf_bytes > 0, "GGUF has no blocks of the weight format with the number ", number,
                  ".");
  const int64_t row_bytes = k / layout.columns * layout.gguf_bytes;
  // Without the product n * row_bytes, which may overflow.
  const bool fits =
      row_bytes == 0 ? whole.numel() == 0 : whole.numel() % row_bytes == 0 && whole.numel() / row_bytes == n;
  STD_TORCH_CHECK(whole.is_cpu() && whole.scalar_type() == ScalarType::Byte && is_size(n) && is_size(k) &&
                      k % layout.columns == 0 && fits,
                  "The blocks do not match their type and the shape [", n, ", ", k, "].");
  const uint8_t* from = static_cast<const uint8_t*>(whole.data_ptr());
  return packed(whole, kind, n, k, [&](int64_t row, int64_t rows, uint8_t* group) {
    pack_group(kind, from + row * row_bytes, row_bytes, rows, k, group);
  });
}

Tensor from_words(const Tensor& words, const Tensor& header, int64_t number, int64_t n, int64_t k,
                  int64_t bits, int64_t order, int64_t skip, int64_t flip) {
  const Tensor whole = torch::stable::contiguous(words), fields = torch::stable::contiguous(header);
  const WeightFormat kind = find_format(number).value_or(WeightFormat::dense);
  STD_TORCH_CHECK(kind != WeightFormat::dense, "There is no weight format with the number ", number, ".");
  STD_TORCH_CHECK(bits == 2 || bits == 4 || bits == 8, "A code in a word has 2, 4 or 8 bits, not ", bits,
                  ".");
  STD_TORCH_CHECK(order >= 0 && order <= 2 && (order != 2 || bits == 4), "There is no order ", order,
                  " of words with ", bits, " bits.");
  const int64_t per = 32 / bits;
  STD_TORCH_CHECK(is_size(n) && is_size(k) && skip >= 0 && skip < per && flip >= 0 && flip < 256, "Words of ",
                  bits, " bits cannot be packed from ", skip, " on, for [", n, ", ", k, "].");
  const int64_t groups = (n + group_rows - 1) / group_rows;
  const int64_t blocks = padded_columns(kind, k) / block_columns;
  const int64_t codes = offsets_of(layout_of(kind), blocks).codes;
  const int64_t needed = ((order == 2 ? n : k) + skip + per - 1) / per, lines = order == 2 ? k : n;
  STD_TORCH_CHECK(whole.is_cpu() && whole.scalar_type() == ScalarType::Int && whole.dim() == 2 &&
                      whole.size(order == 1 ? 1 : 0) == lines && whole.size(order == 1 ? 0 : 1) >= needed,
                  "The words do not match the shape [", n, ", ", k, "].");
  STD_TORCH_CHECK(fields.is_cpu() && fields.scalar_type() == ScalarType::Byte && fields.dim() == 2 &&
                      fields.size(0) == groups && fields.size(1) == codes,
                  "The fields do not match the format and the shape [", n, ", ", k, "].");
  const uint8_t* from = static_cast<const uint8_t*>(fields.data_ptr());
  const Words held{static_cast<const uint32_t*>(whole.data_ptr()),
                   n,
                   whole.size(order == 1 ? 0 : 1),
                   static_cast<int>(bits),
                   static_cast<WordOrder>(order),
                   skip,
                   static_cast<uint8_t>(flip)};
  return packed(fields, kind, n, k, [&](int64_t row, int64_t rows, uint8_t* group) {
    std::memcpy(group, from + row / group_rows * codes, codes);
    pack_words(kind, held, row, rows, k, group);
  });
}

struct Candidate {
  float value;
  int64_t position;
};

// Largest first; NaN counts as the largest, as in torch, and of equal ones the first.
bool comes_before(const Candidate& a, const Candidate& b) {
  const bool a_is_nan = std::isnan(a.value), b_is_nan = std::isnan(b.value);
  if (a_is_nan != b_is_nan) {
    return a_is_nan;
  }
  if (a.value != b.value && !a_is_nan) {
    return a.value > b.value;
  }
  return a.position < b.position;
}

void keep(std::vector<Candidate>& best, int64_t count, Candidate candidate) {
  if (static_cast<int64_t>(best.size()) == count) {
    if (!comes_before(candidate, best.back())) {
      return;
    }
    best.pop_back();
  }
  best.insert(std::upper_bound(best.begin(), best.end(), candidate, comes_before), candidate);
}

std::tuple<Tensor, Tensor> top(const Tensor& x, const Tensor& data, int64_t number, int64_t n, int64_t k,
                               int64_t count) {
  const Weight weight = weight_of(data, number, n, k);
  const Rows rows(x, k);
  STD_TORCH_CHECK(count > 0 && count <= n, "There are no ", count, " largest of ", n, " results.");
  const std::vector<int64_t> sizes = sizes_with(x, count);
  Tensor found = torch::stable::new_empty(rows.x, sizes, ScalarType::Float);
  Tensor positions = torch::stable::new_empty(rows.x, sizes, ScalarType::Long);
  const int threads = threads_for(bytes_of(weight));
  std::vector<std::vector<Candidate>> best(threads * rows.count);
  multiply(
      weight, rows,
      [&](int thread, int64_t begin, int64_t m, int64_t row, int64_t length, float* results, int64_t stride) {
        for (int64_t i = 0; i < m; ++i) {
          std::vector<Candidate>& own = best[thread * rows.count + begin + i];
          for (int64_t r = 0; r < length; ++r) {
            const float value = results[i * stride + r];
            // Most are smaller than what was found before.
            if (static_cast<int64_t>(own.size()) < count || !(value < own.back().value)) {
              keep(own, count, {value, row + r});
            }
          }
        }
      });
  float* to = static_cast<float*>(found.mutable_data_ptr());
  int64_t* to_positions = static_cast<int64_t*>(positions.mutable_data_ptr());
  for (int64_t i = 0; i < rows.count; ++i) {
    std::vector<Candidate> all;
    for (int thread = 0; thread < threads; ++thread) {
      const auto& own = best[thread * rows.count + i];
      all.insert(all.end(), own.begin(), own.end());
    }
    std::partial_sort(all.begin(), all.begin() + count, all.end(), comes_before);
    for (int64_t c = 0; c < count; ++c) {
      to[i * count + c] = all[c].value;
      to_positions[i * count + c] = all[c].position;
    }
  }
  return {found, positions};
}

void use_instructions(int64_t isa) { use_isa(isa); }

void limit_threads(int64_t most) { most_threads.store(most); }

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&linear));
  m.impl("packed_values", TORCH_BOX(&values));
  m.impl("packed_rows", TORCH_BOX(&rows));
  m.impl("packed_from_gguf", TORCH_BOX(&from_gguf));
  m.impl("packed_from_words", TORCH_BOX(&from_words));
  m.impl("packed_top", TORCH_BOX(&top));
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CompositeExplicitAutograd, m) {
  m.impl("inference_use_isa", TORCH_BOX(&use_instructions));
  m.impl("inference_limit_threads", TORCH_BOX(&limit_threads));
}

}  // namespace
}  // namespace acclimate::inference
