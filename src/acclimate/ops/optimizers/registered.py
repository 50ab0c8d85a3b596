"""The optimizers that a caller has created through DeepSpeed's functions, by their numbers."""

from __future__ import annotations

import logging
from typing import Any

from acclimate.errors import InvalidOptimizerArgumentError

_logger = logging.getLogger("acclimate")


class Registered:
    """The optimizers of one kind.

    Args:
        kind: its name, as in ``create_adam`` without capitals.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._settings: dict[int, Any] = {}

    def create(self, number: int, kept: Any, should_log: bool, text: str) -> int:
        """Registers an optimizer with the values that its updates need. Returns 0."""
        self._settings[number] = kept
        if should_log:
            _logger.info("%s optimizer %d: %s.", self._kind, number, text)
        return 0

    def destroy(self, optimizer_id: int) -> int:
        """Removes a registration, if there is one. Returns 0."""
        self._settings.pop(optimizer_id, None)
        return 0

    def find(self, number: int) -> Any:
        """Returns the values that were stored for an optimizer.

        Raises:
            InvalidOptimizerArgumentError: no optimizer has that number.
        """
        if number not in self._settings:
            raise InvalidOptimizerArgumentError(
                f"There is no {self._kind} optimizer number {number}. "
                f"Call create_{self._kind.lower()}({number}) first."
            )
        return self._settings[number]
