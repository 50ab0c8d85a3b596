// acclimate::adagrad_ on the host.
#include "adagrad_call.h"

#define ACCLIMATE_RULE "../adagrad/csrc/adagrad_rule.h"
#include "../../csrc/every_isa.h"

ACCLIMATE_HOST_OP(adagrad_, AdagradCall, AdagradRule)
