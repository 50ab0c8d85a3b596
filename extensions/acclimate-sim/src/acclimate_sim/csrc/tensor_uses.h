// Reports an operator's uses of its tensors' bytes to the synchronisation check.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace sim {

// One operator on the current stream of a device. Does nothing unless sync=check.
class TensorUses {
 public:
  TensorUses() = default;  // notes nothing
  TensorUses(c10::DeviceIndex device, const char* op);
  TensorUses(c10::DeviceIndex device, const std::string& op) : TensorUses(device, op.c_str()) {}
  void reads(const at::Tensor& tensor) const { uses(tensor, false); }
  void writes(const at::Tensor& tensor) const { uses(tensor, true); }
  const std::optional<Work>& work() const { return work_; }

 private:
  void uses(const at::Tensor& tensor, bool writes) const;
  std::optional<Work> work_;
};

// The range of bytes of a tensor's elements, within its storage.
std::pair<size_t, size_t> extent(const at::Tensor& tensor);

}  // namespace sim
