"""Finds the operator at which a program on a device first differs from the host.

A layer, a gradient or a scaler calls many operators, and what it gives says little about which of them is
wrong. Here each operator that reaches the device is repeated on the host, on copies of the very same inputs.
The first one that gives something else is at fault, whatever is built on it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from acclimate_conformance.checks.assertions import TOLERANCE

_SECONDS = 30.0
_LARGEST = 1 << 26
"""How long it looks, in seconds of processor time, and the bytes of the largest tensor that it copies."""
_LEFT_OPEN = (
    "resize", "set_", "record_stream", "pin_memory", "is_pinned", "_local_scalar_dense",
)  # fmt: skip
"""Parts of names of operators whose results say nothing, or that do not belong to the device."""
_MADE = "empty"
"""A part of names of operators of whose results only the shape and the steps are known."""
_COMPOSED = (
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
)
"""Torch's own kernels that call other operators, for devices without one of their own."""
_ELSEWHERE = "on the same device"
"""How torch refuses tensors of several devices."""


class FirstDifference(TorchDispatchMode):
    """A block that notes the first operator of a device that differs from the host's.

    Args:
        device_type: of the device, as in torch.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device_type
        self._key: Any = torch._C._dispatch_key_for_device(device_type)
        self._until: float | None = None
        self._further = ""
        self._open: list[Any] = []
        self.found = ""
        """The operator's name, as in ``torch.ops.aten``; empty if none differs."""
        self.compared = 0

    @property
    def name(self) -> str:
        """The operator, or one whose further results alone differ: places, and what is saved for backward().

        Torch leaves much of these open.
        """
        return self.found or self._further

    @property
    def is_complete(self) -> bool:
        """Whether it has looked at all that the program called."""
        return self._until is None or time.process_time() < self._until

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._until = self._until or time.process_time() + _SECONDS
        if self.found or not self.is_complete or not self._is_judged(func, args, kwargs):
            return func(*args, **kwargs)
        own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), self._key)
        # A kernel of torch's that calls the operator again would not end.
        for key in () if own or func in self._open else _COMPOSED:
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
                self._open.append(func)
                before = self.compared
                try:
                    with self:
                        composed = func._op_dk(key, *args, **kwargs)
                    if self.found or self.compared > before:
                        return composed
                    # The host refuses what it calls, such as operators for other devices.
                except Exception:  # it may hand on numbers in a form that only C++ takes
                    if self.found:
                        raise
                finally:
                    self._open.pop()
        try:
            there = self._on_the_host((args, kwargs))
        except (RuntimeError, NotImplementedError, TypeError):  # a tensor without memory, such as a fake one
            return func(*args, **kwargs)
        wanted, refused = _result(func, *there)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            # Under a mode, torch hands on tensors of the host that its own code means to be on the device.
            if refused is not None or _ELSEWHERE not in str(error):
                raise
            result = func(*tree_map(self._moved, args), **tree_map(self._moved, kwargs))
        if refused is None and _MADE in func.__name__:
            self._compare_steps(_name_of(func), result, wanted)
        elif refused is None:
            self.compared += 1
            self._compare(_name_of(func), (result, args, kwargs), (wanted, *there))
        return result

    def _is_judged(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if any(part in func.__name__ for part in _LEFT_OPEN):
            return False
        if _MADE in func.__name__ and kwargs.get("pin_memory"):
            return False
        values, _ = tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        named = [value for value in values if isinstance(value, torch.device)]
        is_there = any(value.device.type == self._type for value in tensors) or any(
            value.type == self._type for value in named
        )
        is_plain = all(
            type(t) in (torch.Tensor, torch.nn.Parameter)
            and t.layout == torch.strided
            and not t.is_nested
            and t.untyped_storage().nbytes() <= _LARGEST
            for t in tensors
        )
        has_generator = any(isinstance(value, torch.Generator) for value in values)
        return is_there and is_plain and not has_generator

    def _on_the_host(self, given: Any) -> Any:
        """Copies of arguments, of which those that share memory share it again."""
        storages: dict[int, torch.UntypedStorage] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu") if value.type == self._type else value
            if not isinstance(value, torch.Tensor):
                return value
            storage = value.untyped_storage()
            if storage._cdata not in storages:  # by copies of tensors: those of storages may be at fault
                length = storage.nbytes()
                whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(
                    storage, 0, (length,), (1,)
                )
                storages[storage._cdata] = whole.cpu().clone().untyped_storage()
            made = torch.empty(0, dtype=value.dtype)
            made.set_(storages[storage._cdata], value.storage_offset(), value.size(), value.stride())
            made = made.conj() if value.is_conj() else made
            return torch._neg_view(made) if value.is_neg() else made

        return tree_map(copied, given)

    def _moved(self, value: Any) -> Any:
        return value.to(self._type) if isinstance(value, torch.Tensor) else value

    def _compare_steps(self, name: str, found: Any, wanted: Any) -> None:
        """Notes the name if a tensor that it makes lies in another way."""
        ours, theirs = (
            [(t.shape, t.stride(), t.dtype) for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor)]
            for made in (found, wanted)
        )
        if ours != theirs:
            self.found = name

    def _compare(self, name: str, found: Any, wanted: Any) -> None:
        """Notes the name if a result, or an argument that was changed, differs."""
        results = len(tree_flatten(wanted[0])[0])
        pairs = zip(tree_flatten(found)[0], tree_flatten(wanted)[0], strict=False)
        for number, (ours, theirs) in enumerate(pairs):
            if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor) and _differs(ours, theirs):
                if 0 < number < results and not name.endswith("_backward"):
                    # What a private operator gives besides is for its own backward pass only.
                    self._further = self._further or ("" if name.startswith("_") else name)
                else:
                    self.found = name
                    return


def _result(func: Any, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
    try:
        return func(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - an operator refuses in any way
        return None, error


def _name_of(func: Any) -> str:
    name: str = func._schema.name
    return name.partition("::")[2]


def _differs(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return True
    if found.layout != torch.strided or wanted.layout != torch.strided or not wanted.numel():
        return False
    ours, theirs = (t.detach().resolve_conj().resolve_neg().cpu() for t in (found, wanted))
    if theirs.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    if not theirs.is_floating_point():
        return not torch.equal(ours, theirs)
    if theirs.dtype.itemsize < 2:
        return False
    close, exact = ours.double(), theirs.double()
    finite = exact.isfinite()
    largest = float(exact[finite].abs().max()) if bool(finite.any()) else 1.0
    near = (close - exact).abs() <= TOLERANCE.get(theirs.dtype, 1e-2) * max(largest, 1e-6)
    same = (close == exact) | (close.isnan() & exact.isnan())
    return not bool((torch.where(finite, near, same)).all())
