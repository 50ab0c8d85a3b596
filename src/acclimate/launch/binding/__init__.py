"""Divides cores and memory nodes among ranks, binds ranks to them, and draws the diagram."""
