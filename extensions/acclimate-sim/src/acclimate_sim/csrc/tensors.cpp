// Operators that every device must implement: creating tensors, copying, reading one value back, and views.
#include "allocator.h"
#include "context.h"
#include "devices.h"
#include "fallback.h"
#include "host_alias.h"
#include "pinned.h"
#include "tensor_uses.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::Layout;
using c10::MemoryFormat;
using c10::ScalarType;
using c10::SymIntArrayRef;
using std::optional;

// -- creating ----------------------------------------------------------------------------------

c10::DeviceGuard check_factory(optional<ScalarType> dtype, optional<Layout> layout, optional<Device> device,
                               optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided, "sim: this device has no ",
                              *layout, " tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
  check_dtype(c10::dtype_or_default(dtype));
  const Device wanted = c10::device_or_default(device);
  return c10::DeviceGuard(Device(kSim, resolve(wanted.index())));
}

Tensor empty(IntArrayRef size, optional<ScalarType> dtype, optional<Layout> layout, optional<Device> device,
             optional<bool> pinned, optional<MemoryFormat> format) {
  const auto on = check_factory(dtype, layout, device, pinned);
  return at::detail::empty_generic(size, device_allocator(), sim_keys(), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype,
                     optional<Layout> layout, optional<Device> device, optional<bool> pinned) {
  const auto on = check_factory(dtype, layout, device, pinned);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), sim_keys(),
                                           c10::dtype_or_default(dtype));
}

Tensor zeros_without_storage(IntArrayRef size, optional<ScalarType> dtype, optional<Layout> layout,
                             optional<Device> device, optional<bool> pinned) {
  Tensor made = empty(size, dtype, layout, device, pinned, std::nullopt);
  if (made.nbytes()) std::memset(made.storage().mutable_data(), 0, made.nbytes());
  return made;
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, optional<MemoryFormat> format) {
  c10::DeviceGuard on(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

// -- copying -----------------------------------------------------------------------------------

void copy_bytes(const Tensor& from, const Tensor& to) {
  HostAliases aliases;
  Tensor source = on_sim(from) ? aliases.to_host(from) : from;
  Tensor target = on_sim(to) ? aliases.to_host(to) : to;
  at::native::copy_(target, source, false);
}

void copy_between_devices(const Tensor& from, const Tensor& to) {
  // As on CUDA: on the source's stream, after the work of the destination's stream, which then waits.
  const auto source = current_stream(from.device().index()), target = current_stream(to.device().index());
  wait_for_stream(source, target);
  const TensorUses uses(from.device().index(), "a copy between devices");
  uses.reads(from);
  uses.writes(to);
  copy_bytes(from, to);
  wait_for_stream(target, source);
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto device = from.device().index();
  const TensorUses uses(device, "a copy to the host");
  uses.reads(from);
  copy_bytes(from, to);
  if (!non_blocking || !is_pinned(to.const_data_ptr())) {
    host_waits_for_stream(current_stream(device));  // a copy to memory that is not pinned always waits
  } else if (uses.work() && to.numel()) {
    const auto [begin, end] = extent(to);
    deliver_later(static_cast<char*>(to.storage().mutable_data()) + begin, end - begin, to.scalar_type(),
                  *uses.work());
  }
}

void copy_from_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto device = to.device().index();
  const TensorUses uses(device, "a copy from the host");
  uses.writes(to);
  if (uses.work() && from.numel()) {
    const auto [begin, end] = extent(from);
    deliver_now(static_cast<const char*>(from.storage().data()) + begin, end - begin);
  }
  copy_bytes(from, to);
  if (!non_blocking || !is_pinned(from.const_data_ptr())) host_waits_for_stream(current_stream(device));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  for (const Tensor& tensor : {from, to}) {
    if (on_sim(tensor)) require_context(tensor.device().index());
  }
  if (on_sim(from) && on_sim(to)) {
    if (from.device() != to.device()) {
      copy_between_devices(from, to);
    } else {
      const TensorUses uses(to.device().index(), "aten::copy_");
      uses.reads(from);
      uses.writes(to);
      copy_bytes(from, to);
    }
  } else if (on_sim(from)) {
    copy_to_host(from, to, non_blocking);
  } else {
    copy_from_host(from, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize_(to, from.sym_sizes(), std::nullopt);
  return copy_from(from, to, false);
}

// For a device type that torch has itself, it calls that device's copy kernel and not _copy_from.
Tensor& copy_over(Tensor& to, const Tensor& from, bool non_blocking) {
  copy_from(from, to, non_blocking);
  return to;
}

at::Scalar read_value(const Tensor& tensor) {
  const auto device = tensor.device().index();
  const TensorUses uses(device, "aten::item");
  uses.reads(tensor);
  host_waits_for_stream(current_stream(device));
  HostAliases aliases;
  return at::native::_local_scalar_dense_cpu(aliases.to_host(tensor));
}

// -- views: other sizes over the same storage ------------------------------------------------------

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                  optional<c10::SymInt> offset) {
  const auto start = offset ? optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), start);
}
Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// Whether a Parameter can take over a tensor of another device (`param.data = …`), so that Module.to() keeps
// Parameters and tied weights; if not, Module.to() creates new ones, as on some vendors' devices.
bool takes_over(const Tensor& self, const Tensor& from) {
  const auto dense = [](const Tensor& tensor) { return tensor.device().is_cpu() || on_sim(tensor); };
  if (self.device().type() == from.device().type()) return self.key_set() == from.key_set();
  return !settings().replaces_parameters && dense(self) && dense(from);
}

void record_stream(Tensor&, c10::Stream) {}

SIM_LIBRARY_IMPL(aten, SIM_SLOT, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zeros_without_storage);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
#ifdef SIM_IN_A_NAMED_SLOT
  m.impl("copy_", copy_over);
#endif
  m.impl("_local_scalar_dense", read_value);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("_has_compatible_shallow_copy_type", takes_over);
  m.impl("record_stream", record_stream);
}

// A copy resolves lazy conjugation and negation itself. Otherwise torch would first resolve them with a
// clone, which is a copy again, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Everything else. The two convolutions have kernels for all devices, which only raise, so they are named.
SIM_LIBRARY_IMPL(_, SIM_SLOT, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
SIM_LIBRARY_IMPL(aten, SIM_SLOT, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
#ifndef SIM_IN_A_NAMED_SLOT
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
// A host's sparse tensor that is copied here, and torch.sparse_coo_tensor(), reach no operator of this
// device.
void refuse_sparse(const c10::OperatorHandle&, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: this device has no Sparse tensors");
}
void refuse_sparse_csr(const c10::OperatorHandle&, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: this device has no SparseCsr tensors");
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse_csr>());
}
// Copies nested tensors between devices: the memory of all parts is one tensor of its device.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_to_copy", at::native::_to_copy_nested);
  m.impl("empty_like", at::native::empty_like_nested);
  m.impl("copy_", at::native::copy_nested_);
}
#endif

}  // namespace
}  // namespace sim
