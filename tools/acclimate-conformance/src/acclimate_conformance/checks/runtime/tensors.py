"""Checks of what Python sees of a device's tensors: numbers, text, storages, views, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.dlpack import from_dlpack

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    BrokenPromiseError,
    NotOfferedError,
    all_told,
    device_names,
    equal,
    is_host,
    is_on,
    refused,
    require,
    shares_memory,
)
from acclimate_conformance.checks.check import check


@check(
    "device_name",
    "current_device_name",
    "device_type",
    promise="Tensors of a device are numbers, text, sequences and storages of Python as those of the host.",
    of="tensors",
)
def tensors_in_python(accelerator: Accelerator) -> str | None:
    note = None
    with all_told() as noted:
        numbered: dict[str, int] = {}
        shared_views: dict[str, bool] = {}
        for name in device_names(accelerator):
            one = torch.zeros(1, device=name)
            for dtype, value in (
                (torch.float32, 2.75),
                (torch.float32, float("inf")),
                *((dtype, -1.625) for dtype in accelerator.supported_dtypes()),
                *((dtype, 1 + torch.finfo(dtype).eps) for dtype in accelerator.supported_dtypes()),
                (torch.int64, 2**53 + 1),
                (torch.int64, -(2**62)),
                (torch.int32, -7),
                (torch.int32, 2**24 + 1),
                (torch.int16, -32767),
                (torch.int8, -128),
                (torch.uint8, 255),
                (torch.bool, True),
                (torch.bool, False),
            ):
                number = torch.tensor(value, dtype=dtype, device=name)
                for how, found in (
                    ("item()", number.item()),
                    ("tolist()", number.tolist()),
                    ("a row's tolist()", number[None].tolist()[0]),
                    ("item() of a part", torch.stack([number, number, number])[1:2].item()),
                ):
                    noted(
                        found == value and type(found) is type(value),
                        f"{how} of {value!r} in {dtype} on {name} is {found!r}",
                    )
                noted(bool(number) is bool(value), f"bool() of {value!r} on {name} is {bool(number)}")
                if dtype is not torch.bool and value != float("inf"):
                    noted(int(number) == int(value), f"int() of {value!r} on {name} is {int(number)}")
                noted(float(number) == float(value), f"float() of {value!r} on {name} is {float(number)}")
            matrix = torch.arange(6.0, device=name).reshape(2, 3)
            host = torch.arange(6.0).reshape(2, 3)
            calls: dict[str, Callable[[torch.Tensor], Any]] = {
                "tolist()": lambda x: x.tolist(),
                "tolist() of a transposed matrix": lambda x: x.t().tolist(),
                "len()": len,
                "the rows": lambda x: [row.tolist() for row in x],
                "in": lambda x: [4.0 in x, 9.0 in x],
                "str() without the device": lambda x: str(x).replace(f", device='{x.device}'", ""),
                "element_size()": lambda x: x.element_size(),
                "nbytes": lambda x: x.nbytes,
                "dim()": lambda x: x.dim(),
                "stride()": lambda x: x.t().stride(),
                "storage_offset()": lambda x: x[1:].storage_offset(),
                "untyped_storage().nbytes()": lambda x: x.untyped_storage().nbytes(),
                "the storage's numbers": lambda x: torch.tensor(
                    x.untyped_storage().tolist(), dtype=torch.uint8
                ).tolist(),
                "is_contiguous()": lambda x: [x.is_contiguous(), x.t().is_contiguous()],
                "an index": lambda x: [1, 2, 3][x[0, 1].long()],
                "format": lambda x: f"{x[1, 2]:.2f}",
                "numel()": lambda x: x.numel(),
                "is_floating_point()": lambda x: [x.is_floating_point(), x.int().is_floating_point()],
                "hash and ==": lambda x: x in {x: 1},
                "torch.equal": lambda x: [torch.equal(x, x), torch.equal(x, x + 1)],
                "torch.allclose": lambda x: [torch.allclose(x, x + 1e-9), torch.allclose(x, x + 1)],
                "type()": lambda x: x.type().split(".")[-1],
                "is_view": lambda x: [x[0]._is_view(), x.clone()._is_view()],
            }
            for what, call in calls.items():
                found, wanted = call(matrix), call(host)
                noted(found == wanted, f"{what} of a matrix on {name} is {found!r:.100}, not {wanted!r:.100}")
            _note_text(name, noted)
            noted(
                matrix.device.type == accelerator.device_type,
                f"a tensor of {name} says it is on {matrix.device}",
            )
            noted(
                f"device='{matrix.device}'" in repr(matrix) or is_host(accelerator),
                f"repr() of a tensor on {name} does not name it: {matrix!r:.120}",
            )
            views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                "view": lambda x: x.view(3, 2),
                "x[0]": lambda x: x[0],
                "t()": lambda x: x.t(),
                "reshape": lambda x: x.reshape(6),
                "narrow": lambda x: x.narrow(1, 1, 2),
                "expand": lambda x: x[:1].expand(5, 3),
                "select": lambda x: x.select(1, 2),
                "unfold": lambda x: x.unfold(1, 2, 1),
                "diagonal": lambda x: x.diagonal(),
                "squeeze": lambda x: x[:1].squeeze(),
                "as_strided": lambda x: x.as_strided((2,), (2,), 1),
                "view in another dtype": lambda x: x.view(torch.int32),
                "a part of a part": lambda x: x[1:][:, 1:],
                "as_strided of a part": lambda x: x[1:].as_strided((2,), (1,)),
                "a part in a smaller dtype": lambda x: x.view(-1)[2:].view(torch.int16),
                "a part in a larger dtype": lambda x: x.view(-1)[2:].view(torch.int64),
                "detach": lambda x: x.detach(),
                "split": lambda x: x.split(2, 1)[1],
                "unbind": lambda x: x.unbind()[1],
                "unsqueeze": lambda x: x.unsqueeze(1),
                "flatten": lambda x: x.flatten(),
                "permute": lambda x: x.permute(1, 0),
                "swapaxes": lambda x: x.swapaxes(0, 1),
                "unflatten": lambda x: x.unflatten(1, (3, 1)),
            }
            for what, view in views.items():
                fresh = torch.arange(6.0, device=name).reshape(2, 3)
                reference = torch.arange(6.0).reshape(2, 3)
                seen, wanted_view = view(fresh), view(reference)
                noted(
                    shares_memory(seen, fresh) and seen.stride() == wanted_view.stride(),
                    f"{what} on {name} gives no view with the strides {wanted_view.stride()}",
                )
                noted(equal(seen, wanted_view), f"{what} on {name} shows other elements")
                fresh.mul_(2)
                reference.mul_(2)
                noted(equal(seen, wanted_view), f"a change of a tensor on {name} does not show in {what}")
                if what != "expand":
                    seen.zero_()
                    wanted_view.zero_()
                    noted(equal(fresh, reference), f"zeros written to {what} on {name} change other elements")
            with suppress(Exception):  # DLPack knows the devices of some vendors only
                numbered[name] = matrix.__dlpack_device__()[1]
                for what, part in {"": matrix, " of rows": matrix[1:], " of columns": matrix[:, 1:]}.items():
                    shared_views[f"a view{what} on {name}"] = equal(from_dlpack(part), part)
            if not is_host(accelerator):
                place = matrix.get_device()
                noted(place == matrix.device.index, f"get_device() of a tensor on {name} is {place}")
            storage = matrix.untyped_storage()
            noted(str(storage.device) == str(matrix.device), f"a storage of {name} is on {storage.device}")
            try:
                matrix.untyped_storage().resize_(0)
            except RuntimeError as error:  # torch itself does so for some types only, such as not for MPS
                if "unexpected device type" not in str(error):
                    raise
                note = f"torch resizes no storages on {accelerator.device_type}"
            else:
                left = matrix.untyped_storage().nbytes()
                noted(left == 0, f"resize_(0) of a storage on {name} keeps its memory")
                kept = torch.arange(4.0, device=name)
                for size in (4096, 12):
                    kept.untyped_storage().resize_(size)
                    noted(
                        equal(kept[:3] if size == 4096 else kept.as_strided((3,), (1,)), torch.arange(3.0)),
                        f"resize_({size}) of a storage on {name} loses what it held",
                    )
            grown = torch.arange(3.0, device=name)
            grown.resize_(5)
            noted(
                equal(grown[:3], torch.arange(3.0)),
                f"resize_() of a tensor on {name} loses its first elements",
            )
            whole = torch.arange(6.0, device=name)
            part = whole[:2]
            whole.resize_(3)
            part.fill_(-1)
            whole.resize_(6)
            noted(
                equal(whole, torch.tensor([-1.0, -1.0, 2.0, 3.0, 4.0, 5.0])),
                f"resize_() to fewer elements and back on {name} gives {whole.tolist()}",
            )
            _note_shared(name, is_host(accelerator), noted)
            shared = torch.zeros(2, device=name)
            shared.set_(one.new_tensor([5.0, 6.0, 7.0]).untyped_storage(), 1, (2,), (1,))
            noted(equal(shared, torch.tensor([6.0, 7.0])), f"set_() on {name} gives {shared.tolist()}")
            shared.data = torch.ones(3, device=name)
            noted(equal(shared, torch.ones(3)), f"assigning data on {name} gives {shared.tolist()}")
            _note_refusals(name, is_host(accelerator), noted)
        for what, same in shared_views.items():
            noted(same, f"torch.from_dlpack of {what} holds other numbers")
        for name, index in numbered.items():
            wanted_index = torch.device(name).index or 0
            noted(index == wanted_index, f"__dlpack_device__() of a tensor on {name} names device {index}")
    return note


@check(
    "device_type", "device_name", "current_device", "synchronize",
    promise="The methods of torch's classes that are named after the device, as x.cuda(1), move to the "
    "device that is named, or else to the current one.",
    of="tensors",
)  # fmt: skip
def methods_move_to_the_named_device(accelerator: Accelerator) -> None:
    kind = accelerator.device_type
    if is_host(accelerator) or not callable(getattr(torch.Tensor, kind, None)):
        raise NotOfferedError(f"torch.Tensor has no method {kind}()")
    names = device_names(accelerator)
    # What torch names after a device differs by device: torch.Tensor.mps is absent, Tensor.xpu is not.
    makers: dict[str, Callable[[], Any]] = {
        "torch.Tensor": lambda: torch.arange(3.0),
        "torch.nn.Parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
        "torch.nn.Module": _module,
        "a subclass of torch.Tensor": lambda: torch.arange(3.0).as_subclass(_Noted),
        "torch.UntypedStorage": lambda: torch.arange(3.0).untyped_storage(),
        "torch.nn.utils.rnn.PackedSequence": lambda: pack_sequence([torch.arange(3.0)]),
    }
    of_any = (
        "torch.Tensor",
        "torch.nn.Parameter",
        "a subclass of torch.Tensor",
    )  # the others document an index only
    for current, here in enumerate(names):
        with accelerator.device(current):
            for what, make in makers.items():
                if not callable(getattr(make(), kind, None)):
                    continue
                for index, there in enumerate(names):
                    if what == "torch.UntypedStorage" and index == 0 and current != 0:
                        continue  # torch's own method takes 0 for no index
                    ways = (index, torch.device(there), there) if what in of_any else (index,)
                    for device in ways:
                        _require_moved(getattr(make(), kind)(device), there, f"{what}.{kind}({device!r})")
                    if what in of_any:
                        moved = getattr(make(), kind)(index, non_blocking=True)
                        accelerator.synchronize(index)
                        _require_moved(moved, there, f"{what}.{kind}({index}, non_blocking=True)")
                    if what != "torch.UntypedStorage":
                        moved = getattr(make(), kind)(device=index)
                        _require_moved(moved, there, f"{what}.{kind}(device={index})")
                    if what in ("torch.Tensor", "torch.nn.Module"):
                        again = getattr(getattr(make(), kind)(index), kind)(current)
                        _require_moved(again, here, f"{what}.{kind}({current}) of one on {there}")
                _require_moved(getattr(make(), kind)(), here, f"{what}.{kind}() while {here} is current")


class _Noted(torch.Tensor):
    """A class of the program's own, to which torch's methods belong too."""


def _module() -> torch.nn.Module:
    """A module with a gradient, and with buffers of which one is not saved."""
    made = torch.nn.Linear(2, 3)
    made.register_buffer("counts", torch.arange(3.0))
    made.register_buffer("scratch", torch.ones(2), persistent=False)
    made.bias.requires_grad_()
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    return made


def _require_moved(moved: Any, name: str, what: str) -> None:
    """Fails the check unless something is on a device and holds 0, 1 and 2, if it is no module."""
    if isinstance(moved, torch.nn.Module):
        parts = [*moved.parameters(), *moved.buffers()]
        parts += [p.grad for p in moved.parameters() if p.grad is not None]
        places = {str(part.device) for part in parts}
        require(
            places == {str(torch.device(name))} and len(parts) == 6,
            f"{what} has parameters, buffers or gradients on {', '.join(sorted(places))}",
        )
        return
    if isinstance(moved, PackedSequence):
        told = moved.batch_sizes.device
        require(told.type == "cpu", f"{what} has its batch_sizes on {told}")
    if "subclass" in what:
        require(type(moved) is _Noted, f"{what} is a {type(moved).__name__}")
    if isinstance(moved, torch.UntypedStorage):
        require(moved.device == torch.device(name), f"{what} is on {moved.device}")
        return
    values = getattr(moved, "data", moved)
    require(values.device == torch.device(name), f"{what} is on {values.device}")
    require(values.cpu().flatten().tolist() == [0.0, 1.0, 2.0], f"{what} changes the numbers")


def _note_shared(name: str, on_host: bool, noted: Callable[[bool, str], None]) -> None:
    """share_memory_() leaves tensors of a device as they are; torch has it for some types of devices."""
    kind = torch.device(name).type
    if on_host:
        return
    tensor, module = torch.arange(3.0, device=name), torch.nn.Linear(2, 2, device=name)
    try:
        same = tensor.share_memory_() is tensor and module.share_memory() is module
        told = tensor.is_shared() and module.weight.is_shared()
    except Exception as error:  # noqa: BLE001 - a device may raise any error
        is_of_a_vendor = kind == torch._C._get_privateuse1_backend_name()  # which torch treats as its own
        noted(not is_of_a_vendor, f"share_memory_() on {name} raises {type(error).__name__}: {error}"[:200])
        return
    noted(same and told, f"share_memory_() on {name} returns another one, or is_shared() is False")
    stays = is_on(tensor, name) and is_on(module.weight, name)
    noted(
        stays and equal(tensor, torch.arange(3.0)),
        f"share_memory_() moves what is on {name} to {tensor.device} and {module.weight.device}",
    )


_SHOWN = (
    "float64", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool",
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""Dtypes of which torch shows tensors of the host."""


