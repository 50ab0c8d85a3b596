"""What selection knows of an accelerator before anything of it is imported."""

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

    A third party registers its own through the entry-point group ``acclimate.backends``. Two records may
    share a name: two ways to the same accelerator, tried by rank.
    """

    name: str
    """What ``DS_ACCELERATOR`` says."""
    target: str
    """``"module:Class"`` of the accelerator, imported only when it is chosen; called with no argument."""
    probe: Callable[[], str | None]
    """Tells why the accelerator cannot be used here, or ``None`` when it can. May import the vendor's
    package, must not create a device context; whatever it raises counts as a reason."""
    rank: int
    """Lower is tried first. The built-in ones are 10 apart, ``cuda`` at 90 and ``cpu`` at 1000."""
    device_count: Callable[[], int] = lambda: 1
    """How many devices this process could use, told without importing torch; for the launcher."""
    device_type: str = ""
    """torch's name for the device; the record's name where empty."""
    auto_detect: bool = True
    """Whether it may be chosen by detection. ``False``: only by name."""
    yields_to: tuple[str, ...] = ()
    """Names of accelerators that detection prefers over this one although they rank after it."""
    is_fallback: bool = False
    """Whether detection ends here when it found nothing better, which users should be told."""
    remedy: str = ""
    """What to do when it cannot be used, as the start of a sentence: "Install torch_npu (…)"."""
    is_installed: Callable[[], bool] = lambda: True
    """Whether the software that it needs is installed, told without importing torch or a vendor's package;
    for the launcher."""
    visible_devices_variable: Callable[[], str | None] = lambda: None
    """Gives the environment variable that limits which devices a process sees, without importing torch."""
    exported_variable_prefixes: tuple[str, ...] = ()
    """Beginnings of the names of environment variables that ranks on other hosts need."""

    @property
    def torch_type(self) -> str:
        """torch's name for the device."""
        return self.device_type or self.name

    def load(self) -> Accelerator:
        """The accelerator itself.

        Raises:
            InvalidBackendError: the target is not an ``Accelerator``.
        """
        from acclimate.accelerator import Accelerator  # imports torch

        accelerator = pkgutil.resolve_name(self.target)()
        if not isinstance(accelerator, Accelerator):
            raise InvalidBackendError(
                f'The "{self.name}" record points to {self.target}, which gives a '
                f"{type(accelerator).__name__}; it has to be a subclass of acclimate.Accelerator."
            )
        # Asked here, so that a plug-in whose function fails is passed over now, and no user meets it later.
        self.visible_devices_variable()
        accelerator._record = self
        return accelerator
