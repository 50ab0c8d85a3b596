"""Checks of profiler ranges and of lazy calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    NotOfferedError,
    exactly,
    let_through,
    require,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.errors import DeliberateError

_TREE = {
    "acclimate outer": None,
    "acclimate inner": "acclimate outer",
    "acclimate innermost": "acclimate inner",
    "acclimate second": "acclimate outer",
    "acclimate block": "acclimate outer",
    "acclimate within block": "acclimate block",
    "acclimate pushed": "acclimate outer",
    "acclimate decorated": "acclimate outer",
    "acclimate after": None,
}
"""Each range, and the range within which it is opened."""
_MARKERS = ("nvtx", "mstx", "cnpx", "roctx", "itt", "profiler")
"""Attributes of a device's torch module whose ranges appear in the vendor's own profiler."""
_THREAD_PATIENCE_S = 30
_UNSEEN = "torch's profiler does not show the ranges; the vendor's profiler may"


@check(
    "range_push", "range_pop", "nvtx",
    promise="Ranges nest and keep their names, also through NVTX's functions; closing one too many is "
    "harmless.",
    once=True,
)  # fmt: skip
def profiler_marks(accelerator: Accelerator) -> str | None:
    accelerator.range_pop()  # none is open
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _open_and_close(accelerator)
    accelerator.range_pop()
    found: dict[str, Any] = {}
    for event in profile.events() or ():
        if event.key in _TREE:
            require(event.key not in found, f'torch\'s profiler shows the range "{event.key}" twice')
            found[event.key] = event
    if not found and any(hasattr(accelerator.torch_module, name) for name in _MARKERS):
        return _UNSEEN
    require(
        len(found) == len(_TREE),
        f"torch's profiler does not show the ranges {sorted(_TREE.keys() - found)}",
    )
    for name, expected in _TREE.items():
        around = found[name].cpu_parent
        while around is not None and around.key not in _TREE:
            around = around.cpu_parent
        inside = around.key if around is not None else None
        require(inside == expected, f'the range "{name}" was opened in "{expected}" and shows in "{inside}"')
    return None


def _open_and_close(accelerator: Accelerator) -> None:
    """The ranges of the tree."""
    accelerator.range_push("acclimate outer")
    accelerator.range_push("acclimate inner", domain="acclimate", category="conformance")
    accelerator.range_push("acclimate innermost", category="conformance")
    torch.ones(4, device=accelerator.current_device_name()).sum()
    accelerator.range_pop()
    accelerator.range_pop(domain="acclimate")
    accelerator.range_push("acclimate second", None, None)
    accelerator.range_pop(None)
    with accelerator.nvtx.range("acclimate block"):
        accelerator.nvtx.range_push("acclimate within block")
        accelerator.nvtx.range_pop()
    accelerator.nvtx.range_push("acclimate pushed")
    accelerator.nvtx.range_pop()

    @accelerator.nvtx.range("acclimate decorated")
    def decorated() -> None:
        torch.ones(4).sum()

    decorated()
    accelerator.range_pop()
    accelerator.range_push("acclimate after")
    accelerator.range_pop()


@check(
    "nvtx", "range_push", "range_pop",
    promise="A block of nvtx.range() closes its range when an error leaves it, and lets the error through.",
    once=True,
)  # fmt: skip
def ranges_end_with_errors(accelerator: Accelerator) -> str | None:
    spans = _spans_of(accelerator, lambda: _fail_in_ranges(accelerator))
    if spans is None:
        return _UNSEEN
    failing = ("acclimate failing", "acclimate failing within")
    missing = [name for name in (*failing, "acclimate around", "acclimate next") if name not in spans]
    require(
        not missing, f"with an error in a block of nvtx.range(), torch's profiler does not show {missing}"
    )
    for name in failing:
        require(
            spans[name].end <= spans["acclimate next"].start,
            f'the range "{name}" of nvtx.range() is still open after an error ended its block',
        )
    require(
        spans["acclimate next"].end <= spans["acclimate around"].end,
        "after an error in a block of nvtx.range(), range_pop() closes the range around it too early",
    )
    return None


def _fail_in_ranges(accelerator: Accelerator) -> None:
    accelerator.range_push("acclimate around")
    nvtx = accelerator.nvtx
    with let_through("nvtx.range()"), nvtx.range("acclimate failing"), nvtx.range("acclimate failing within"):
        raise DeliberateError
    _mark(accelerator, "acclimate next")
    accelerator.range_pop()


@check(
    "supports_nvtx_domain", "range_push", "range_pop",
    promise="If it says that it separates ranges by domain, range_pop closes the innermost range of "
    "its domain.",
    once=True,
)  # fmt: skip
def ranges_of_domains(accelerator: Accelerator) -> str | None:
    if not exactly(accelerator.supports_nvtx_domain, bool, "supports_nvtx_domain"):
        raise NotOfferedError("supports_nvtx_domain is False")
    spans = _spans_of(accelerator, lambda: _alternate_domains(accelerator))
    if spans is None:
        return _UNSEEN
    shown = {name: spans[name] for name in _DOMAINS if name in spans}
    if len(shown) < len(_DOMAINS):
        return f"torch's profiler does not show the ranges {sorted(set(_DOMAINS) - set(shown))}"
    claim = "supports_nvtx_domain is True, but"
    for name, (marks_before, marks_after) in _DOMAINS.items():
        for mark in marks_before:
            require(
                spans[mark].end <= shown[name].end,
                f'{claim} range_pop() of another domain closes the range "{name}"',
            )
        for mark in marks_after:
            require(
                shown[name].end <= spans[mark].start,
                f'{claim} the range "{name}" is still open after range_pop() of its domain',
            )
    return None


_DOMAINS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "acclimate of a": (("acclimate mark 1",), ("acclimate mark 2", "acclimate mark 3", "acclimate mark 4")),
    "acclimate of b": (("acclimate mark 1", "acclimate mark 2"), ("acclimate mark 3", "acclimate mark 4")),
    "acclimate of none": (
        ("acclimate mark 1", "acclimate mark 2", "acclimate mark 3"),
        ("acclimate mark 4",),
    ),
}
"""By range, the marks that are made before it is closed and those made afterwards."""


def _alternate_domains(accelerator: Accelerator) -> None:
    """Opens a range without a domain and one of each of two domains, and closes them in another order."""
    accelerator.range_push("acclimate of none")
    accelerator.range_push("acclimate of a", domain="acclimate a")
    accelerator.range_push("acclimate of b", domain="acclimate b")
    for number, domain in enumerate((None, "acclimate a", "acclimate b"), start=1):
        if domain is not None:
            accelerator.range_pop(domain)
        with torch.profiler.record_function(f"acclimate mark {number}"):
            torch.ones(4).sum()
    accelerator.range_pop()
    with torch.profiler.record_function("acclimate mark 4"):
        torch.ones(4).sum()


def _spans_of(accelerator: Accelerator, work: Callable[[], None]) -> dict[str, Any] | None:
    """By name, when each range began and ended; ``None`` if only the vendor's profiler may show them."""
    accelerator.range_pop()  # none is open
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    spans = {event.key: event.time_range for event in profile.events() or ()}
    shown = any(name.startswith("acclimate ") and "mark" not in name for name in spans)
    if not shown and any(hasattr(accelerator.torch_module, name) for name in _MARKERS):
        return None
    return spans


