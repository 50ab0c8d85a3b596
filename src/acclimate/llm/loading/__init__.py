"""Finds a model, and loads it on the accelerator: whole, split over ranks, or without weights."""
