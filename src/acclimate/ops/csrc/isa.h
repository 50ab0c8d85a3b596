// The instruction sets a kernel is compiled for, and which of them this machine can run.
#pragma once

#include <cstdint>

namespace acclimate {

// Numbered as in acclimate.ops.simd; 0 means the best one of this machine.
enum class Isa : int64_t { best = 0, plain = 1, avx2 = 2, avx512 = 3, avx512_bf16 = 4, neon = 5 };

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
inline bool runs_here(Isa isa) {
  switch (isa) {
    case Isa::best:
    case Isa::plain:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return runs_here(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::avx512_bf16:
      return runs_here(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    case Isa::neon:
      return true;
#endif
    default:
      return false;
  }
}

inline Isa best_isa() {
  static const Isa best = [] {
    for (Isa isa : {Isa::avx512_bf16, Isa::avx512, Isa::avx2, Isa::neon}) {
      if (runs_here(isa)) {
        return isa;
      }
    }
    return Isa::plain;
  }();
  return best;
}

}  // namespace acclimate
