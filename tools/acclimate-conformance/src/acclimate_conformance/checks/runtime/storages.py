"""Checks of storages, of pointers into them, and of modules and parameters that move."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from acclimate.accelerator import Accelerator, HostStream
from acclimate_conformance.checks.assertions import (
    all_told,
    device_names,
    equal,
    is_host,
    refused,
    require,
    shares_memory,
)
from acclimate_conformance.checks.check import check

_LENGTHS = (1, 2, 3, 5, 7, 9, 31, 1003)
"""Bytes, of which most are no whole number of words."""


def _bytes(length: int) -> torch.Tensor:
    return (torch.arange(length) % 251 + 1).to(torch.uint8)


@check(
    "device_name", "current_device_name",
    promise="A storage keeps its bytes as long as anything refers to it, and copies, fills and shows each of "
    "them; views see a storage that is resized.",
    of="tensors",
)  # fmt: skip
def storages_hold_their_bytes(accelerator: Accelerator) -> None:
    for name in device_names(accelerator):
        with all_told() as noted:
            for length in _LENGTHS:
                values = _bytes(length)
                there = values.to(name)
                made = torch.zeros(length, dtype=torch.uint8, device=name)
                made.untyped_storage().copy_(values.untyped_storage())
                back = torch.zeros(length, dtype=torch.uint8)
                back.untyped_storage().copy_(there.untyped_storage())
                ways = {
                    "copy_() from the host": made,
                    "copy_() to the host": back,
                    "cpu()": _of(there.untyped_storage().cpu()),
                    "clone()": _of(there.untyped_storage().clone()),
                }
                for how, found in ways.items():
                    noted(equal(found, values), f"{how} of a storage of {length} bytes on {name} is wrong")
                filled = values.to(name)
                filled.untyped_storage()[:] = 9
                wanted = torch.full_like(values, 9)
                noted(equal(filled, wanted), f"fill_() of a storage of {length} bytes on {name} is wrong")
                filled.untyped_storage()[length - 1] = 4
                wanted[-1] = 4
                noted(equal(filled, wanted), f"writing the last byte of a storage on {name} does not show")
                last = filled.untyped_storage()[length - 1]
                noted(last == 4, f"the last byte of a storage on {name} is {last}, not 4")
            storage = torch.arange(1000.0, device=name).untyped_storage()
            gc.collect()
            others = [torch.full((1000,), -1.0, device=name) for _ in range(4)]
            again = torch.empty(0, device=name).set_(storage, 0, (1000,), (1,))
            noted(
                equal(again, torch.arange(1000.0)) and len(others) == 4,
                f"a storage on {name} loses its numbers when the last tensor of it is gone",
            )
            _note_regrown(accelerator, name, noted)
            _note_pointers(name, noted)


def _of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (len(storage),), (1,))


def _note_regrown(accelerator: Accelerator, name: str, noted: Callable[[bool, str], None]) -> None:
    """A storage that is emptied and grows again, as FSDP does with parameters, is that of all its views."""
    base = torch.arange(8.0, device=name)
    views = {"a part": base[2:5], "a matrix": base.view(2, 4), "itself": base, "detached": base.detach()}
    size = base.untyped_storage().nbytes()
    try:
        base.untyped_storage().resize_(0)
    except RuntimeError as error:  # torch resizes storages of some types of devices only
        if "unexpected device type" in str(error):
            return
        raise
    _note_recorded(accelerator, name, base, noted)
    base.untyped_storage().resize_(size)
    base.fill_(3)
    for what, view in views.items():
        noted(
            equal(view, torch.full(view.shape, 3.0)),
            f"{what} of a tensor on {name} does not see its storage that was emptied and has grown again",
        )


def _note_recorded(
    accelerator: Accelerator, name: str, emptied: torch.Tensor, noted: Callable[[bool, str], None]
) -> None:
    """A stream may use whatever part of a storage a tensor is, also one that is emptied."""
    if is_host(accelerator) or issubclass(accelerator.Stream, HostStream):
        return
    base = torch.arange(24.0, device=name).view(4, 6)
    for what, tensor in {
        "a tensor whose storage is emptied": emptied, "a tensor without memory": base.new_empty(0),
        "a tensor": base, "a row": base[2], "a column": base[:, 3], "a transposed view": base.t(),
        "an expanded number": base[1, 1].expand(3), "a parameter": torch.nn.Parameter(base[1:]),
    }.items():  # fmt: skip
        for which, stream in (
            ("current stream", accelerator.current_stream(name)), ("new stream", accelerator.Stream(name)),
        ):  # fmt: skip
            try:
                tensor.record_stream(stream)
            except (NotImplementedError, AttributeError):
                return
            except (RuntimeError, TypeError) as error:
                noted(False, f"record_stream() of {what} on {name} for the {which} raises {error}")


def _note_pointers(name: str, noted: Callable[[bool, str], None]) -> None:
    base = torch.arange(24.0, device=name).view(4, 6)
    start = base.data_ptr()
    for what, view, offset in (
        ("a row", base[2], 12), ("a column", base[:, 3], 3), ("the end", base.view(-1)[23:], 23),
        ("a transposed view", base.t(), 0),
    ):  # fmt: skip
        found = view.data_ptr() - start
        noted(found == 4 * offset, f"data_ptr() of {what} on {name} is {found} bytes after that of all of it")
        noted(
            view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr(),
            f"the storage of {what} on {name} has another data_ptr()",
        )
    many = [torch.zeros(5, device=name) for _ in range(8)]
    different = len({tensor.untyped_storage().data_ptr() for tensor in many})
    noted(different == len(many), f"{len(many)} storages on {name} have {different} different data_ptr()")
    kept = torch.full((2000,), 5.0, device=name)
    try:
        shared = from_dlpack(kept)
    except Exception:  # noqa: BLE001 - DLPack knows the devices of some vendors only
        return
    del kept
    gc.collect()
    later = [torch.zeros(2000, device=name) for _ in range(4)]
    noted(
        equal(shared, torch.full((2000,), 5.0)) and len(later) == 4,
        f"what DLPack shares of a tensor on {name} changes when that tensor is gone",
    )


class _Tied(torch.nn.Module):
    """A module with tied weights, a part of one as a buffer, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.counts: torch.Tensor
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.table(places)))
        return found


