"""An accelerator's record, which selection reads before importing the accelerator."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from acclimate.errors import InvalidBackendError

if TYPE_CHECKING:
    from acclimate.accelerator import Accelerator


@dataclass(frozen=True)
class Backend:
    """How to find and load one accelerator.

    A third party registers its own through the entry-point group ``acclimate.backends``. Two records may have
    the same name: they are two ways to use one accelerator, tried by rank.
    """

    name: str
    """The accelerator's name in ``DS_ACCELERATOR``."""
    target: str
    """``"module:Class"`` of the accelerator, imported only when it is chosen; called without arguments."""
    probe: Callable[[], str | None]
    """Returns why the accelerator cannot be used here, or ``None`` if it can. It may import the vendor's
    package, but must not create a device context. If it raises, that is the reason."""
    rank: int
    """Lower ranks are tried first. Built-in ranks are 10 apart, ``cuda`` has 90 and ``cpu`` 1000."""
    device_count: Callable[[], int] = lambda: 1
    """Returns how many devices this process could use, without importing torch; for the launcher."""
    device_type: str = ""
    """torch's name for the device; if empty, the record's name."""
    auto_detect: bool = True
    """Whether detection may choose it. ``False``: it can only be chosen by name."""
    yields_to: tuple[str, ...] = ()
    """Names of accelerators that detection prefers although they have a higher rank."""
    is_fallback: bool = False
    """Whether detection warns that it found nothing better."""
    remedy: str = ""
    """What to do if it cannot be used, as the start of a sentence: "Install torch_npu (…)"."""
    is_installed: Callable[[], bool] = lambda: True
    """Returns whether its software is installed, without importing torch or a vendor's package; for the
    launcher."""
    visible_devices_variable: Callable[[], str | None] = lambda: None
    """Returns the environment variable that limits the devices a process sees, without importing torch."""
    visible_devices_fallbacks: tuple[str, ...] = ()
    """Variables that the device's runtime reads instead if that one is not set."""
    exported_variable_prefixes: tuple[str, ...] = ()
    """Prefixes of the environment variables to export to ranks on other hosts."""

    @property
    def torch_type(self) -> str:
        """torch's name for the device."""
        return self.device_type or self.name

    def load(self) -> Accelerator:
        """Imports and returns the accelerator.

        Raises:
            InvalidBackendError: the target is not an ``Accelerator``.
        """
        from acclimate.accelerator import Accelerator  # imports torch
        from acclimate.accelerator.runtime import Declared
        from acclimate.accelerator.threads_at_exit import settle_at_exit

        accelerator = pkgutil.resolve_name(self.target)()
        if not isinstance(accelerator, Accelerator):
            raise InvalidBackendError(
                f'The target of the "{self.name}" record, {self.target}, returns a '
                f"{type(accelerator).__name__}; it must be a subclass of acclimate.Accelerator."
            )
        # Called here, so that a plug-in whose function fails is skipped now and does not fail later.
        variable = self.visible_devices_variable()
        accelerator._record = Declared(variable, self.exported_variable_prefixes)
        if accelerator.device_type != "cpu":  # autograd has no threads for the host
            settle_at_exit()
        return accelerator
