"""``acclimate run``: starts and supervises a script's ranks on this host or on many, bound to cores.

The launcher does not import torch, so that the user waits only for the start of the ranks themselves.
"""
