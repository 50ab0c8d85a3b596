// acclimate::lion_ on the host.
#include "lion_call.h"

#define ACCLIMATE_RULE "../lion/csrc/lion_rule.h"
#include "../../csrc/every_isa.h"

ACCLIMATE_HOST_OP(lion_, LionCall, LionRule)
