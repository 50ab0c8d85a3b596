// Runs one optimizer step over a whole parameter group on the host: one call, one parallel region.
#pragma once

#include <initializer_list>

#include "simd/isa.h"
#include "step.h"
#include "tensor_list.h"

namespace acclimate {

// Outputs at least this large are written past the cache: they would only push out what is still needed.
constexpr int64_t streamed_output_bytes = 4 << 20;
// A thread is woken for at least this many elements (about 10 us of work).
constexpr int64_t elements_per_thread = 16 << 10;

struct StateList {
  const TensorList& tensors;
  const char* role;
};

// The rows of a group, and which block of the whole group each row starts at.
class Group {
 public:
  Group(const TensorList& parameters, const TensorList& gradients, std::initializer_list<StateList> states,
        const TensorList& outputs) {
    const size_t count = parameters.size();
    check_count(gradients.size(), count, "gradients");
    STD_TORCH_CHECK(outputs.size() == 0 || outputs.size() == count,
                    "Expected no outputs or one for each of the ", count, " parameters, got ", outputs.size(), ".");
    for (const StateList& state : states) {
      check_count(state.tensors.size(), count, state.role);
    }
    rows_.resize(count);
    first_blocks_.reserve(count + 1);
    int64_t blocks = 0;
    for (size_t i = 0; i < count; ++i) {
      Row& row = rows_[i];
      row.elements = numel(parameters[i]);
      RowTensors tensors;
      tensors.add(row.parameter, parameters[i], "parameter", true);
      add(tensors, row, row.gradient, gradients[i], "gradient", false);
      int s = 0;
      for (const StateList& state : states) {
        add(tensors, row, row.state[s++], state.tensors[i], state.role, true);
      }
      if (outputs.size() != 0) {
        add(tensors, row, row.output, outputs[i], "output", true);
      }
      tensors.flatten(written_back_);
      if (row.output.data == row.parameter.data) {
        row.output.data = nullptr;  // the parameter is its own output: a float32 one among 16-bit ones
      }
      const Stream& out = row.output;
      row.stream_output = out.data != nullptr && out.dtype != Dtype::f32 &&
          row.elements * size_of(out.dtype) >= streamed_output_bytes &&
          reinterpret_cast<uintptr_t>(out.data) % 64 == 0;
      first_blocks_.push_back(blocks);
      blocks += (row.elements + block_elements - 1) / block_elements;
    }
    first_blocks_.push_back(blocks);
  }

  size_t size() const { return rows_.size(); }

  // Calls step(row, index, begin, end) for every row, from the threads of torch's intra-op pool.
  template <class Step>
  void run(const Step& step) {
    torch::stable::parallel_for(
        0, first_blocks_.back(), elements_per_thread / block_elements, [&](int64_t begin, int64_t end) {
          auto after = std::upper_bound(first_blocks_.begin(), first_blocks_.end(), begin);
          for (size_t i = after - first_blocks_.begin() - 1; begin < end; ++i) {
            const int64_t last = std::min(end, first_blocks_[i + 1]);
            const int64_t from = (begin - first_blocks_[i]) * block_elements;
            const int64_t to = std::min(rows_[i].elements, (last - first_blocks_[i]) * block_elements);
            if (from < to) {
              step(rows_[i], i, from, to);
            }
            begin = last;
          }
        });
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

  static void add(RowTensors& tensors, const Row& row, Stream& stream, AtenTensorHandle tensor,
                  const char* role, bool is_written) {
    STD_TORCH_CHECK(numel(tensor) == row.elements, "A ", role, " has ", numel(tensor),
                    " elements, its parameter ", row.elements, ".");
    tensors.add(stream, tensor, role, is_written);
  }

  std::vector<Row> rows_;
  std::vector<int64_t> first_blocks_;
  // Each copy with the tensor it came from, or with itself where nothing is to be written back.
  std::vector<std::pair<torch::stable::Tensor, torch::stable::Tensor>> written_back_;
};

// The kernel to run: the one asked for, or the best one here.
inline Isa choose_isa(int64_t asked) {
  const Isa isa = asked == 0 ? best_isa() : static_cast<Isa>(asked);
  STD_TORCH_CHECK(runs_here(isa), "This machine cannot run the instruction set number ", asked, ".");
  return isa;
}

// Adds one to a step counter (a float32 scalar on the host) and returns it.
inline double count_step(AtenTensorHandle counter) {
  STD_TORCH_CHECK(
      numel(counter) == 1 && dtype(counter, "step") == Dtype::f32, "A step is not one float32 number.");
  float* const step = reinterpret_cast<float*>(data(counter));
  return *step += 1.0f;
}

// The scalar arguments of a boxed kernel, in the order of the schema.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  StableIValue list() { return *next_++; }
  template <class T>
  T scalar() {
    return torch::stable::detail::to<T>(*next_++);
  }

 private:
  StableIValue* next_;
};

// The variant of step_range<Rule> for an instruction set.
#if defined(__x86_64__)
#define ACCLIMATE_STEP_RANGE(isa, Rule)                                              \
  ((isa) == ::acclimate::Isa::avx512_bf16 ? avx512_bf16::step_range<avx512_bf16::Rule> \
   : (isa) == ::acclimate::Isa::avx512    ? avx512::step_range<avx512::Rule>           \
   : (isa) == ::acclimate::Isa::avx2      ? avx2::step_range<avx2::Rule>               \
                                          : plain::step_range<plain::Rule>)
#elif defined(__aarch64__)
#define ACCLIMATE_STEP_RANGE(isa, Rule) \
  ((isa) == ::acclimate::Isa::neon ? neon::step_range<neon::Rule> : plain::step_range<plain::Rule>)
#else
#define ACCLIMATE_STEP_RANGE(isa, Rule) (plain::step_range<plain::Rule>)
#endif

}  // namespace acclimate
