"""The names of torch.cuda in groups that behave alike, for the rules, the conditions and both targets."""

from __future__ import annotations

FIGURES = {
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached"),
}
"""Figures of memory in bytes, which are 0 while CUDA is unused."""
TELL_OF_DEVICE = {"get_device_name", "get_device_properties", "get_device_capability"}
"""Functions that tell about a device: the one that the rest of the program chooses."""
RESETS = {"reset_peak_memory_stats", "reset_accumulated_memory_stats"}
OLD_RESETS = {"reset_max_memory_allocated", "reset_max_memory_cached"}
"""Older names for resets, which torch.accelerator lacks."""
SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"}
"""Functions that change the random numbers, and without CUDA do nothing."""
CURRENT_STREAMS = ("current_stream", "default_stream")
STREAMS = ("Stream", "stream", "set_stream", *CURRENT_STREAMS)
LEAVE_CUDA_UNUSED = FIGURES | SEEDS | {"empty_cache", "memory_stats", "is_initialized"}
"""Names whose calls do nothing, or return nothing used, while CUDA is unused."""
NEVER_RAISE = LEAVE_CUDA_UNUSED | {
    *("is_available", "device_count", "is_bf16_supported", "get_rng_state_all", "OutOfMemoryError"),
    *("device", "Event", "Stream", "stream", *CURRENT_STREAMS),
}
"""Names whose calls raise nothing without CUDA."""
