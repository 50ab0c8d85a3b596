// acclimate::adam_ on the host.
#include "../../csrc/group_step.h"
#include "adam_call.h"

#include "../../csrc/simd/plain.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"

#if defined(__x86_64__)
#include "../../csrc/simd/avx2.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"

#include "../../csrc/simd/avx512_bf16.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"
#elif defined(__aarch64__)
#include "../../csrc/simd/neon.h"
#include "../../csrc/step_kernel.h"
#include "adam_rule.h"
#include "../../csrc/simd/end.h"
#endif

namespace acclimate {
namespace {

void adam_(StableIValue* stack, uint64_t, uint64_t) {
  AdamCall call{Arguments(stack)};
  run(call.group, call.coefficients, ACCLIMATE_STEP_RANGE(choose_isa(call.settings.isa), AdamRule));
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) {
  m.impl("adam_", &adam_);
}

}  // namespace
}  // namespace acclimate
