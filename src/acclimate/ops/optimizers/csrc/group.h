// The tensors of a whole parameter group, checked and flattened, for host and device kernels.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

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

// Lists of tensors as the stable ABI passes them to a boxed kernel. torch::stable::Tensor counts references,
// which costs more than a step on a small tensor; a list that is read once only needs the handles.

// Owns the handles of a Tensor[] argument.
class TensorList {
 public:
  explicit TensorList(StableIValue argument) {
    const StableListHandle list = torch::stable::detail::to<StableListHandle>(argument);
    size_t size = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    handles_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue item;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
      handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(item));
    }
    TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  }

  TensorList(TensorList&&) = default;

  ~TensorList() {
    for (AtenTensorHandle handle : handles_) {
      aoti_torch_delete_tensor_object(handle);
    }
  }

  size_t size() const { return handles_.size(); }
  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }

 private:
  std::vector<AtenTensorHandle> handles_;
};

inline int64_t numel(AtenTensorHandle tensor) {
  int64_t result = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor, &result));
  return result;
}

inline int64_t storage_bytes(AtenTensorHandle tensor) {
  int64_t result = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor, &result));
  return result;
}

inline char* data(AtenTensorHandle tensor) {
  void* result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &result));
  return static_cast<char*>(result);
}

inline Dtype dtype(AtenTensorHandle tensor, const char* role) {
  static const int32_t f32 = aoti_torch_dtype_float32();
  static const int32_t bf16 = aoti_torch_dtype_bfloat16();
  static const int32_t f16 = aoti_torch_dtype_float16();
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &type));
  STD_TORCH_CHECK(type == f32 || type == bf16 || type == f16, "A ", role,
                  " has a data type that this op does not take; convert it to float32, bfloat16 or float16.");
  return type == f32 ? Dtype::f32 : type == bf16 ? Dtype::bf16 : Dtype::f16;
}

// The type and index of a tensor's device; the host has index -1.
inline std::pair<int32_t, int32_t> device(AtenTensorHandle tensor) {
  static const int32_t host = aoti_torch_device_type_cpu();
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &index));
  return {type, type == host ? -1 : index};
}

inline bool is_contiguous(AtenTensorHandle tensor) {
  bool result = false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor, &result));
  return result;
}

inline std::vector<std::pair<int64_t, int64_t>> strides_and_sizes(AtenTensorHandle tensor) {
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  std::vector<std::pair<int64_t, int64_t>> result;
  for (int64_t d = 0; d < dim; ++d) {
    result.emplace_back(strides[d], sizes[d]);
  }
  return result;
}

// Whether a tensor's elements fill one contiguous range of memory, in any order of dimensions.
inline bool is_dense(std::vector<std::pair<int64_t, int64_t>> layout) {
  std::sort(layout.begin(), layout.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : layout) {
    if (size != 1 && stride != expected) {
      return false;
    }
    expected *= size;
  }
  return true;
}

// The tensors of one row as flat memory, with equal offsets for equal elements. Tensors with the same layout
// (channels_last too) are used in place; others through a copy that is written back at the end.
class RowTensors {
 public:
  void add(Stream& stream, AtenTensorHandle tensor, const char* role, bool is_written) {
    entries_[count_++] = {&stream, tensor, is_written};
    stream.dtype = dtype(tensor, role);
    stream.data = data(tensor);
    all_contiguous_ = all_contiguous_ && is_contiguous(tensor);
  }

  void flatten(std::vector<std::pair<torch::stable::Tensor, torch::stable::Tensor>>& written_back) {
    if (all_contiguous_ || laid_out_alike()) {
      return;
    }
    for (int i = 0; i < count_; ++i) {
      const Entry& entry = entries_[i];
      if (is_contiguous(entry.tensor)) {
        continue;
      }
      AtenTensorHandle shared = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(entry.tensor, &shared));
      torch::stable::Tensor original(shared);
      torch::stable::Tensor copy = torch::stable::contiguous(original);
      entry.stream->data = static_cast<char*>(copy.data_ptr());
      written_back.emplace_back(entry.is_written ? original : copy, copy);
    }
  }

 private:
  struct Entry {
    Stream* stream;
    AtenTensorHandle tensor;
    bool is_written;
  };

  bool laid_out_alike() const {
    const auto layout = strides_and_sizes(entries_[0].tensor);
    for (int i = 1; i < count_; ++i) {
      if (strides_and_sizes(entries_[i].tensor) != layout) {
        return false;
      }
    }
    return is_dense(layout);
  }

  Entry entries_[3 + max_states];
  int count_ = 0;
  bool all_contiguous_ = true;
};

// Outputs at least this large bypass the cache, where they would only evict data that is still needed.
constexpr int64_t streamed_output_bytes = 4 << 20;

