"""Functions that checks share: requirements, expected errors, comparisons within tolerances, long work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from acclimate.accelerator import Accelerator, HostStream
from acclimate.errors import UnsupportedError
from acclimate.imports import describe
from acclimate_conformance.checks.errors import DeliberateError

MIB = 2**20
kept_listeners: list[Callable[[], None]] = []
"""Called after each observation that was as promised."""
_T = TypeVar("_T")

# How far a result may be from float64's, relative to the largest element; a few units in the last place of
# each type, with room for any order of summation and for devices that round float32 products to 10 bits.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 4e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class BrokenPromiseError(Exception):
    """A promise was not kept; the message says what was observed.

    Args:
        seen: what was observed.
        cause: what the failures of other checks have in common with this one, as text, if that is known.
    """

    def __init__(self, seen: str, cause: str = "") -> None:
        super().__init__(seen)
        self.cause = cause


class NotOfferedError(Exception):
    """The device lacks the promised feature and does not claim to have it; the message says which."""


def require(condition: bool, seen: str) -> None:
    """Fails the check unless ``condition`` holds; ``seen`` says what was observed instead.

    The first method that ``seen`` names is said to be at fault, if the check cannot tell better.
    """
    if not condition:
        raise BrokenPromiseError(seen)
    for listener in kept_listeners:
        listener()


@contextmanager
def all_told(most: int = 12) -> Iterator[Callable[[bool, str], None]]:
    """A block that goes on after a broken promise, and fails the check at its end with all of them.

    Args:
        most: how many the message has at most.

    Yields:
        A function that is called as :func:`require`.
    """
    broken: list[str] = []

    def noted(condition: bool, seen: str) -> None:
        if condition:
            require(True, "")
        else:
            broken.append(seen)

    try:
        yield noted
    except Exception as error:
        if not broken:
            raise
        broken.append(str(error) if isinstance(error, BrokenPromiseError) else describe(error, whole=True))
    if broken:
        more = f"; and {len(broken) - most} others" if len(broken) > most else ""
        raise BrokenPromiseError("; ".join(broken[:most]) + more)


def note_of_lacks(names: Collection[str]) -> str | None:
    """The note of a check that passed although a device lacks some operators; ``None`` if it lacks none."""
    return f"it has no {', '.join(sorted(names))}" if names else None


def exactly(value: object, kind: type[_T], what: str) -> _T:
    """``value``, which must be of exactly that type: a ``bool`` is not a size, a ``str`` not an index."""
    if type(value) is not kind:
        raise BrokenPromiseError(
            f"{what} is {value!r}, of type {type(value).__name__} and not {kind.__name__}"
        )
    return value


@contextmanager
def refused(what: str, *kinds: type[BaseException]) -> Iterator[None]:
    """A block that must raise one of ``kinds``."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        require(True, "")
        return
    except BrokenPromiseError:
        raise
    except Exception as error:
        raised = describe(error, whole=True)
        raise BrokenPromiseError(f"{what} raises {raised} and not {names}") from error
    raise BrokenPromiseError(f"{what} is accepted; it must raise {names}")


@contextmanager
def offered_or_not(what: str) -> Iterator[None]:
    """A block in which an ``UnsupportedError`` means that the device does not offer ``what``."""
    try:
        yield
    except UnsupportedError as error:
        raise NotOfferedError(f"{what}: {error}") from error


def equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors, on any devices, hold the same numbers."""
    return torch.equal(actual.detach().cpu(), expected.detach().cpu())


def shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors use the same storage."""
    told: bool = torch._C._is_alias_of(first, second)  # type: ignore[attr-defined]
    return told


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected element; infinite if one is not finite."""
    found, wanted = actual.detach().cpu().double(), expected.detach().cpu().double()
    if found.shape != wanted.shape:
        raise BrokenPromiseError(f"the shape is {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def require_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Fails the check if a result is further from ``expected`` than the precision of ``dtype`` explains."""
    apart, allowed = distance(actual, expected), TOLERANCE[dtype]
    require(apart <= allowed, f"{what} in {short(dtype)} is off by {apart:.1e}; {allowed:.0e} is allowed")


def short(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_host(accelerator: Accelerator) -> bool:
    """Whether its device is the host."""
    return torch.zeros(1).device.type == accelerator.device_type


def device_names(accelerator: Accelerator) -> list[str]:
    """The devices that torch distinguishes, by index; on a host all indices mean one device."""
    indices = range(accelerator.device_count())
    return list(dict.fromkeys(accelerator.device_name(index) for index in indices))


def is_on(tensor: torch.Tensor, name: str) -> bool:
    """Whether a tensor is on a device; an accelerator of one device may name it without an index."""
    named = torch.device(name)
    return tensor.device.type == named.type and named.index in (None, tensor.device.index)


def several_devices(accelerator: Accelerator) -> list[str]:
    """The devices; ends the check if there is only one."""
    names = device_names(accelerator)
    if len(names) < 2:
        raise NotOfferedError("there is one device here")
    return names


def require_streams(accelerator: Accelerator) -> None:
    """Ends the check if the accelerator has no streams."""
    if issubclass(accelerator.Stream, HostStream):
        raise NotOfferedError("it has no streams: its work is done in the order of the calls")


def new_stream(accelerator: Accelerator, device: str | None = None) -> Any:
    """A new stream of a device, the current one by default.

    One of another device is a fault of its own, which else would be put down to what makes it current.
    """
    stream = accelerator.Stream() if device is None else accelerator.Stream(device=device)
    here = accelerator.current_device() if device is None else torch.device(device).index
    index = getattr(getattr(stream, "device", None), "index", None)
    told = f"Stream({'' if device is None else f'device={device!r}'})"
    require(index in (None, here) or here is None, f"{told} is one of device {index}, not {here}")
    return stream


def in_thread(function: Callable[[], _T]) -> _T:
    """Calls a function in a new thread; returns or raises what it does."""
    returned: list[_T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            returned.append(function())
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]


@contextmanager
def let_through(what: str) -> Iterator[None]:
    """A block from which :class:`DeliberateError` must come out: nothing inside may suppress it."""
    try:
        yield
    except DeliberateError:
        return
    raise BrokenPromiseError(f"{what} suppresses an error that is raised within it")


class Work:
    """A sequence of matrix products, long enough to keep a device busy for a while.

    Args:
        accelerator: the accelerator that computes.
        at_least_ms: how long it should take, in milliseconds of the host's clock.
    """

    _SIZE = 384

    def __init__(self, accelerator: Accelerator, at_least_ms: float = 30.0) -> None:
        self._matrix = torch.eye(self._SIZE, device=accelerator.current_device_name())
        self._repeats = 4
        self.queue()  # the first product sets up libraries
        accelerator.synchronize()
        # The shorter of two: the host may have been busy during one of them.
        while min(self._seconds(accelerator), self._seconds(accelerator)) < at_least_ms / 1000:
            self._repeats *= 2
            if self._repeats >= 2**14:
                return

    def _seconds(self, accelerator: Accelerator) -> float:
        start = time.perf_counter()
        self.queue()
        accelerator.synchronize()
        return time.perf_counter() - start

    def queue(self) -> torch.Tensor:
        """Queues the work on the current stream; the result is the identity matrix."""
        result = self._matrix
        for _ in range(self._repeats):
            result = result @ self._matrix
        return result
