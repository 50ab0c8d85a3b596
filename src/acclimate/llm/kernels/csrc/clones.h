// Functions that the compiler compiles once for each instruction set. The loader chooses one that the
// processor can run, before the library could be told of ACCLIMATE_CPU_ISA. It has no effect on them and
// needs none: no multiplication and addition are fused, so all of them round in the same way.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__)
#define ACCLIMATE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ACCLIMATE_CLONES
#endif
#define ACCLIMATE_INLINE inline __attribute__((always_inline))
