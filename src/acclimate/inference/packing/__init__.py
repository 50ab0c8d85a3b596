"""Weights that stay quantised while the model computes with them."""
