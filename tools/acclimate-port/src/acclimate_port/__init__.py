"""Turns source that only runs on CUDA into source for any accelerator."""

__version__ = "0.1.0"
