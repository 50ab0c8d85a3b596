// acclimate::lion_ on CUDA: one launch for a whole parameter group.
#include "device_group.cuh"
#include "lion_call.h"

#include "simd_cuda.h"
#include "lion_rule.h"
#include "step_kernel.cuh"
#include "simd_end.h"

namespace acclimate {
namespace {

void lion_(StableIValue* stack, uint64_t, uint64_t) {
  LionCall call{Arguments(stack)};
  cuda::step_group<cuda::LionRule>(call.group, call.count_steps());
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CUDA, m) { m.impl("lion_", &lion_); }

}  // namespace
}  // namespace acclimate