// The rows of a group, and the first block of each row within the group.
class Group {
 public:
  Group(const TensorList& parameters, const TensorList& gradients, std::span<const TensorList> states,
        std::span<const char* const> state_names, const TensorList& outputs) {
    const size_t count = parameters.size();
    check_count(gradients.size(), count, "gradients");
    STD_TORCH_CHECK(outputs.size() == 0 || outputs.size() == count,
                    "Expected no outputs or one for each of the ", count, " parameters, got ", outputs.size(),
                    ".");
    for (size_t s = 0; s < states.size(); ++s) {
      check_count(states[s].size(), count, state_names[s]);
    }
    if (count > 0) {
      device_ = device(parameters[0]);
    }
    rows_.resize(count);
    first_blocks_.reserve(count + 1);
    int64_t blocks = 0;
    for (size_t i = 0; i < count; ++i) {
      Row& row = rows_[i];
      row.elements = numel(parameters[i]);
      RowTensors tensors;
      add(tensors, row, row.parameter, parameters[i], "parameter", true);
      add(tensors, row, row.gradient, gradients[i], "gradient", false);
      for (size_t s = 0; s < states.size(); ++s) {
        add(tensors, row, row.state[s], states[s][i], state_names[s], true);
      }
      if (outputs.size() != 0) {
        add(tensors, row, row.output, outputs[i], "output", true);
      }
      tensors.flatten(written_back_);
      if (row.output.data == row.parameter.data) {
        row.output.data = nullptr;  // the parameter is its own output: a float32 one among 16-bit ones
      }
      const Stream& out = row.output;
      row.is_aligned = true;
      for (const Stream* stream :
           {&row.parameter, &row.gradient, &row.state[0], &row.state[1], &row.output}) {
        row.is_aligned = row.is_aligned && reinterpret_cast<uintptr_t>(stream->data) % 16 == 0;
      }
      row.stream_output = out.data != nullptr && out.dtype != Dtype::f32 &&
                          row.elements * size_of(out.dtype) >= streamed_output_bytes &&
                          reinterpret_cast<uintptr_t>(out.data) % 64 == 0;
      first_blocks_.push_back(blocks);
      blocks += (row.elements + block_elements - 1) / block_elements;
    }
    first_blocks_.push_back(blocks);
  }

  size_t size() const { return rows_.size(); }

  const std::vector<Row>& rows() const { return rows_; }
  // Where each row starts and the last one ends, in blocks of block_elements.
  const std::vector<int64_t>& first_blocks() const { return first_blocks_; }
  int32_t device_index() const { return device_.second; }

  // Copies results back to tensors that were updated through a copy; call it after the step.
  void write_back() {
    for (auto& [original, copy] : written_back_) {
      if (original.get() != copy.get()) {
        torch::stable::copy_(original, copy);
      }
    }
  }

 private:
  static void check_count(size_t actual, size_t expected, const char* what) {
    STD_TORCH_CHECK(actual == expected, "Expected one of the ", what, " for each of the ", expected,
                    " parameters, got ", actual, ".");
  }

  void add(RowTensors& tensors, const Row& row, Stream& stream, AtenTensorHandle tensor, const char* role,
           bool is_written) const {
    STD_TORCH_CHECK(device(tensor) == device_, "A ", role, " is on another device than the first parameter.");
    STD_TORCH_CHECK(numel(tensor) == row.elements, "A ", role, " has ", numel(tensor),
                    " elements, its parameter ", row.elements, ".");
    STD_TORCH_CHECK(row.elements == 0 || storage_bytes(tensor) > 0, "The memory of a ", role, " was freed.");
    tensors.add(stream, tensor, role, is_written);
  }

  std::pair<int32_t, int32_t> device_{0, -1};
  std::vector<Row> rows_;
  std::vector<int64_t> first_blocks_;
  // Each copy and the tensor to write it back to, which is the copy itself if nothing is to be written back.
  std::vector<std::pair<torch::stable::Tensor, torch::stable::Tensor>> written_back_;
};

// The arguments of a boxed kernel, in the order of the schema.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  StableIValue list() { return *next_++; }
  std::vector<TensorList> lists(size_t count) {
    std::vector<TensorList> result;
    for (size_t i = 0; i < count; ++i) {
      result.emplace_back(list());
    }
    return result;
  }
  template <class... Values>
  void read(Values&... values) {
    ((values = torch::stable::detail::to<Values>(*next_++)), ...);
  }

 private:
  StableIValue* next_;
};

// The arguments of an optimizer's op, checked. Settings reads those after the lists, names the states, and
// computes the coefficients of a step. Members are initialised in the order of the schema.
template <class Settings>
struct GroupCall {
  explicit GroupCall(Arguments arguments)
      : parameters(arguments.list()),
        gradients(arguments.list()),
        states(arguments.lists(Settings::state_names.size())),
        steps(arguments.list()),
        outputs(arguments.list()),
        settings(arguments),
        group(parameters, gradients, states, Settings::state_names, outputs) {}

  // Increments each step counter (float32 scalars on the host) and returns the coefficients for its count;
  // only one set of them if all counts are equal.
  auto count_steps() const {
    const size_t expected = group.size();
    STD_TORCH_CHECK(steps.size() == expected, "Expected one step for each of the ", expected,
                    " parameters, got ", steps.size(), ".");
    std::vector<float> counts(expected);
    for (size_t i = 0; i < expected; ++i) {
      STD_TORCH_CHECK(
          numel(steps[i]) == 1 && dtype(steps[i], "step") == Dtype::f32 && device(steps[i]).second < 0,
          "A step is not one float32 number on the host.");
      float* const step = reinterpret_cast<float*>(data(steps[i]));
      counts[i] = *step += 1.0f;
    }
    const bool are_equal =
        std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
    std::vector<decltype(settings.coefficients(1.0))> coefficients;
    for (size_t i = 0; i < (are_equal ? std::min<size_t>(expected, 1) : expected); ++i) {
      coefficients.push_back(i > 0 && counts[i] == counts[i - 1]
                                 ? coefficients.back()
                                 : settings.coefficients(static_cast<double>(counts[i])));
    }
    return coefficients;
  }

  TensorList parameters, gradients;
  std::vector<TensorList> states;
  TensorList steps, outputs;
  Settings settings;
  Group group;
};

}  // namespace acclimate