@check(
    "range_push", "range_pop",
    promise="Each thread has its own ranges: range_pop does not close another thread's.",
    once=True,
)  # fmt: skip
def ranges_of_threads(accelerator: Accelerator) -> str | None:
    accelerator.range_pop()  # none is open
    opened, done = threading.Event(), threading.Event()

    def beside() -> None:
        accelerator.range_pop()  # this thread has none open
        accelerator.range_push("acclimate beside")
        opened.set()
        done.wait(_THREAD_PATIENCE_S)
        accelerator.range_pop()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        accelerator.range_push("acclimate outer")
        thread = threading.Thread(target=beside)
        thread.start()
        opened.wait(_THREAD_PATIENCE_S)
        _mark(accelerator, "acclimate within")
        accelerator.range_pop()
        _mark(accelerator, "acclimate after")
        done.set()
        thread.join()
    spans = {
        event.key: event.time_range
        for event in profile.events() or ()
        if event.key in _TREE or event.key == "acclimate within"
    }
    if not {"acclimate within", "acclimate after"} <= spans.keys():
        return _UNSEEN
    fault = "range_pop() in a thread without ranges closes another thread's range"
    require("acclimate outer" in spans, fault)  # torch 2.10 shows no range that another thread closed
    outer, within, after = (spans[f"acclimate {name}"] for name in ("outer", "within", "after"))
    require(within.end <= outer.end, fault)
    require(outer.end <= after.start, "range_pop() leaves this thread's range open if another thread has one")
    return None


def _mark(accelerator: Accelerator, name: str) -> None:
    accelerator.range_push(name)
    torch.ones(4).sum()
    accelerator.range_pop()


_NAMES = (
    "acclimate " + "long " * 60,
    "acclimate größe 数",
    'acclimate "quoted" \\ {braces} %s',
    "acclimate two\nlines",
)


@check(
    "range_push", "range_pop",
    promise="A range keeps its name, however long it is and whatever characters it has.",
    once=True,
)  # fmt: skip
def names_of_ranges(accelerator: Accelerator) -> str | None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for name in _NAMES:
            _mark(accelerator, name)
            with accelerator.nvtx.range(f"{name} in a block"):
                torch.ones(4).sum()
        accelerator.range_push("")
        accelerator.range_pop()
    found = {event.key for event in profile.events() or ()}
    wanted = [f"{name}{end}" for name in _NAMES for end in ("", " in a block")]
    missing = [name for name in wanted if name not in found]
    if len(missing) == len(wanted) and any(hasattr(accelerator.torch_module, name) for name in _MARKERS):
        return _UNSEEN
    require(not missing, f"torch's profiler does not show the range {missing[:1]!r:.200}")
    return None


@check(
    "lazy_call", "init",
    promise="Each lazy call is made exactly once, in order: at once if the device is initialised.",
)  # fmt: skip
def lazy_calls(accelerator: Accelerator) -> None:
    calls: list[int] = []
    for number in range(3):
        accelerator.lazy_call(lambda number=number: calls.append(number))  # type: ignore[misc]
    accelerator.init()
    torch.ones(1, device=accelerator.current_device_name())
    accelerator.init()
    require(calls == [0, 1, 2], f"of the lazy calls 0, 1 and 2 these were made: {calls}")
    at_once: list[int] = []
    accelerator.lazy_call(lambda: at_once.append(0))
    require(at_once == [0], "lazy_call() of a device that is in use does not call the function at once")

    def fail() -> None:
        raise DeliberateError

    with let_through("lazy_call()"):
        accelerator.lazy_call(fail)
        accelerator.init()
    accelerator.lazy_call(lambda: accelerator.lazy_call(lambda: calls.append(3)))
    accelerator.init()
    require(calls == [0, 1, 2, 3], f"of the lazy calls 0 to 3, the last within another, were made: {calls}")
    again = lambda: calls.append(4)  # noqa: E731 - one function, given several times
    for _ in range(3):
        accelerator.lazy_call(again)
        accelerator.init()
    times = calls.count(4)
    require(times == 3, f"a function that is given to lazy_call() three times is called {times} times")
