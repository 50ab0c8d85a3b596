// Lists of tensors as the stable ABI passes them to a boxed kernel.
//
// torch::stable::Tensor counts references, which costs more than a step on a small tensor; a list that is
// read once only needs the handles.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "step.h"

namespace acclimate {

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

}  // namespace acclimate
