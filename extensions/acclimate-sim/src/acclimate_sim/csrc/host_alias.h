// Host tensors over the bytes of a device's tensors, for the time of one operator.
#pragma once

#include "devices.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace sim {

inline bool on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

class HostAliases {
 public:
  // A host tensor over the same bytes; the same one for the same tensor, and one storage for views of one.
  at::Tensor to_host(const at::Tensor& device_tensor);

  // The device's tensor for a result of the host's operator: the argument itself, a view of one, or new
  // device memory that takes over the result without a copy.
  at::Tensor to_device(const at::Tensor& host_tensor, c10::DeviceIndex device);

  // Whether a tensor of the host is over a device's bytes, and no tensor of the caller.
  bool made(const at::Tensor& host_tensor) const;

  // Applies changes of the arguments other than their bytes: out= tensors that the operator resized.
  void write_back();

 private:
  struct StoragePair {
    c10::StorageImpl* device;
    c10::intrusive_ptr<c10::StorageImpl> host;
    bool is_result;  // adopted: nothing to write back
  };
  struct TensorPair {
    at::Tensor device, host;
  };
  c10::SmallVector<StoragePair, 8> storages_;
  c10::SmallVector<TensorPair, 8> tensors_;
};

// The dispatch keys of a sim tensor.
c10::DispatchKeySet sim_keys();

}  // namespace sim
