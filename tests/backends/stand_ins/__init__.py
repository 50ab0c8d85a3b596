"""Vendors' modules made of their recorded surfaces, on the emulated device.

A stand-in has exactly the names and arguments that a surface in ``../surfaces`` recorded of the real
module: another name is an AttributeError, another argument a TypeError. Behind them works acclimate's
emulated device, which takes the vendor's device type, torch's own ones included. So a backend runs as it is,
in a real process. What the vendor has and the emulation has not raises
:class:`~stand_ins.module.NotEmulatedError`, and is logged.
"""
