#include "reduce_kernels.h"

namespace acclimate_comm {

Reduce find_reduce_avx512(Dtype dtype, Op op) { return find_float(dtype, op); }

}  // namespace acclimate_comm
