"""Ways to start ranks on many hosts, each a class that `registry.py` lists."""
