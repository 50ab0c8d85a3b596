"""This machine: cores, memory nodes, limits, huge pages, addresses, and how processes end."""
