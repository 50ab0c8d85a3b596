// The other compiled file; see unit_runtime.cpp.
#include "host_alias.cpp"
#include "tensor_uses.cpp"
#include "other_numbers.cpp"
#include "fallback.cpp"
#include "tensors.cpp"
#include "attention.cpp"
#include "recurrent.cpp"
#include "sync_batch_norm.cpp"
#include "host_kernels.cpp"  // after the operators that have kernels of their own
#ifdef SIM_AUTOCAST
#include "autocast.cpp"
#endif
#include "collectives.cpp"
#include "control.cpp"
