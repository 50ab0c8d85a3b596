"""Runs a copy of a model without its weights, to find which modules feed which."""
