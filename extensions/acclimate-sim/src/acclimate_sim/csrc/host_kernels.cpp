// Operators for which torch would compose a result of other operators, although the host has a kernel.
//
// For some 400 operators torch has a kernel for all devices that calls other operators: mul.Tensor becomes
// empty_strided and mul.out, layer_norm a batch norm. It takes precedence over a device's fallback.
// Registering the fallback for them gives exactly the host's numbers, at the cost of one operator instead of
// three.
//
// Kaiser's window has only the kernel for all devices, which finds a device's kernel in another way.
#include "fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sim {
namespace {

torch::Library g_host_kernels(torch::Library::IMPL, "aten", kSimKey, __FILE__, __LINE__);

#ifndef SIM_IN_A_NAMED_SLOT
torch::Library g_nested_kernels(torch::Library::IMPL, "aten", c10::DispatchKey::NestedTensorPrivateUse1,
                                __FILE__, __LINE__);
#endif

const bool g_host_kernels_registered = [] {
  using c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema()) continue;
    const bool composed = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                          op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    const bool is_kaiser_window = name.name == "aten::kaiser_window";
    const bool ours = op->hasKernelForDispatchKey(kSimKey);
    if (composed && !ours && (is_kaiser_window || op->hasKernelForDispatchKey(DispatchKey::CPU))) {
      g_host_kernels.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
#ifndef SIM_IN_A_NAMED_SLOT
    if (op->hasKernelForDispatchKey(DispatchKey::NestedTensorCPU) &&
        !op->hasKernelForDispatchKey(DispatchKey::NestedTensorPrivateUse1)) {
      g_nested_kernels.impl(toString(name).c_str(),
                            torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
#endif
  }
  return true;
}();

}  // namespace
}  // namespace sim
