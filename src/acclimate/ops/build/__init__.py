"""Builds native ops: builder, recipe, toolchain, and the store of built libraries."""

from __future__ import annotations

from acclimate.imports import import_torch

import_torch()  # before the modules of this package import it
