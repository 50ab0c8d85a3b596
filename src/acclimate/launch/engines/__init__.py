"""Ways to start ranks on many hosts, each a class in a file of its own, listed in `registry.py`."""
