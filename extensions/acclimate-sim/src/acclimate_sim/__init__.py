"""An emulated accelerator: a second, real torch device type on host memory.

    ACCLIMATE_ACCELERATOR=sim python train.py

Importing this package does not import torch. The device is created when a program selects it by name.
"""
