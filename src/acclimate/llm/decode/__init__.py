"""Runs a decoder step as one call, from a description that is verified against transformers' model."""
