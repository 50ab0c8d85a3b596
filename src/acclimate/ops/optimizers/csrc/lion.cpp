// acclimate::lion_ on the host.
#include "lion_call.h"

#define ACCLIMATE_RULE "lion_rule.h"
#include "every_isa.h"

ACCLIMATE_HOST_OP(lion_, LionCall, LionRule)
