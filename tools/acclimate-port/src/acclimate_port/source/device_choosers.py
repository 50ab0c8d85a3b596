"""The libraries that choose a device themselves, of CUDA's, Apple's and the host's, for a program."""

from __future__ import annotations

BY_IMPORT = ("fastai", "flair", "deepxde")
"""Packages that choose it for whatever a program computes with them."""
BY_CALL = ("stable_baselines3", "sb3_contrib", "catalyst", "ignite", "ray", "composer", "clip", "whisper")
"""Packages of which some functions do, where they get no device."""
IN_TEXTS = (
    *BY_IMPORT,
    *("stable_baselines3", "sb3_contrib", "catalyst", "ignite.distributed", "train.torch", "composer"),
    *("clip.load(", "whisper.load_model("),
)
"""One of these is in each file that uses such a library and may name torch nowhere."""
