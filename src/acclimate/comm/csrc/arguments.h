// Checks the arguments of torch.distributed's collectives and converts them for the transport.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "call.h"
#include "collectives.h"
#include "tensors.h"

namespace acclimate_comm {

using Tensors = std::vector<at::Tensor>;

inline Op op_of(const c10d::ReduceOp& op) {
  const auto number = static_cast<uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op));
  TORCH_CHECK(number < static_cast<uint8_t>(Op::kNone),
              "the backend shm reduces with SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR, not with "
              "ReduceOp number ",
              static_cast<int>(number));
  return static_cast<Op>(number);
}

inline Call call_of(Kind kind, const at::Tensor& tensor, int64_t root = 0,
                    int op = static_cast<int>(Op::kNone)) {
  Call call;
  call.kind = static_cast<uint8_t>(kind);
  call.op = static_cast<uint8_t>(op);
  call.dtype = static_cast<uint8_t>(tensor.scalar_type());
  call.root = static_cast<uint32_t>(root);
  // The ranks of all_to_all may pass different sizes, which are compared pair by pair.
  call.numel = kind == Kind::kAllToAll ? 0 : static_cast<uint64_t>(tensor.numel());
  return call;
}

inline int number_of(const c10d::ReduceOp& op) { return static_cast<c10d::ReduceOp::RedOpType>(op); }

inline const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "the backend shm takes one tensor per call, but got ", tensors.size());
  return tensors[0];
}

inline const at::Tensor& first(const Tensors& tensors) {
  static const at::Tensor nothing = at::empty({0});
  return tensors.empty() ? nothing : tensors[0];
}

inline void check_like(const at::Tensor& tensor, const at::Tensor& other, const char* what) {
  TORCH_CHECK(tensor.numel() == other.numel() && tensor.scalar_type() == other.scalar_type(), "each ", what,
              " must have ", other.numel(), " elements of ", other.scalar_type(), ", but one has ",
              tensor.numel(), " of ", tensor.scalar_type());
}

inline void check_count(size_t count, size_t needed, const char* what) {
  TORCH_CHECK(count == needed, "expected ", needed, " ", what, ", as many as ranks, but got ", count);
}

inline void check_times(const at::Tensor& large, const at::Tensor& small, int64_t times,
                        const char* large_name, const char* small_name) {
  const bool fits = large.numel() % times == 0 && large.numel() / times == small.numel();
  TORCH_CHECK(fits && large.scalar_type() == small.scalar_type(), "the ", large_name, " must have ", times,
              " times the ", small_name, "'s ", small.numel(), " elements of ", small.scalar_type(),
              ", but has ", large.numel(), " of ", large.scalar_type());
}

// The outputs of a gather, one for each rank.
class TargetList {
 public:
  TargetList() = default;
  TargetList(const Tensors& outputs, const at::Tensor& input, int ranks) {
    check_count(outputs.size(), ranks, "outputs");
    for (const at::Tensor& output : outputs) {
      check_like(output, input, "output");
      targets_.emplace_back(output);
      memory_.push_back(targets_.back().data());
    }
  }
  const Targets& memory() const { return memory_; }
  void finish() {
    for (Target& target : targets_) target.finish();
  }

 private:
  std::vector<Target> targets_;
  Targets memory_;
};

// Equal parts of a tensor in order, as pointers: creating views would dispatch operators.
inline Targets parts_of(void* data, size_t bytes, int parts) {
  Targets targets;
  for (int part = 0; part < parts; part++) targets.push_back(static_cast<char*>(data) + part * bytes);
  return targets;
}

[[noreturn]] inline void raise(const CommError& error) {
  if (error.reason == Reason::kForked || error.reason == Reason::kSystem) TORCH_CHECK(false, error.what());
  TORCH_CHECK_WITH(DistBackendError, false, error.what());
}

// The bytes for each rank of a tensor that lies in memory, so that its own number of bytes cannot overflow.
inline std::vector<size_t> sizes_of(const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks) {
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  std::vector<size_t> sizes;
  if (splits.empty()) {
    TORCH_CHECK(rows % ranks == 0, "without split sizes, the first dimension must be divisible by the ",
                ranks, " ranks, but is ", rows);
    sizes.assign(ranks, tensor.numel() / ranks * tensor.element_size());
    return sizes;
  }
  check_count(splits.size(), ranks, "split sizes");
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows * tensor.element_size();
  int64_t left = rows;  // compared before each subtraction, because a sum of the splits could wrap
  for (const int64_t split : splits) {
    TORCH_CHECK(split >= 0, "split sizes must be 0 or more, but one is ", split);
    TORCH_CHECK(split <= left, "the split sizes must add up to the first dimension, ", rows,
                ", but add up to more");
    sizes.push_back(static_cast<size_t>(split * row));
    left -= split;
  }
  TORCH_CHECK(left == 0, "the split sizes must add up to the first dimension, ", rows, ", but add up to ",
              rows - left);
  return sizes;
}

// The part of an input for each rank; each part has as many elements as the output.
inline Tensors rows_for(const at::Tensor& output, const at::Tensor& input, int parts) {
  // An output without elements has inputs without elements, which have no rows.
  if (output.numel() == 0) return Tensors(parts, output);
  const at::Tensor line = flat(input).reshape({parts, -1});
  Tensors rows;
  for (int part = 0; part < parts; part++) rows.push_back(line.select(0, part));
  return rows;
}

inline int rank_in(int64_t number, int ranks, const char* what) {
  TORCH_CHECK(number >= 0 && number < ranks, what, " must be a rank from 0 to ", ranks - 1, ", but is ",
              number);
  return static_cast<int>(number);
}

}  // namespace acclimate_comm
