"""The definition of a check, with its time limit. pytest collects each; ``runner/examine.py`` runs one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from acclimate.accelerator import CATEGORIES
from acclimate_conformance.checks.target import Subject

Observation = Callable[[Subject], "str | None"]
"""Observes an accelerator; returns a note for the reader, or raises ``BrokenPromiseError`` or
``NotOfferedError``."""

_HOME = f"{__package__}."


@dataclass(frozen=True)
class Check:
    """One promise of the interface, and the function that checks it."""

    category: str
    """The package or module of this folder that it is in."""
    name: str
    promise: str
    """The promise, as a sentence."""
    observes: tuple[str, ...]
    """The names of the interface that make the promise."""
    function: Observation
    timeout_s: int
    """How long it may take, in seconds."""
    once: bool = False
    """Whether it runs in the main thread only, and not once more in a new thread, on the last device."""
    of: str = ""
    """What of the device is at fault if an observation names no method: its ``operators`` or ``tensors``."""

    @property
    def id(self) -> str:
        """``category/name``."""
        return f"{self.category}/{self.name}"

    @property
    def rules(self) -> tuple[str, ...]:
        """What the interface's documentation says about each observed name."""
        return tuple(_rule(name) for name in self.observes)


def check(
    *observes: str, promise: str, timeout_s: int = 180, once: bool = False, of: str = ""
) -> Callable[[Callable[..., str | None]], Check]:
    """Makes a test of a function.

    The function takes the accelerator. If its parameter is called ``subject``, it takes the whole
    :class:`Subject`, with which it can start processes that load the same accelerator.

    Args:
        observes: the names of the interface that make the promise.
        promise: the promise, as a sentence.
        timeout_s: how long it may take, in seconds.
        once: whether not to run it a second time, in a new thread on the last device: because it takes too
            long, or because it runs in other processes, where the result would be the same.
        of: what of the device is at fault if an observation names no method: its ``operators``, as for each
            check that observes ``supported_dtypes``, or its ``tensors``.
    """

    def make(function: Callable[..., str | None]) -> Check:
        takes_subject = "subject" in inspect.signature(function).parameters
        return Check(
            category=function.__module__.removeprefix(_HOME).partition(".")[0],
            name=function.__name__,
            promise=promise,
            observes=observes,
            function=function if takes_subject else lambda subject: function(subject.accelerator),
            timeout_s=timeout_s,
            once=once,
            of=of or ("operators" if "supported_dtypes" in observes else ""),
        )

    return make


def _rule(name: str) -> str:
    for category in CATEGORIES:
        if name in vars(category):
            member = vars(category)[name]
            explained = callable(member) or isinstance(member, property)
            documentation = inspect.getdoc(member) if explained else None
            first = (documentation or "").split("\n\n")[0].replace("\n", " ")
            return f"{name}: {first}" if first else name
    raise ValueError(f"The interface has no {name}.")
