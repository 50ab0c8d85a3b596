"""Where a program reads the devices of a model that a wrapper of torch splits its batches over."""

from __future__ import annotations

import ast
import re

from acclimate_port.source.tree import last_python_name, module_of, python_nodes, text_of

_READ = re.compile(r"\.(?:device_ids|output_device|src_device_obj)\b")
_NAMES = ("device_ids", "output_device", "src_device_obj")
_SETTINGS = re.compile(
    r"^(self|cls|args?|options?|opts?|config|conf|cfg|params|hparams|flags|settings|hps?|parser)$",
    re.IGNORECASE,
)


def parallel_reads(source: str | bytes) -> int:
    """The first line that reads such an attribute of an object that is no setting; 0 if none does."""
    text = text_of(source)
    if not _READ.search(text):
        return 0
    module = module_of(source)
    if module is None:
        return 0
    lines = [
        one.lineno
        for one in python_nodes(module)
        if isinstance(one, ast.Attribute)
        and one.attr in _NAMES
        and isinstance(one.ctx, ast.Load)
        and not _SETTINGS.match(last_python_name(one.value))
    ]
    return min(lines, default=0)
