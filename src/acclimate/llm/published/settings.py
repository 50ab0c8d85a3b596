"""What config.json says about quantised weights (``quantization_config``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acclimate.errors import CorruptModelError, UnsupportedModelError, excerpt
from acclimate.llm.files.folder import read_settings

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4")
"""The values of ``quant_method`` that can be read."""


def quantization_settings(folder: Path) -> dict[str, Any] | None:
    """Returns the settings of a folder's quantised weights, with ``quant_method``; ``None``: there are none.

    Older files of GPTQ have them in quantize_config.json, and older ones of compressed-tensors under another
    name.

    Raises:
        CorruptModelError: they are not a JSON object.
        UnsupportedModelError: they name a method that cannot be read.
    """
    path = folder / "config.json"
    config = read_settings(path) if path.is_file() else {}
    found = config.get("quantization_config", config.get("compression_config"))
    if found is None and (folder / "quantize_config.json").is_file():
        path = folder / "quantize_config.json"
        found = {"quant_method": "gptq", **read_settings(path)}
    if found is None:
        return None
    if not isinstance(found, dict):
        raise CorruptModelError(
            f"{path} is corrupt: quantization_config of a model must be a JSON object, not "
            f"{excerpt(str(found), 40)}"
        )
    method = found.get("quant_method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"the weights in {folder} are quantised by the method {excerpt(str(method), 40)!r} (quant_method "
            f"in {path.name}), and acclimate reads {', '.join(METHODS)}; use a copy in one of these, in "
            "bfloat16, float16 or float32, or a GGUF file"
        )
    return found


def whole_number(
    settings: Mapping[str, Any], name: str, default: int | None, allowed: tuple[int, ...]
) -> int:
    """Returns a whole number of the settings.

    Raises:
        CorruptModelError: it is missing or no whole number.
        UnsupportedModelError: it is none of the allowed ones, if there are any.
    """
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CorruptModelError(
            f"{name} in the model's quantization_config must be a whole number, not {excerpt(str(value), 40)}"
        )
    if allowed and value not in allowed:
        raise UnsupportedModelError(
            f"{name} in the model's quantization_config is {value}, and acclimate reads "
            f"{' or '.join(map(str, allowed))}"
        )
    return value
