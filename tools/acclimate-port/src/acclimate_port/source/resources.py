"""What programs that share out hardware are told of GPUs: Ray, Dask, submitit and SLURM.

They count NVIDIA's GPUs, or what an administrator calls a GPU: a number of other accelerators that they are
asked for is one that they do not have, and the work waits for ever.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator

from acclimate_port.source.tree import text_of

_SCHEDULERS = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+"
    r"(?:ray|dask|dask_cuda|dask_jobqueue|distributed|submitit|simple_slurm|parsl)\b",
    re.M,
)
_WORDS = (
    r"(?:resources(?:_per_\w+)?|trainer_resources|(?:num_)?gpus?(?:_per_\w+)?|num_gpus_per_\w+|n_gpus?"
    r"|(?:slurm_)?(?:gpus_per_\w+|gres)|use_gpu|bundles|scaling_config)"
)
_GIVEN = re.compile(
    rf"\b{_WORDS}(?:[ \t]*=|[\"']\s*:|[\"']\][ \t]*=)\s*(?![=\s])|\bwith_resources\(\s*[\w.]+\s*,\s*"
)
"""An argument, a name, a key or an entry by which a scheduler is told of GPUs."""
_LONGEST = 300
_NAME = re.compile(r"(?<![\w\"'])([A-Za-z_]\w*)(?![\w\"']*\s*[.=]|[\w]*[\"'])")
_NAMES_NOTHING = {
    *dir(builtins),
    "if",
    "else",
    "for",
    "in",
    "and",
    "or",
    "not",
    "is",
    "lambda",
    "self",
    "cls",
}
_OF_TORCH = {"torch", "cuda", "device_count", "is_available"}
_STEPS = 2


def resources_given(source: bytes) -> frozenset[str]:
    """The names by which a file tells a scheduler of GPUs, and those that these get their values from."""
    if b"gpu" not in source.lower() and b"resources" not in source:
        return frozenset()
    text = text_of(source)
    if not _SCHEDULERS.search(text):
        return frozenset()
    found = {name for given in _GIVEN.finditer(text) for name in _names(text, given.end())}
    for _ in range(_STEPS if found else 0):
        held = "|".join(map(re.escape, sorted(found)))
        assigned = re.finditer(rf"(?<![\w.])(?:{held})[ \t]*=[ \t]*(?![=\s])", text)
        found |= {name for one in assigned for name in _names(text, one.end())}
    return frozenset(found)


def _names(text: str, start: int) -> Iterator[str]:
    """The names in an expression that starts somewhere, of chains of attributes the last one."""
    end = start
    depth = 0
    while end < min(len(text), start + _LONGEST):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[end], 0)
        if depth < 0 or (not depth and text[end] in ",\n"):
            break
        end += 1
    for one in _NAME.findall(text[start:end]):
        if one not in _NAMES_NOTHING and one not in _OF_TORCH:
            yield one
