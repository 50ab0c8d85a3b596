"""All checks, by category in the order of the interface's documentation; imports none before it is asked."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from acclimate_conformance.checks.check import Check

HOME = Path(__file__).parents[1] / "checks"
_CATEGORIES: dict[str, tuple[str, ...]] = {
    "devices": ("current", "waiting", "blocks", "keeping", "walks"),
    "random": (
        "generators", "devices", "states", "ranges", "distributions", "layouts", "refusals", "draws", "walks",
    ),
    "streams": ("order", "state", "waiting", "deliveries", "elsewhere", "lifetimes", "others", "walks"),
    "memory": (
        "figures", "agreement", "capacity", "devices", "hard_cases", "small", "training", "owners",
        "families", "full", "walks",
    ),
    "dtypes": (
        "arithmetic", "shapes", "exactness", "promotion", "edges", "conversions", "copies", "operators",
        "views", "known", "formulas", "repeats", "calls_apart", "autograd", "mixed", "scaling",
        "sampled.checks", "far_places", "many_places",
    ),
    "graphs": (
        "replays", "captures", "kinds", "made_within", "numbers", "surroundings", "bounds", "modes",
        "changed_shapes", "walks",
    ),
    "pinning": ("contents", "shapes", "parts", "seen_otherwise"),
    "ops": ("builders", "optimizers", "aio", "aio_arguments", "packed_weights", "normalising"),
    "runtime": (
        "marks", "compiling", "recomputing", "following", "results", "types", "side_effects", "saved",
        "tensors", "storages", "functions", "modules", "foreign", "transformed", "combined", "fakes", "names",
        "several", "torch_only", "walks",
    ),
    "communication": ("collectives",),
}  # fmt: skip
"""By category, the modules of its checks in order."""

_NAMES = (
    "signatures",
    *(f"{category}.{name}" for category, names in _CATEGORIES.items() for name in names),
    "launching",
)
FILES = tuple(HOME / f"{name.replace('.', '/')}.py" for name in _NAMES)
"""The files that pytest collects, in order."""


def checks_in(value: object) -> list[Check]:
    """The checks in one attribute of a module: a check, or a tuple of them."""
    from acclimate_conformance.checks.check import Check

    return [check for check in (value if isinstance(value, tuple) else (value,)) if isinstance(check, Check)]


def checks() -> list[Check]:
    """Every check, each category's signatures first."""
    modules = [importlib.import_module(f"acclimate_conformance.checks.{name}") for name in _NAMES]
    found = [check for module in modules for value in vars(module).values() for check in checks_in(value)]
    order = list(dict.fromkeys(check.category for check in found))
    return sorted(found, key=lambda check: order.index(check.category))
