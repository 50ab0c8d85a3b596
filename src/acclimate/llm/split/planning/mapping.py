"""Reads how modules are to be split from the user's mapping and the model's published plan."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from acclimate.errors import PlanError

Style = Literal["columns", "rows", "experts", "vocabulary", "replicated"]
"""How one module is to be split."""
_STYLES: dict[str, Style] = {
    "columns": "columns", "column": "columns", "colwise": "columns",
    "rows": "rows", "row": "rows", "rowwise": "rows",
    "experts": "experts", "vocabulary": "vocabulary",
    "replicated": "replicated", "skip": "replicated", "whole": "replicated",
}  # fmt: skip
_PUBLISHED: dict[str, Style] = {"colwise": "columns", "rowwise": "rows"}
"""Parts of the words in published plans, and the style that each means."""


@dataclass(frozen=True)
class Styles:
    """How modules are to be split, by their names."""

    user: Mapping[str, Style]
    """The user's mapping; a plan that cannot follow it is refused."""
    published: Mapping[str, Style]
    """The model's published plan."""


def read_mapping(user: Mapping[str, Any] | None, modules: Iterable[str]) -> dict[str, Style]:
    """Returns how the user wants each module to be split.

    Args:
        user: maps module name patterns (``model.layers.*.mlp.up_proj``) to ``columns``, ``rows``,
            ``experts``, ``vocabulary`` or ``replicated``; or is DeepSpeed's ``partition_config``.
        modules: the names of the model's modules.

    Raises:
        PlanError: a pattern matches no module, or a value is unknown.
    """
    if not user:
        return {}
    names = list(modules)
    config = _partition_config(user)
    if config is not None:
        return _read_config(config, names)
    found: dict[str, Style] = {}
    for pattern, value in user.items():
        style = _style(pattern, value)
        fitting = fnmatch.filter(names, pattern.removesuffix(".weight"))
        if not fitting:
            raise PlanError(f"No module fits the pattern {pattern!r} of the mapping.{_close(pattern, names)}")
        found.update(dict.fromkeys(fitting, style))
    return found


def _read_config(config: Mapping[str, Any], names: list[str]) -> dict[str, Style]:
    """Returns how DeepSpeed's ``partition_config`` splits each module."""
    found: dict[str, Style] = {}
    for spec in config.get("layer_specs", ()):
        for pattern in spec.get("patterns", ()):
            try:
                expression = re.compile(pattern)
            except re.error as error:
                raise PlanError(f"The pattern {pattern!r} of layer_specs is not valid: {error}.") from error
            style = _style(pattern, spec.get("partition_type", "column"))
            for name in names:
                # DeepSpeed's patterns match parameter names.
                if expression.match(f"{name}.weight"):
                    found.setdefault(name, style)
    if not config.get("use_default_specs", False):
        for name in names:
            found.setdefault(name, "replicated")
    return found


def _partition_config(user: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for key in ("tensor_parallel", "autotp", "partition_config"):
        if isinstance(user.get(key), Mapping):
            return _partition_config(user[key]) or user[key]
    return user if "layer_specs" in user else None


def _style(pattern: str, value: object) -> Style:
    if not isinstance(value, str) or value not in _STYLES:
        known = ", ".join(dict.fromkeys(_STYLES.values()))
        raise PlanError(f"{pattern!r} is mapped to {value!r}, but must be mapped to one of {known}.")
    return _STYLES[value]


def _close(pattern: str, names: list[str]) -> str:
    last = pattern.rpartition(".")[2]
    fitting = [name for name in names if name.rpartition(".")[2] == last]
    return f" Did you mean {fitting[0]!r}?" if fitting else ""


def read_published_plan(model: nn.Module, modules: Iterable[str]) -> dict[str, Style]:
    """Returns how the published plan of a transformers model splits each module."""
    published: dict[str, Any] = {}
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(config, "base_model_tp_plan", None)
    if isinstance(base, Mapping):
        has_base = prefix and hasattr(model, prefix)
        published |= {f"{prefix}.{key}" if has_base else key: value for key, value in base.items()}
    own = getattr(model, "_tp_plan", None)
    if isinstance(own, Mapping):
        published |= own
    found: dict[str, Style] = {}
    for name in modules:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        value = published.get(pattern, published.get(name))
        if value is None:
            value = next((v for k, v in published.items() if k.startswith(f"{pattern}.")), None)
        if isinstance(value, str):
            style = next((style for word, style in _PUBLISHED.items() if word in value), None)
            if style is not None:
                found[name] = style
    return found
