// acclimate::adam_ on CUDA: one launch for a whole parameter group.
#include "device_group.cuh"
#include "adam_call.h"

#include "simd_cuda.h"
#include "adam_rule.h"
#include "step_kernel.cuh"
#include "simd_end.h"

namespace acclimate {
namespace {

void adam_(StableIValue* stack, uint64_t, uint64_t) {
  AdamCall call{Arguments(stack)};
  cuda::step_group<cuda::AdamRule>(call.group, call.count_steps());
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CUDA, m) { m.impl("adam_", &adam_); }

}  // namespace
}  // namespace acclimate
