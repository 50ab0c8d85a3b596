"""Ranks on other hosts: the launcher's coordinator, the agents, and their protocol."""
