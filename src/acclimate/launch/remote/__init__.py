"""The ranks of other hosts: the launcher's coordinator, the agents it talks to, and their protocol."""
