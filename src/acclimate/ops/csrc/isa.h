// The instruction sets a kernel is compiled for, and which of them this machine can run.
#pragma once

#include <cstdint>

// The instruction sets of this kind of processor, each with its number in acclimate.ops.simd and with what it
// needs besides those before it, all of which it includes. X gets the further arguments too.
// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
#if defined(__x86_64__)
#define ACCLIMATE_ISAS(X, ...)                                                                         \
  X(plain, 1, true, __VA_ARGS__)                                                                       \
  X(avx2, 2,                                                                                           \
    __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"), \
    __VA_ARGS__)                                                                                       \
  X(avx512, 3,                                                                                         \
    __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&                         \
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),                      \
    __VA_ARGS__)                                                                                       \
  X(avx512_bf16, 4, __builtin_cpu_supports("avx512bf16"), __VA_ARGS__)
#elif defined(__aarch64__)
#define ACCLIMATE_ISAS(X, ...) X(plain, 1, true, __VA_ARGS__) X(neon, 5, true, __VA_ARGS__)
#else
#define ACCLIMATE_ISAS(X, ...) X(plain, 1, true, __VA_ARGS__)
#endif

namespace acclimate {

// 0 means the best one of this machine.
#define ACCLIMATE_ENUMERATOR(name, number, ...) name = number,
enum class Isa : int64_t { best = 0, ACCLIMATE_ISAS(ACCLIMATE_ENUMERATOR) };

#define ACCLIMATE_ELEMENT(name, ...) Isa::name,
constexpr Isa isas[] = {ACCLIMATE_ISAS(ACCLIMATE_ELEMENT)};

constexpr bool are_in_order() {
  for (unsigned i = 1; i < sizeof(isas) / sizeof(isas[0]); ++i) {
    if (isas[i - 1] >= isas[i]) {
      return false;
    }
  }
  return true;
}
static_assert(are_in_order(), "an instruction set needs a larger number than those that it includes");

// False for a number of no instruction set.
inline bool runs_here(Isa isa) {
  bool runs = true;
#define ACCLIMATE_RUNS(name, number, needs, ...) \
  runs = runs && (needs);                        \
  if (isa == Isa::name) {                        \
    return runs;                                 \
  }
  ACCLIMATE_ISAS(ACCLIMATE_RUNS)
  return isa == Isa::best;
}

inline Isa best_isa() {
  static const Isa best = [] {
    Isa found = Isa::plain;
    for (Isa isa : isas) {
      found = runs_here(isa) ? isa : found;
    }
    return found;
  }();
  return best;
}

}  // namespace acclimate
