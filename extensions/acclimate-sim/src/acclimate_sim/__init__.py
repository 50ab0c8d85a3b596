"""An emulated accelerator: a second, real torch device type on host memory.

    ACCLIMATE_ACCELERATOR=sim python train.py

Importing this package imports no torch. The device comes into being when acclimate is asked for it by name.
"""
