#include "host_alias.h"

#include "allocator.h"
#include "devices.h"

#include <ATen/NestedTensorImpl.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace sim {
namespace {

at::Tensor make_tensor(const c10::intrusive_ptr<c10::StorageImpl>& storage, c10::DispatchKeySet keys,
                       const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  const auto* from = like.unsafeGetTensorImpl();
  auto* to = made.unsafeGetTensorImpl();
  if (like.is_nested()) {  // sizes and strides of its parts, which are tensors of the host
    to->set_sizes_contiguous({static_cast<int64_t>(storage->nbytes() / like.dtype().itemsize())});
    const auto* nested = at::native::get_nested_tensor_impl(like);
    return at::detail::make_tensor<at::native::NestedTensorImpl>(
        made, nested->get_nested_sizes(), nested->get_nested_strides(), nested->get_storage_offsets());
  }
  to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
  if (like.is_conj()) to->_set_conj(true);
  if (like.is_neg()) to->_set_neg(true);
  if (from->is_wrapped_number()) to->set_wrapped_number(true);
  return made;
}

// A host storage over a device storage's bytes, which it keeps alive: an asynchronous collective outlives its
// call.
c10::intrusive_ptr<c10::StorageImpl> alias_of(c10::StorageImpl* device) {
  c10::raw::intrusive_ptr::incref(device);
  c10::DataPtr bytes(
      device->mutable_data(), device,
      [](void* owner) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(owner)); },
      c10::Device(c10::DeviceType::CPU));
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), device->nbytes(),
                                               std::move(bytes), c10::GetCPUAllocator(),
                                               /*resizable=*/true);
}

c10::intrusive_ptr<c10::StorageImpl> take_over(const at::Tensor& host_tensor, c10::DeviceIndex device) {
  auto* host = host_tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const size_t bytes = host->nbytes();
  c10::DataPtr data;
  if (host_tensor.storage().use_count() == 1) {
    data = host->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
  } else {  // another tensor on the host shares the bytes
    data = c10::GetCPUAllocator()->allocate(bytes);
    if (bytes) std::memcpy(data.get(), host->data(), bytes);
  }
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               adopt(std::move(data), bytes, device), device_allocator(),
                                               /*resizable=*/true);
}

}  // namespace

c10::DispatchKeySet sim_keys() { return c10::DispatchKeySet(kSimKey); }

at::Tensor HostAliases::to_host(const at::Tensor& device_tensor) {
  for (const auto& pair : tensors_) {
    if (pair.device.is_same(device_tensor)) return pair.host;
  }
  auto* storage = device_tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  TORCH_CHECK_NOT_IMPLEMENTED(storage, "sim: a tensor of type ", device_tensor.toString(),
                              " has no memory of its own, so no operator can run on it.");
  c10::intrusive_ptr<c10::StorageImpl> alias;
  for (const auto& pair : storages_) {
    if (pair.device == storage) alias = pair.host;
  }
  if (!alias) {
    alias = alias_of(storage);
    storages_.push_back({storage, alias, false});
  }
  at::Tensor host = make_tensor(alias, c10::DispatchKeySet(c10::DispatchKey::CPU), device_tensor);
  tensors_.push_back({device_tensor, host});
  return host;
}

at::Tensor HostAliases::to_device(const at::Tensor& host_tensor, c10::DeviceIndex device) {
  if (!host_tensor.defined() || !host_tensor.device().is_cpu()) return host_tensor;
  for (const auto& pair : tensors_) {
    if (pair.host.is_same(host_tensor)) return pair.device;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(host_tensor.layout() == at::kStrided, "sim: this device has no ",
                              host_tensor.layout(), " tensors");
  auto* storage = host_tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  c10::intrusive_ptr<c10::StorageImpl> owner;
  for (const auto& pair : storages_) {
    if (pair.host.get() == storage) owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(pair.device);
  }
  if (!owner) {
    check_dtype(host_tensor.scalar_type());
    owner = take_over(host_tensor, device);
    storages_.push_back({owner.get(), c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage), true});
  }
  at::Tensor made = make_tensor(owner, sim_keys(), host_tensor);
  tensors_.push_back({made, host_tensor});
  return made;
}

bool HostAliases::made(const at::Tensor& host_tensor) const {
  for (const auto& pair : tensors_) {
    if (pair.host.is_same(host_tensor)) return true;
  }
  return false;
}

void HostAliases::write_back() {
  for (const auto& pair : storages_) {
    const bool replaced =
        pair.host->data() != pair.device->data() || pair.host->nbytes() != pair.device->nbytes();
    if (pair.is_result || !replaced) continue;
    const size_t bytes = pair.host->nbytes();
    auto data = pair.host->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
    pair.device->set_data_ptr_noswap(adopt(std::move(data), bytes, pair.device->device().index()));
    pair.device->set_nbytes(bytes);
  }
  for (const auto& pair : tensors_) {
    if (pair.device.is_nested()) continue;  // no operator resizes one
    auto *device = pair.device.unsafeGetTensorImpl(), *host = pair.host.unsafeGetTensorImpl();
    if (device->sizes() != host->sizes() || device->strides() != host->strides() ||
        device->storage_offset() != host->storage_offset()) {
      device->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
    }
  }
}

}  // namespace sim
