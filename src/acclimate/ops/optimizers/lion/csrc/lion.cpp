// acclimate::lion_ on the host.
#include "lion_call.h"

#define ACCLIMATE_RULE "../lion/csrc/lion_rule.h"
#include "../../csrc/every_isa.h"

namespace acclimate {
namespace {

void lion_(StableIValue* stack, uint64_t, uint64_t) {
  LionCall call{Arguments(stack)};
  run(call.group, call.count_steps(), ACCLIMATE_STEP_RANGE(choose_isa(call.settings.isa), LionRule));
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) { m.impl("lion_", &lion_); }

}  // namespace
}  // namespace acclimate