def _note_text(name: str, noted: Callable[[bool, str], None]) -> None:
    """A tensor of any dtype that the device stores is shown as the host's is."""
    for dtype in (getattr(torch, kind) for kind in _SHOWN if hasattr(torch, kind)):
        given = (torch.arange(6.0).reshape(2, 3) / 2).to(dtype)
        try:
            there = given.to(name)
            back = there.cpu()
        except (RuntimeError, TypeError):  # the device does not store it
            continue
        noted(back.dtype == dtype and repr(back) == repr(given), f"{dtype} on {name} is {back!r} on the host")
        try:
            text = repr(there).replace(f", device='{there.device}'", "")
        except Exception as error:  # noqa: BLE001 - a device raises any error
            noted(False, f"repr() of {dtype} on {name} raises {type(error).__name__}: {error}"[:200])
            continue
        wanted = repr(given)
        noted(
            "".join(text.split()) == "".join(wanted.split()),
            f"repr() of {dtype} on {name} is {text}, not {wanted}",
        )


def _note_refusals(name: str, on_host: bool, noted: Callable[[bool, str], None]) -> None:
    pair = torch.ones(2, device=name)
    refusals: dict[str, Callable[[], object]] = {
        "item() of two numbers": pair.item,
        "bool() of two numbers": lambda: bool(pair),
        "int() of two": lambda: int(pair),
        "view of another size": lambda: pair.view(3),
        "len() of a number": lambda: len(pair[0]),
        "an index beyond the end": lambda: pair[2],
        "set_ beyond the storage": lambda: pair.as_strided((9,), (1,)).sum().item(),
        "a view of a transposed matrix": lambda: torch.ones(2, 3, device=name).t().view(6),
        "a float as an index": lambda: [1, 2][pair[0]],
    }
    if not on_host:
        refusals["numpy()"] = pair.numpy
    for what, call in refusals.items():
        try:
            with refused(f"{what} on {name}", RuntimeError, IndexError, TypeError, ValueError):
                call()
        except BrokenPromiseError as accepted:
            noted(False, str(accepted))
