"""How a native op becomes a library: builder, recipe, compilers, and the store of what was built."""

from __future__ import annotations

from acclimate.imports import import_torch

import_torch()  # before the modules of this package do
