"""Decides how each module of a model is split."""
