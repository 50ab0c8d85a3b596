// Functions that the compiler compiles once for each instruction set; the loader chooses one. All of them
// round in the same way, since no multiplication and addition are fused, so ACCLIMATE_CPU_ISA does not choose
// among them.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__)
#define ACCLIMATE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ACCLIMATE_CLONES
#endif
#define ACCLIMATE_INLINE inline __attribute__((always_inline))
