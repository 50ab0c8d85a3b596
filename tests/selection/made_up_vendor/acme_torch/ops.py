"""The made-up vendor's op builders."""

from __future__ import annotations

import types

import torch


class DoubleBuilder:
    """Builds an op that doubles."""

    def load(self) -> types.SimpleNamespace:
        """The op, with nothing to compile."""
        return types.SimpleNamespace(double=lambda tensor: torch.add(tensor, tensor))
