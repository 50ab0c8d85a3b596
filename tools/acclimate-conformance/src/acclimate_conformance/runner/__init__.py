"""Runs the checks in a worker process that may crash or hang, and collects the results."""
