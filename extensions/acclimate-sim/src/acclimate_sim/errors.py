"""What can go wrong that is this package's own."""

from __future__ import annotations

from acclimate import AcclimateError


class ProfileError(AcclimateError, ValueError):
    """``ACCLIMATE_SIM`` or ``ACCLIMATE_SIM_VISIBLE_DEVICES`` says something it cannot say."""


class DeviceInUseError(AcclimateError, RuntimeError):
    """Another package has already given torch its one device type from outside."""


class CodeGenerationError(AcclimateError, NotImplementedError):
    """Code is to be generated for the emulated device, which is not possible."""
