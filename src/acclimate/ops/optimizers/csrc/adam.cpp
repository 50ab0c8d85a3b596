// acclimate::adam_ on the host.
#include "adam_call.h"

#define ACCLIMATE_RULE "adam_rule.h"
#include "every_isa.h"

ACCLIMATE_HOST_OP(adam_, AdamCall, AdamRule)
