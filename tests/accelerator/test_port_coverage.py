"""`torch.cuda.X` → `get_accelerator().X` holds for nearly all that CUDA-only code does with `torch.cuda`.

`data/cuda_uses.json` says what such code does: names and call shapes, counted over public repositories by
`benchmarks/cuda_uses.py`. A use counts as covered when the accelerator has the name and takes the arguments.
"""

import inspect
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from acclimate.accelerator import Accelerator
from acclimate.backends.cpu import CPUAccelerator
from acclimate.backends.cuda import CUDAAccelerator

COUNTED = json.loads((Path(__file__).parent / "data" / "cuda_uses.json").read_text(encoding="utf-8"))
LEAST_SHARE = 0.95
LISTED = 25
ABSENT = object()


def find(start: object, dotted_name: str) -> object:
    """What a dotted name means from `start` on, or ABSENT."""
    found = start
    for part in dotted_name.split("."):
        found = getattr(found, part, ABSENT)
        if found is ABSENT:
            return ABSENT
    return found


def parameters(function: object) -> inspect.Signature | None:
    """The signature, or None where a function written in C does not tell."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def objection(name: str, function: object, positional: int, keywords: list[str]) -> str | None:
    """Why a call that `torch.cuda` takes would fail here or mean something else; None where it is fine."""
    if not callable(function):
        return "not callable"
    ours = parameters(function)
    if ours is None:
        return None
    try:
        ours.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    theirs = parameters(find(torch.cuda, name))
    places = list(ours.parameters)
    for place, parameter in enumerate(list(theirs.parameters if theirs else [])[:positional]):
        if parameter in places and places.index(parameter) != place:
            return f'torch.cuda takes "{parameter}" at place {place}, here that is "{places[place]}"'
    return None


def uncovered(accelerator: Accelerator) -> Counter[str]:
    """The uses that do not carry over, by name and reason."""
    missing: Counter[str] = Counter()
    for name, entry in COUNTED["names"].items():
        function = find(accelerator, name)
        if function is ABSENT:
            missing[f"{name}: missing"] += entry["uses"]
            continue
        for call in entry["calls"]:
            keywords = [keyword for keyword in call["keywords"] if keyword != "**"]
            reason = objection(name, function, call["positional"] or 0, keywords)
            if reason is not None:
                missing[f"{name}: {reason}"] += call["uses"]
    return missing


@pytest.mark.parametrize("backend", [CPUAccelerator, CUDAAccelerator])
def test_nearly_every_use_of_torch_cuda_has_a_counterpart(backend: type[Accelerator]) -> None:
    missing = uncovered(backend())
    uses = sum(entry["uses"] for entry in COUNTED["names"].values())
    share = 1 - missing.total() / uses
    heaviest = "\n".join(f"{times:5}  {what}" for what, times in missing.most_common(LISTED))
    assert share >= LEAST_SHARE, f"{share:.2%} of {uses} uses carry over; what does not, by uses:\n{heaviest}"


def test_the_counts_agree_with_themselves() -> None:
    names = COUNTED["names"].values()
    by_repository = sum((Counter(entry["by_repository"]) for entry in names), Counter())
    assert by_repository == Counter({entry["repo"]: entry["uses"] for entry in COUNTED["repositories"]})
    assert all(entry["uses"] == sum(entry["kinds"].values()) for entry in names)
    assert all(len(entry["commit"]) == 40 for entry in COUNTED["repositories"])
