// acclimate::adagrad_ on the host.
#include "adagrad_call.h"

#define ACCLIMATE_RULE "../adagrad/csrc/adagrad_rule.h"
#include "../../csrc/every_isa.h"

namespace acclimate {
namespace {

void adagrad_(StableIValue* stack, uint64_t, uint64_t) {
  AdagradCall call{Arguments(stack)};
  run(call.group, call.count_steps(), ACCLIMATE_STEP_RANGE(choose_isa(call.settings.isa), AdagradRule));
}

STABLE_TORCH_LIBRARY_IMPL(acclimate, CPU, m) { m.impl("adagrad_", &adagrad_); }

}  // namespace
}  // namespace acclimate
