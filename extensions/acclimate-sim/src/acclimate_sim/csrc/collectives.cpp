// Collectives: every operator of torch.distributed runs on the group's host backend, over the same bytes.
#include "devices.h"
#include "host_alias.h"
#include "tensor_uses.h"
#include "with_tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#ifndef SIM_NO_COLLECTIVES
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#ifdef SIM_IN_A_NAMED_SLOT
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#endif
#endif

namespace sim {
namespace {

#ifndef SIM_NO_COLLECTIVES
// torch.distributed.init_process_group() without a name gives a group no backend but the device's, which
// serves the host too.
void give_host_backend(const c10::IValue& value) {
  const auto group = value.toCustomClass<c10d::ProcessGroup>();
  const auto types = group->getDeviceTypes();
  const auto has = [&](c10::DeviceType type) {
    return std::find(types.begin(), types.end(), c10::Device(type)) != types.end();
  };
  if (has(kSim) && !has(c10::DeviceType::CPU))
    group->setBackend(c10::DeviceType::CPU, group->getBackendType(), group->getBackend(kSim));
}
#endif

void on_host_backend(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
#ifdef SIM_NO_COLLECTIVES  // as torch says it
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Could not run '", op.schema().name(), "' with arguments from the '",
                              kSimKey, "' backend.");
#endif
  HostAliases aliases;
  auto device = current_device();
  const std::string& name = op.schema().name();
  // Gloo splits the tensor along its first dimension; backends of devices take any shape.
  const bool in_one_tensor = name == "c10d::_allgather_base_" || name == "c10d::_reduce_scatter_base_";
  const auto count = op.schema().arguments().size(), results = op.schema().returns().size();
#ifndef SIM_NO_COLLECTIVES
  if (const auto group = op.schema().argumentIndexWithName("process_group"))
    give_host_backend((*stack)[stack->size() - count + *group]);
#endif
  for (size_t i = stack->size() - count; i < stack->size(); i++) {
    (*stack)[i] = with_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      if (!on_sim(tensor)) return tensor;
      device = tensor.device().index();
      TensorUses(device, op.schema().name()).writes(tensor);
      const at::Tensor host = aliases.to_host(tensor);
      return in_one_tensor && host.is_contiguous() ? host.view(-1) : host;
    });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    (*stack)[i] = with_tensors((*stack)[i],
                               [&](const at::Tensor& tensor) { return aliases.to_device(tensor, device); });
  }
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// These replace torch's own kernels for PrivateUse1 on purpose, without a warning.
torch::Library g_collectives(torch::Library::IMPL, "c10d", kSimKey, __FILE__, __LINE__);
const bool g_collectives_registered = [] {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard without_warnings(&quiet);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) != 0) continue;
    g_collectives.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host_backend>());
  }
  return true;
}();

}  // namespace
}  // namespace sim

#if defined(SIM_IN_A_NAMED_SLOT) && !defined(SIM_NO_COLLECTIVES)
namespace c10d {
namespace {

// DistributedDataParallel needs a timer on CUDA, which only builds of torch for CUDA have.
class HostTimer final : public Timer {
 public:
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, sim::kSim, HostTimer);

}  // namespace
}  // namespace c10d
#endif