@check(
    "device_name", "current_device_name",
    promise="A module that is moved keeps its weights, what these share, gradients and hooks; a parameter is "
    "where its data is.",
    of="tensors",
)  # fmt: skip
def modules_move(accelerator: Accelerator) -> None:
    names = ["cpu", *device_names(accelerator)]
    for source in names:
        for target in names:
            where = f"a module that is moved from {source} to {target}"
            torch.manual_seed(1)
            module = _Tied().to(source)
            module.head.weight = module.table.weight
            places = torch.arange(5)
            module(places.to(source)).sum().backward()
            wanted = {key: value.detach().cpu().clone() for key, value in module.state_dict().items()}
            parameters = list(module.parameters())
            gradients = [p.grad.cpu().clone() for p in parameters if p.grad is not None]
            returned = module.to(target)
            require(returned is module, f"{where}: to() returns another one")
            # A device on which torch replaces parameters, as XLA's, gives each module one of its own.
            replaced = not any(new is old for new, old in zip(module.parameters(), parameters, strict=False))
            tied = module.head.weight is module.table.weight
            require(tied or replaced, f"{where} unties its weights")
            module.head.weight = module.table.weight
            place = torch.empty(0, device=target).device
            for key, value in module.state_dict().items():
                require(value.device == place, f"{where} has {key} on {value.device}")
                require(
                    value.dtype == wanted[key].dtype and equal(value, wanted[key]), f"{where} changes {key}"
                )
            require(module.scratch.device == place, f"{where} leaves a buffer that is not saved")
            found = [p.grad for p in module.parameters() if p.grad is not None]
            require(len(found) == len(gradients), f"{where} loses gradients")
            for ours, theirs in zip(found, gradients, strict=True):
                require(ours.device == place and equal(ours, theirs), f"{where} has other gradients")
            module(places.to(target)).sum().backward()
            twin = copy.deepcopy(module)
            require(twin.head.weight is twin.table.weight, f"copy.deepcopy of {where} unties its weights")
            for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True):
                apart = ours.grad is None or theirs.grad is None or not shares_memory(ours.grad, theirs.grad)
                require(apart, f"copy.deepcopy of a module on {target} shares its gradients")
            _require_placed(source, target)


