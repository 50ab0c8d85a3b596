// Converts tensors to the memory that collectives move: dense, in logical order, on the CPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>

#include "call.h"
#include "collectives.h"

namespace acclimate_comm {

inline void check_host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu(), "the backend shm moves CPU tensors, but got a tensor on ",
              tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided,
              "the backend shm moves dense tensors, but got one with layout ", tensor.layout());
  // FSDP, among others, frees the memory of a tensor that keeps its shape.
  const size_t needed =
      tensor.is_nested() || tensor.numel() == 0
          ? 0
          : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                             tensor.storage_offset());
  TORCH_CHECK(tensor.storage().nbytes() >= needed, "the tensor needs ", needed,
              " bytes of memory, but its storage has ", tensor.storage().nbytes());
}

inline bool is_flat(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Returns the tensor if its memory is in logical order, else a copy; for tensors that are read.
inline at::Tensor flat(const at::Tensor& tensor) {
  check_host(tensor);
  return is_flat(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

// A tensor that is written. If its memory is not in logical order, finish() copies the result into it.
class Target {
 public:
  explicit Target(const at::Tensor& tensor, bool keeps_content = false) : tensor_(tensor) {
    check_host(tensor);
    TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                "the result must not be written to an expanded tensor, whose elements share memory. Pass a ",
                "clone() of it");
    if (is_flat(tensor)) {
      memory_ = tensor;
    } else if (keeps_content) {
      memory_ = flat(tensor);
    } else {
      memory_ = at::empty(tensor.sizes(), tensor.options());
    }
  }
  void* data() const { return memory_.data_ptr(); }
  const at::Tensor& memory() const { return memory_; }
  void finish() {
    if (memory_.is_same(tensor_)) return;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    tensor_.copy_(memory_);
  }

 private:
  at::Tensor tensor_;
  at::Tensor memory_;
};

// How a dtype is reduced: directly, or widened if it has no kernel.
struct Reducer {
  Reduce reduce;
  at::ScalarType dtype;
};

inline Reducer reducer_of(at::ScalarType dtype, Op op) {
  at::ScalarType computed = dtype;
  if (dtype == at::kComplexHalf) computed = at::kComplexFloat;
  if (at::isFloat8Type(dtype)) computed = at::kFloat;
  const Reduce reduce = op < Op::kNone ? find_reduce(static_cast<Dtype>(computed), op) : nullptr;
  TORCH_CHECK(reduce != nullptr, "the backend shm does not support the reduction ",
              describe({static_cast<uint8_t>(Kind::kAllReduce), static_cast<uint8_t>(op),
                        static_cast<uint8_t>(dtype), 0, 0, 0}));
  return {reduce, computed};
}

inline at::Tensor widened(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

inline Elements elements_of(const at::Tensor& tensor) {
  return {static_cast<size_t>(tensor.numel()), static_cast<size_t>(tensor.element_size())};
}

}  // namespace acclimate_comm
