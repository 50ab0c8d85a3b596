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

  // The device's tensor for what the host's operator returned: the argument itself, a view of one, or new
  // memory of the device that takes the operator's result over without a copy.
  at::Tensor to_device(const at::Tensor& host_tensor, c10::DeviceIndex device);

  // Carries over what the operator changed of its arguments besides the bytes: out= tensors that it resized.
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
