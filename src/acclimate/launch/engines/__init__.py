"""Ways to start ranks on many hosts: one class in one file each, listed in `registry.py`."""
