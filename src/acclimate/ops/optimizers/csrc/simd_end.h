// Closes the namespace that simd_plain.h, avx2.h, avx512.h, avx512_bf16.h or neon.h opened.
}

#undef ACCLIMATE_INLINE
#undef ACCLIMATE_KERNEL
#undef ACCLIMATE_TARGET
