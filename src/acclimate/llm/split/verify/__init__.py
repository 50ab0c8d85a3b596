"""Compares the blocks of a plan, whole and split."""
