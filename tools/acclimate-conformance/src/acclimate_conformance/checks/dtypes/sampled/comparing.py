"""Compares what a call gives on a device with what it gives on the host."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from acclimate.accelerator import Accelerator
from acclimate.imports import describe
from acclimate_conformance.checks.assertions import shares_memory, short
from acclimate_conformance.checks.claims import lacking
from acclimate_conformance.checks.dtypes.references import nearest
from acclimate_conformance.checks.dtypes.sampled.places import HOST, Place, tensors_in
from acclimate_conformance.checks.dtypes.sampled.samples import seed_host
from acclimate_conformance.checks.innermost import FirstDifference
from acclimate_conformance.checks.target import LOST, still_computes

Run = Callable[[Place], Any]
"""A call, which puts its inputs at a place; returns tensors and other values, in any structure."""

_REFUSAL = re.compile(
    r"not implemented|not (currently |yet )?support|unsupported|no kernel|missing kernel|not available"
    r"|requires (compil|MAGMA)|only supports|does not support|doesn't support|can't use|of supported devices"
    r"|only supported"
    r"|can only be called in training mode",
    re.IGNORECASE,
)
OF_PRODUCTS = {
    torch.float64: 1e-8,
    torch.float32: 4e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex128: 1e-8,
    torch.complex64: 4e-3,
    torch.complex32: 2e-2,
}
"""How far a result may be from the host's: devices may round float32 products to 10 bits. Of float64 it is
less than what float32 loses."""
_RELATIVE = {**OF_PRODUCTS, torch.float32: 1e-4, torch.complex64: 1e-4}
"""The same, of operators that do not multiply matrices."""
_PRODUCTS = re.compile(
    r"mm|matmul|mv|linear|conv|einsum|attention|transformer|lstm|gru|rnn|dot|cdist|linalg|fft|cov|corr"
    r"|solve|inver|\blu|chol|addr|inner|matrix|outer|kron|dist",
    re.IGNORECASE,
)
_WITH_EQUAL = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""The dtypes that torch.equal compares on every build."""
_NOISE = 32
"""How many units in the last place of 1 any result may be off."""
_DIFFERENCES = 3
"""After so many differing calls a topic ends."""


def is_refusal(error: Exception) -> bool:
    """Whether an error says that a device lacks what was called."""
    return isinstance(error, NotImplementedError) or _REFUSAL.search(str(error)) is not None


