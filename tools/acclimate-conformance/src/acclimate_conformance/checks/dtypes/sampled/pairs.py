"""Calls of every operator in two settings at a time, and within graphs that read their inputs again.

Each setting alone is found by others. Here the settings are combined, two for each operator in turn, with
tensors that are not contiguous, in other dtypes, and with calls in place and into tensors given as out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.capturing import offers_graphs
from acclimate_conformance.checks.dtypes.sampled.comparing import Findings, Run, attempt, draws
from acclimate_conformance.checks.dtypes.sampled.places import HOST, LAYOUTS, Place
from acclimate_conformance.checks.dtypes.sampled.samples import (
    Sample,
    fails_in_torch,
    is_private,
    name_of,
    operators,
    promised_part,
    samples_of,
)
from acclimate_conformance.checks.dtypes.sampled.settings import UNSTABLE, default_dtype, writing
from acclimate_conformance.checks.dtypes.sampled.topics import results_of, text_of

_AT_A_TIME = 3
"""In how many pairs of settings each operator is called."""
_Setting = Callable[[Accelerator, Run], Run]


def _on_device(around: Callable[[Accelerator, Run, Place], Any]) -> _Setting:
    """A setting of the device, which changes nothing for the host."""

    def setting(accelerator: Accelerator, run: Run) -> Run:
        def called(place: Place) -> Any:
            return run(place) if place.device == HOST else around(accelerator, run, place)

        return called

    return setting


def _block(block: Callable[[Accelerator], AbstractContextManager[Any]], of_both: bool = False) -> _Setting:
    """A setting that is a block: of the device, or also of the host."""

    def setting(accelerator: Accelerator, run: Run) -> Run:
        def called(place: Place) -> Any:
            if place.device == HOST and not of_both:
                return run(place)
            with block(accelerator):
                return run(place)

        return called

    return setting


def _on_a_stream(accelerator: Accelerator, run: Run, place: Place) -> Any:
    side = accelerator.Stream(device=place.device)
    side.wait_stream(accelerator.current_stream(place.device))
    with accelerator.stream(side):
        result = run(place)
    side.synchronize()
    return result


def _in_a_thread(accelerator: Accelerator, run: Run, place: Place) -> Any:
    with ThreadPoolExecutor(1) as other:
        return other.submit(run, place).result()


def _after_an_error(accelerator: Accelerator, run: Run, place: Place) -> Any:
    for shape in ((2, 3), (2,), (0, 4)):
        ones = torch.ones(shape, device=place.device)
        with suppress(RuntimeError, IndexError):
            ones @ torch.ones(5, 2, device=place.device)
        with suppress(RuntimeError, IndexError):
            ones.index_select(3, ones)
    return run(place)


def _after_a_refusal(accelerator: Accelerator, run: Run, place: Place) -> Any:
    with suppress(RuntimeError):
        torch.empty(2 * accelerator.total_memory(place.device), dtype=torch.uint8, device=place.device)
    return run(place)


def _after_another_device(accelerator: Accelerator, run: Run, place: Place) -> Any:
    here = accelerator.current_device()
    accelerator.set_device(0)
    torch.ones(3, device=accelerator.current_device_name()).exp()
    accelerator.set_device(here)
    return run(place)


_SETTINGS: dict[str, _Setting] = {
    "on a stream of its own": _on_device(_on_a_stream),
    "in another thread": _on_device(_in_a_thread),
    "after calls that raise": _on_device(_after_an_error),
    "after an allocation that is refused": _on_device(_after_a_refusal),
    "while another device is current": _block(lambda accelerator: accelerator.device(0)),
    "after work on another device": _on_device(_after_another_device),
    "in inference_mode": _block(lambda accelerator: torch.inference_mode()),
    "in no_grad": _block(lambda accelerator: torch.no_grad()),
    "within amp.autocast that is off": _block(lambda accelerator: accelerator.amp.autocast(enabled=False)),
    "while torch's default dtype is float64": _block(
        lambda accelerator: default_dtype(torch.float64), of_both=True
    ),
}
_PAIRS = [
    *itertools.combinations(_SETTINGS, 2),
    *((setting, layout) for setting in _SETTINGS for layout in LAYOUTS),
]
"""Two settings, or a setting and a layout of the tensors."""


def operators_in_two_settings(accelerator: Accelerator, found: Findings) -> None:
    has_graphs = bool(accelerator.supports_graphs) and offers_graphs(accelerator)
    turn = 0
    for op in operators():
        if torch.float32 not in op.supported_dtypes(HOST) or fails_in_torch(
            op, "test_compare_cpu", found.device, torch.float32
        ):
            continue
        for sample in list(samples_of(op, torch.float32, 1)):
            plain = text_of(op, sample), results_of(op, sample)
            if draws(plain[1], Place(found.device)):  # a thread of its own would hide that
                continue
            calls = [plain, *writing(op)]
            for number in range(_AT_A_TIME):
                # By a step that no length of the tables divides, so that all meet.
                pair = _PAIRS[(turn * 7 + number * 31) % len(_PAIRS)]
                if is_private(op) and pair[1] in LAYOUTS:  # public functions prepare tensors for it
                    continue
                text, run = calls[(turn + number) % len(calls)]
                _compare_in_pair(accelerator, found, name_of(op), text, run, pair)
            if has_graphs:
                _compare_replayed(accelerator, found, op, sample)
            turn += 1
        _compare_in_another_dtype(accelerator, found, op, turn)
        if found.enough:
            return


_DTYPES = (
    torch.int16, torch.float64, torch.uint8, torch.bfloat16, torch.int8, torch.float16, torch.int32,
    torch.complex128,
)  # fmt: skip
"""Of which each operator is called in one, in a layout, in a setting: kernels differ by all three."""


def _compare_in_another_dtype(accelerator: Accelerator, found: Findings, op: Any, turn: int) -> None:
    claimed = accelerator.supported_dtypes()
    offered = [
        dtype
        for dtype in _DTYPES
        if dtype in op.supported_dtypes(HOST) and (not dtype.is_floating_point or dtype in claimed)
    ]
    if not offered or UNSTABLE.search(op.name):
        return
    dtype = offered[turn % len(offered)]
    alone = Findings(accelerator)  # what is lacking in one dtype may be there in another
    setting, how = list(_SETTINGS)[turn * 3 % len(_SETTINGS)], list(LAYOUTS)[turn * 2 % len(LAYOUTS)]
    is_listed = fails_in_torch(op, "test_noncontiguous_samples", found.device, dtype)
    for sample in () if is_listed else list(samples_of(op, dtype, 1)):
        calls = [("", results_of(op, sample))]
        if op.inplace_variant is not None and not sample.broadcasts:

            def in_place(place: Place, sample: Sample = sample) -> Any:
                value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
                return op.inplace_variant(value, *args, **kwargs)

            calls.append((" in place", in_place))
        if draws(calls[0][1], Place(found.device)):  # a thread of its own would hide that
            continue
        for text, run in calls:
            pair = (setting, how)
            _compare_in_pair(accelerator, alone, name_of(op), f"{text_of(op, sample)}{text}", run, pair)
    found.broken += alone.broken
    found.compared += alone.compared


def _compare_in_pair(
    accelerator: Accelerator, found: Findings, name: str, text: str, run: Run, pair: tuple[str, str]
) -> None:
    layout = LAYOUTS.get(pair[1])
    for setting in pair:
        run = _SETTINGS[setting](accelerator, run) if setting in _SETTINGS else run
    how = f"of tensors {pair[1]}, {pair[0]}" if layout else " and ".join(pair)
    found.compare(name, f"{text} {how}", run, Place(HOST, layout), Place(found.device, layout))


def _compare_replayed(accelerator: Accelerator, found: Findings, op: Any, sample: Sample) -> None:
    """Captures a call and replays it on other numbers, if it can be captured."""

    def changed(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided:
            has_form = not value.dim() or UNSTABLE.search(op.name)  # such as that of a covariance
            with suppress(RuntimeError):  # several elements may be one in memory
                value.copy_(value * 0.5 if has_form else value.flip(0).clone())

    def run(place: Place) -> Any:
        with torch.no_grad():
            value, args, kwargs = place.put((sample.value, sample.args, sample.kwargs))
            if place.device == HOST:
                changed(value)
                return promised_part(op, op(value, *args, **kwargs))
            op(value, *args, **kwargs)  # libraries set themselves up at the first call
            accelerator.synchronize()
            graph = accelerator.create_graph()
            with accelerator.capture_to_graph(graph):
                result = op(value, *args, **kwargs)
            changed(value)
            accelerator.replay_graph(graph)
            accelerator.synchronize()
            return promised_part(op, result)

    text = f"{text_of(op, sample)} in a graph that is replayed on other numbers"
    if attempt(run, Place(HOST))[1] is not None:
        return
    replayed, refused = found.called(text, run)
    if refused is None:  # else it reads numbers back to the host, which a capture refuses
        found.compare(name_of(op), text, lambda place: run(place) if place.device == HOST else replayed)
