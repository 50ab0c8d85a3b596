"""``acclimate port``: source that only runs on CUDA becomes source for any accelerator. It needs no torch."""
