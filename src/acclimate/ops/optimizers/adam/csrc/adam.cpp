// acclimate::adam_ on the host.
#include "adam_call.h"

#define ACCLIMATE_RULE "../adam/csrc/adam_rule.h"
#include "../../csrc/every_isa.h"

ACCLIMATE_HOST_OP(adam_, AdamCall, AdamRule)
