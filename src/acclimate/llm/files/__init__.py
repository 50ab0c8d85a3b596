"""Checks a model's files before anything is built from them, and opens them."""
