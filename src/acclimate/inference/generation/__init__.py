"""Generates text from a prompt, and stops all ranks at the same token on Ctrl-C."""
