// The other file that the compiler is given; see unit_runtime.cpp.
#include "host_alias.cpp"
#include "tensor_uses.cpp"
#include "fallback.cpp"
#include "tensors.cpp"
#include "control.cpp"
