#include "reduce.h"

namespace acclimate_comm {

Reduce find_reduce_plain(Dtype dtype, Op op);
#if defined(__x86_64__)
Reduce find_reduce_avx2(Dtype dtype, Op op);
Reduce find_reduce_avx512(Dtype dtype, Op op);
#endif

namespace {

enum class Isa { kPlain, kAvx2, kAvx512 };

// __builtin_cpu_supports also checks that the operating system saves the wide registers.
Isa best_here() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return Isa::kPlain;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  return Isa::kAvx2;
#else
  return Isa::kPlain;
#endif
}

const Isa g_isa = best_here();

}  // namespace

Reduce find_reduce(Dtype dtype, Op op) {
  Reduce found = nullptr;
#if defined(__x86_64__)
  if (g_isa == Isa::kAvx512) found = find_reduce_avx512(dtype, op);
  if (g_isa == Isa::kAvx2) found = find_reduce_avx2(dtype, op);
#endif
  return found != nullptr ? found : find_reduce_plain(dtype, op);
}

const char* instruction_set() {
  return g_isa == Isa::kAvx512 ? "avx512" : g_isa == Isa::kAvx2 ? "avx2" : "plain";
}

}  // namespace acclimate_comm
