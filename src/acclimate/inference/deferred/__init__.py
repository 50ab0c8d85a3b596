"""Tensors that are read only when, and only where, their values are needed."""