def _require_placed(source: str, target: str) -> None:
    """Parameters whose data is replaced or swapped, and modules without memory, which are made elsewhere."""
    place = torch.empty(0, device=target).device
    parameter = torch.nn.Parameter(torch.arange(3.0, device=source))
    try:
        parameter.data = parameter.data.to(target)
    except RuntimeError as error:  # as on a device on which torch replaces parameters
        require("set_data" in str(error), f"a parameter of {source} whose data is moved to {target}: {error}")
    else:
        told = parameter.device
        require(
            told == place and equal(parameter * 2, torch.arange(3.0) * 2),
            f"a parameter of {source} whose data was moved to {target} says that it is on {told}",
        )
    first, second = torch.arange(3.0, device=source), torch.arange(4.0, device=target)
    torch.utils.swap_tensors(first, second)
    require(
        equal(first, torch.arange(4.0)) and equal(second, torch.arange(3.0)) and first.device == place,
        f"torch.utils.swap_tensors of tensors on {source} and {target} does not swap them",
    )
    made = torch.nn.Linear(3, 2, device="meta").to_empty(device=target)
    require(made.weight.device == place, f"to_empty() makes a module on {made.weight.device}, not {target}")
    made.load_state_dict({"weight": torch.ones(2, 3, device=source), "bias": torch.zeros(2, device=source)})
    require(
        made.weight.device == place and equal(made(torch.ones(1, 3, device=target)), torch.full((1, 2), 3.0)),
        f"load_state_dict() of a module on {target} from {source} is wrong",
    )
    with torch.device("meta"):
        assigned = torch.nn.Linear(3, 2)
    state = {"weight": torch.ones(2, 3, device=target), "bias": torch.zeros(2, device=target)}
    assigned.load_state_dict(state, assign=True)
    require(assigned.weight.device == place, f"load_state_dict(assign=True) leaves {assigned.weight.device}")
    x = torch.ones(3, device=source, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        x.grad = None
        x.to(target, dtype, non_blocking=True).float().mul(torch.arange(3.0, device=target)).sum().backward()
        gradient: Any = x.grad
        require(
            gradient is not None and (gradient.dtype, gradient.device) == (torch.float32, x.device),
            f"the gradient of a tensor on {source} that was moved to {target} in {dtype} is "
            f"{gradient if gradient is None else (gradient.dtype, gradient.device)}",
        )
        require(equal(gradient, torch.arange(3.0)), f"a move from {source} to {target} changes a gradient")
    copied = copy.deepcopy(x).grad
    require(
        copied is not None
        and x.grad is not None
        and equal(copied, torch.arange(3.0))
        and not shares_memory(copied, x.grad),
        f"copy.deepcopy of a tensor on {source} with a gradient has no gradient of its own",
    )
    if source != target:
        with refused(f"set_() of a storage of {target} on {source}", RuntimeError):
            torch.empty(0, device=source).set_(torch.ones(3, device=target).untyped_storage(), 0, (2,), (1,))
        with refused(
            f"torch.asarray(copy=False) of a tensor on {source} on {target}", ValueError, RuntimeError
        ):
            torch.asarray(torch.ones(3, device=source), device=target, copy=False)
