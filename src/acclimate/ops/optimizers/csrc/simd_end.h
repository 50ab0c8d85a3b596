// Closes the namespace that a simd_*.h opened.
}

#undef ACCLIMATE_INLINE
#undef ACCLIMATE_KERNEL
#undef ACCLIMATE_TARGET
