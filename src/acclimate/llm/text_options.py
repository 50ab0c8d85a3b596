"""Says how a text is written. Imports no torch, so that a command can refuse an option at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from acclimate.errors import GenerationOptionError

DEFAULT_MAX_NEW_TOKENS = 100
CHAT_TEMPERATURE = 0.8
"""The temperature at which a model is sampled that names none."""
LOWEST_TEMPERATURE = 1e-4
"""Scores are divided by the temperature in float32; much lower ones give infinities, which break sampling."""


@dataclass(frozen=True)
class TextOptions:
    """Says how a text is written; the arguments of :func:`generate` of the same names."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float | None = 0.0
    """``None``: the model's own, or :data:`CHAT_TEMPERATURE` if it has none."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises :class:`GenerationOptionError` if a value is out of range."""
        if not 0 < self.max_new_tokens < 2**31:
            raise GenerationOptionError(
                f"max_new_tokens must be from 1 to 2^31 - 1; it is {self.max_new_tokens}"
            )
        heat = self.temperature
        if heat is not None and not (math.isfinite(heat) and (heat == 0 or heat >= LOWEST_TEMPERATURE)):
            raise GenerationOptionError(
                f"temperature must be 0, which always takes the likeliest token, or at least "
                f"{LOWEST_TEMPERATURE}; it is {heat}"
            )
        ranges = {"top_p": (self.top_p, 1), "min_p": (self.min_p, 1), "top_k": (self.top_k, 2**31 - 1)}
        for name, (value, most) in ranges.items():
            if value is not None and not 0 <= value <= most:
                raise GenerationOptionError(f"{name} must be from 0 to {most}; it is {value}")
        if heat == 0 and any(value is not None for value, _ in ranges.values()):
            names = ", ".join(name for name, (value, _) in ranges.items() if value is not None)
            raise GenerationOptionError(
                f"{names} has no effect at temperature 0, which always takes the likeliest token; set a "
                "temperature above 0, such as 0.8"
            )
        penalty = self.repetition_penalty
        if penalty is not None and not 0.1 <= penalty <= 10:
            raise GenerationOptionError(f"repetition_penalty must be from 0.1 to 10; it is {penalty}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise GenerationOptionError(f"seed must be from 0 to 2^63 - 1; it is {self.seed}")
        if "" in self.stop:
            raise GenerationOptionError("a stop text must not be empty, because every text contains it")
