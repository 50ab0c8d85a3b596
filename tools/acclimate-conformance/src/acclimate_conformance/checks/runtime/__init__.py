"""Checks of one category of the interface: runtime."""
