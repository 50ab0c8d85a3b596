// acclimate::adam_ on the host.
#include "adam_call.h"

#define ACCLIMATE_RULE "../adam/csrc/adam_rule.h"
#include "../../csrc/every_isa.h"

namespace acclimate {
namespace {

void adam_(StableIValue* stack, uint64_t, uint64_t) {
  AdamCall call{Arguments(stack)};
  run(call.group, call.count_steps(), ACCLIMATE_STEP_RANGE(choose_isa(call.settings.isa), AdamRule));
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) { m.impl("adam_", &adam_); }

}  // namespace
}  // namespace acclimate
