// acclimate::adagrad_ on the host.
#include "adagrad_call.h"

#define ACCLIMATE_RULE "adagrad_rule.h"
#include "every_isa.h"

ACCLIMATE_HOST_OP(adagrad_, AdagradCall, AdagradRule)
