// The fallback: the kernel of every operator without its own kernel here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

// Runs the host's kernel over the same bytes, after checking that all tensors are on one device.
//
// torch's own at::native::cpu_fallback copies, and lets mm, linear, cat, embedding and where succeed on
// tensors of different devices.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
