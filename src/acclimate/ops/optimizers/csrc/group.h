// The tensors of a whole parameter group, checked and flattened, for host and device kernels.
#pragma once

#include <functional>
#include <span>

#include "step.h"
#include "tensor_list.h"

namespace acclimate {

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
