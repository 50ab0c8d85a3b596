"""Tests of the device: the code that they control, and whether they may be true on a CPU-only machine."""
