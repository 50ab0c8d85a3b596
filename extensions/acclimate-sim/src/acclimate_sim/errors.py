"""The errors of this package."""

from __future__ import annotations

from acclimate import AcclimateError


class ProfileError(AcclimateError, ValueError):
    """``ACCLIMATE_SIM`` or ``ACCLIMATE_SIM_VISIBLE_DEVICES`` has an invalid value."""


class DeviceInUseError(AcclimateError, RuntimeError):
    """Another package has already registered torch's one out-of-tree device type (PrivateUse1)."""


class CodeGenerationError(AcclimateError, NotImplementedError):
    """The emulated device has no code generator."""
