// Functions of which the compiler makes one for each set of instructions, and the loader chooses. Every
// processor rounds alike, since nothing is contracted.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__)
#define ACCLIMATE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ACCLIMATE_CLONES
#endif
#define ACCLIMATE_INLINE inline __attribute__((always_inline))