@dataclass
class Findings:
    """What differs on the device, and what it lacks."""

    accelerator: Accelerator
    broken: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    """Which dtypes the device lacks, and does not claim."""
    compared: int = 0
    usable: bool = True
    """Whether the device still computes: a fault in a kernel may end that until the process ends."""
    remark: str = ""
    """What else the reader should know."""

    def __post_init__(self) -> None:
        self.device = self.accelerator.current_device_name()

    @property
    def enough(self) -> bool:
        """Whether more differences would tell nothing new."""
        return len(self.broken) >= _DIFFERENCES or not self.usable

    def compare(
        self, name: str, what: str, run: Run, here: Place | None = None, there: Place | None = None,
        near: Callable[[Any, Any], str] | None = None, may_be_refused: bool = False,
        usual: Run | None = None,
    ) -> None:  # fmt: skip
        """Notes how a call on the device differs from the same call on the host, if it does.

        What the host refuses is not asked of the device: a number that it refuses may end its work.

        Args:
            name: the operator.
            what: the call, as text.
            run: makes it.
            here: where the host's inputs are.
            there: where the device's inputs are.
            near: says how a result differs from the host's; if ``None``, :func:`difference`.
            may_be_refused: whether the device may raise an error, unlike the host.
            usual: makes the call in another form: a device may lack an operator, but not just one length,
                layout or thread of it.
        """
        if (
            not self.usable
            or name in self.lacking
            or any(text.startswith(f"{name}(") for text in self.broken)
        ):
            return  # one difference of an operator says enough
        here, there = here or Place(HOST), there or Place(self.device)
        wanted, refused_here = attempt(run, here)
        if refused_here is not None:
            return
        found, refused = self.called(what, run, there)
        if refused is not None:
            if may_be_refused or not self.usable:
                return
            if "to be on cpu" in str(refused):  # an argument that may only be on the host
                return
            absent = lacking(self.accelerator, refused)
            if absent:
                self.dtypes.add(absent.partition(":")[0].removeprefix("the device has no "))
                return
            if is_refusal(refused) and not self._works(
                name, usual or (run if there.lies_otherwise else None)
            ):
                self.lacking[name] = describe(refused)
                return
            self.broken.append(f"{what} raises {describe(refused, whole=True)[:300]}")
            return
        if elsewhere := _elsewhere(found, there.device):
            self.broken.append(f"{what} of tensors on {there.device} gives one on {elsewhere}")
        by_element = near is not None
        if near is None:
            relative = OF_PRODUCTS if _PRODUCTS.search(name) else _RELATIVE

            def near(ours: Any, theirs: Any) -> str:
                return difference(ours, theirs, relative)

        reason = near(found, wanted)
        if reason and not draws(run, there):
            # The host rounds too, and computes in its own way: a device may be as near to what is exact.
            exact, _ = attempt(run, here.exactly())
            reason = near(found, _nearest(found, wanted, exact, by_element))
        else:
            reason = ""
        if reason:
            self.broken.append(f"{what}: {reason}{self._innermost(run, there)}")
        self.compared += 1

    def _works(self, name: str, usual: Run | None) -> bool:
        """Whether the device makes a call in its usual form; private operators may ask for one form."""
        if usual is None or name.removeprefix("torch.").startswith(("_", "ops.")):
            return False
        return attempt(usual, Place(self.device))[1] is None

    def called(self, what: str, run: Run, there: Place | None = None) -> tuple[Any, Exception | None]:
        """The result of a call on the device, or its error; a fault that lasts is noted.

        The host waits for the result: a fault in a kernel shows only then, and would be another call's later.
        """

        def completed(place: Place) -> Any:
            result = run(place)
            self.accelerator.synchronize()
            return result

        result, refused = attempt(completed, there or Place(self.device))
        if refused is not None and not still_computes(self.accelerator):
            self.usable = False
            self.broken.append(f"{what} raises {describe(refused, whole=True)[:300]}, {LOST}")
        return result, refused

    def _innermost(self, run: Run, there: Place) -> str:
        """Which of the operators that a call calls is wrong, as text, if one is wrong by itself."""
        mode = FirstDifference(self.accelerator.device_type)
        with mode:
            attempt(run, there)
        return f"; the operator {mode.name} differs" if mode.name else ""

    def note(self) -> str:
        """What the device lacks, as a note."""
        names = [*sorted(self.dtypes), *sorted(self.lacking)]
        more = f" and {len(names) - 12} others" if len(names) > 12 else ""
        lacks = f"it has no {', '.join(names[:12])}{more}" if names else ""
        return "; ".join(filter(None, (lacks, self.remark)))


def _elsewhere(found: Any, device: str) -> str:
    """The other device of the same type that a result is on; empty if there is none."""
    here = torch.device(device)
    places = {
        t.device for t in tensors_in(found) if isinstance(t, torch.Tensor) and t.device.type == here.type
    }
    return next((str(place) for place in places if here.index not in (None, place.index)), "")


def attempt(run: Run, place: Place) -> tuple[Any, Exception | None]:
    """The result of a call, or its error."""
    seed_host(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(place), None
    except Exception as error:  # noqa: BLE001 - operators and devices refuse in any way
        return None, error


class _Draws(TorchDispatchMode):
    """Notes whether an operator draws random numbers on a device."""

    found: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs or {}):
            there = [t for t in tensors_in([args, result]) if isinstance(t, torch.Tensor)]
            self.found |= any(t.device.type != HOST for t in there)
        return result


def _drops_nothing(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that draws numbers only to drop elements drops none, as attention mostly does."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= dict(zip(given, args, strict=False))
    given |= kwargs
    shares, training = ("dropout_p", "dropout"), ("train", "training")
    return any(given.get(name) == 0 for name in shares) or any(given.get(name) is False for name in training)


def draws(run: Run, place: Place) -> bool:
    """Whether a call draws random numbers on a device, which each does in its own way.

    Another seed would not show it: many functions of torch's own tests set the seed themselves.
    """
    mode = _Draws()  # type: ignore[no-untyped-call]
    with mode:
        attempt(run, place)
    return mode.found


def _nearest(found: Any, on_host: Any, exact: Any, by_element: bool) -> Any:
    """The host's results, with float64's numbers where the device's are nearer to those."""
    ours, theirs, others = (list(tensors_in(value)) for value in (found, on_host, exact))
    if not len(ours) == len(theirs) == len(others):
        return on_host
    chosen = [
        nearest(o, t, x, by_element) if all(isinstance(value, torch.Tensor) for value in (o, t, x)) else t
        for o, t, x in zip(ours, theirs, others, strict=True)
    ]
    return chosen[0] if isinstance(on_host, torch.Tensor) else chosen


def difference(found: Any, wanted: Any, relative: Mapping[torch.dtype, float] | None = None) -> str:
    """How a device's result differs from the host's; empty if it does not."""
    ours, theirs = list(tensors_in(found)), list(tensors_in(wanted))
    if len(ours) != len(theirs):
        return f"there are {len(ours)} results, not {len(theirs)}"
    for number, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        reason = _difference_of_one(actual, expected, relative or OF_PRODUCTS)
        if reason:
            return f"result {number + 1}: {reason}" if len(theirs) > 1 else reason
    return ""


def twice_as_far(found: Any, wanted: Any) -> str:
    """The same with twice the room: a gradient in 16 bits goes through them twice."""
    return difference(found, wanted, {dtype: 2 * allowed for dtype, allowed in OF_PRODUCTS.items()})


def _difference_of_one(actual: Any, expected: Any, relative: Mapping[torch.dtype, float]) -> str:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        if type(actual) is not type(expected):
            return f"it is a {type(actual).__name__}, not a {type(expected).__name__}"
        if isinstance(expected, (bool, int, str, torch.dtype, torch.Size)) and actual != expected:
            return f"it is {actual!r}, not {expected!r}"
        if isinstance(expected, float):
            return _difference_of_one(torch.tensor(actual), torch.tensor(expected), relative)
        return ""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return (
            f"it is {short(actual.dtype)}{list(actual.shape)}, not "
            f"{short(expected.dtype)}{list(expected.shape)}"
        )
    if expected.layout != torch.strided or expected.is_nested:
        return ""
    return difference_of_values(actual, expected, relative)


def difference_of_values(
    actual: torch.Tensor, expected: torch.Tensor, relative: Mapping[torch.dtype, float] | None = None
) -> str:
    """How the elements of a tensor of the device differ from those of one of the host."""
    if actual.dtype is torch.bool and expected.dtype is torch.bool:
        # As bytes: any other than 0 and 1 is no truth value, which a copy to the host may hide.
        actual, expected = actual.detach().view(torch.uint8), expected.detach().view(torch.uint8)
    ours, theirs = (t.detach().resolve_conj().resolve_neg().cpu() for t in (actual, expected))
    if not theirs.numel():
        return ""
    if ours.dtype == theirs.dtype and theirs.dtype in _WITH_EQUAL and torch.equal(ours, theirs):
        return ""  # most are, and what follows takes longer than most calls
    if not (theirs.is_floating_point() or theirs.is_complex()):
        wrong = ours != theirs
    else:
        allowed = (relative or OF_PRODUCTS).get(theirs.dtype, 0.3)  # float8 has 2 or 3 bits
        wide = torch.complex128 if theirs.is_complex() else torch.float64
        close, exact = ours.to(wide), theirs.to(wide)
        finite = exact.isfinite()
        # Relative to the largest: an element of a product may be small because large terms cancel.
        largest = float(exact[finite].abs().max()) if bool(finite.any()) else 1.0
        slack = allowed * max(largest, 1e-3)
        if theirs.dtype.itemsize >= 4:  # a sum that would be 0, as gradients of norms have, is rounding noise
            slack = max(slack, _NOISE * torch.finfo(theirs.dtype).eps)
        near = torch.where(finite, (close - exact).abs() <= slack, (close == exact) | _both_nan(close, exact))
        wrong = ~near
    if not bool(wrong.any()):
        return ""
    place = int(wrong.flatten().nonzero()[0])
    many = f"element {place} of {theirs.numel()} " if theirs.numel() > 1 else "it "
    return f"{many}is {ours.flatten()[place].item()}, not {theirs.flatten()[place].item()}"


def _both_nan(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if not first.is_complex():
        return first.isnan() & second.isnan()
    # C leaves open which part of a complex number that is not finite is NaN.
    return ~first.isfinite() & ~second.isfinite()


def shared(result: Any, inputs: Iterable[Any]) -> list[int]:
    """For each tensor of a result, the number of the input whose memory it uses, or -1."""
    given = [t for t in tensors_in(list(inputs)) if isinstance(t, torch.Tensor)]
    return [
        next((n for n, t in enumerate(given) if shares_memory(r, t)), -1)
        for r in tensors_in(result)
        if isinstance(r, torch.Tensor)
    ]
