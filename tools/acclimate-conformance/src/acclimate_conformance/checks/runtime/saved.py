"""Checks that tensors keep their device, type and gradients in files and on the way to other processes."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from acclimate.accelerator import Accelerator
from acclimate_conformance.checks.assertions import (
    device_names,
    equal,
    is_host,
    is_on,
    refused,
    require,
    shares_memory,
    short,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.dtypes.exactness import extremes, same_bits


def _saved_and_loaded(things: Any, place: Any = None, zipped: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(things, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    return torch.load(file, map_location=place)


def _sent(things: Any) -> Any:
    """As a queue between processes does it; raises if a device cannot share memory with its own process."""
    return pickle.loads(bytes(ForkingPickler.dumps(things)))


@check(
    "device_name", "current_device_name", "current_device",
    promise="Saved, pickled, sent and copied tensors keep values, device, type and requires_grad.",
    of="tensors",
)  # fmt: skip
def tensors_are_saved(accelerator: Accelerator) -> str | None:
    names = device_names(accelerator)
    ways = _ways(names[0])
    note = None
    _require_made_there(names)
    if "torch.multiprocessing" not in ways:
        note = "a tensor cannot be sent within one process, so its way to another one is not observed"
    for name in names:
        _require_structures(name, ways)
        _require_present_numbers(name, ways)
        for what, things in _kinds(name).items():
            for how, way in ways.items():
                if how == "torch.multiprocessing" and what in _LAZY:
                    continue  # torch loses the mark of a host's tensor
                _require_same_thing(way(things), things, f"{what} on {name} after {how}")
        tensor = torch.arange(6.0, device=name)
        for place in ("cpu", *names):
            loaded = _saved_and_loaded(tensor, place)
            wanted = torch.zeros(1, device=place).device
            require(
                loaded.device == wanted,
                f"a tensor of {name} that torch.load maps to {place} is on {loaded.device}",
            )
            require(equal(loaded, tensor), f"a tensor of {name} that torch.load maps to {place} is changed")
            _require_read_in_parts(name, place)
        _require_safetensors_read(name)
        if not is_host(accelerator):
            _require_absent_devices_are_refused(accelerator, name)
    return note


def _require_structures(name: str, ways: dict[str, Callable[[Any], Any]]) -> None:
    """Tensors within lists, modules and their states keep their device when they are made again."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to(name)
    things: dict[str, Any] = {
        "list": [torch.nn.Parameter(torch.arange(3.0, device=name)), torch.arange(4, device=name)[1:3]],
        "state": module.state_dict(), "device": torch.device(name), "size": module[0].weight.shape,
        "pair": (torch.ones(2, device=name)[:1], torch.zeros(2)), "dtype": torch.bfloat16,
    }  # fmt: skip
    for how, way in ways.items():
        if how.startswith("torch.save"):
            found = way({key: value for key, value in things.items() if key != "module"})
        else:
            found = way({**things, "module": module})
            for ours, theirs in zip(found["module"].parameters(), module.parameters(), strict=True):
                _require_same_thing(ours, theirs, f"a parameter of a module on {name} after {how}")
        for key in ("device", "size", "dtype"):
            require(found[key] == things[key], f"{key} of {name} is {found[key]} after {how}")
        for ours, theirs in zip(
            (*found["list"], *found["pair"]), (*things["list"], *things["pair"]), strict=True
        ):
            _require_same_thing(ours, theirs, f"a tensor in a list on {name} after {how}")
        for key, value in things["state"].items():
            _require_same_thing(found["state"][key], value, f"{key} in a state on {name} after {how}")


def _require_present_numbers(name: str, ways: dict[str, Callable[[Any], Any]]) -> None:
    """A tensor that went a way before and was changed since goes it with its present numbers."""
    for what, tensor in (
        ("a tensor", torch.ones(5, device=name)),
        ("a part", torch.ones(9, device=name)[2:7]),
        ("a parameter", torch.nn.Parameter(torch.ones(5, device=name))),
    ):
        for how, way in ways.items():
            for number in (3.0, 7.0):
                with torch.no_grad():
                    tensor.fill_(number)
                require(
                    equal(way(tensor).detach(), torch.full((5,), number)),
                    f"{what} on {name} that changed after {how} has old numbers the second time",
                )


def _require_read_in_parts(name: str, place: str) -> None:
    """Fails the check unless a file that is mapped into memory gives each of its tensors."""
    tensors = [
        torch.arange(5.0, device=name),
        torch.arange(7, device=name),
        torch.ones(3, device=name).half(),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensors.pt"
        torch.save(tensors, path)
        found = torch.load(path, mmap=True, map_location=place)
        for number, (ours, theirs) in enumerate(zip(found, tensors, strict=True)):
            require(
                ours.dtype == theirs.dtype
                and equal(ours, theirs)
                and ours.device.type == place.split(":")[0],
                f"tensor {number + 1} of {name} that torch.load(mmap=True) maps to {place} is wrong",
            )
        del found, ours  # before the file is


def _require_safetensors_read(name: str) -> None:
    """Fails the check if a loader of safetensors that knows the device puts tensors on another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.safetensors"
        try:
            from safetensors.torch import load_file, save_file

            save_file({"numbers": torch.arange(5.0)}, path)
            found = load_file(path, device=name)["numbers"]
        except Exception:  # noqa: BLE001 - it is not installed, or does not know the device
            return
        require(is_on(found, name), f"load_file(device={name!r}) puts a tensor on {found.device}")
        require(equal(found, torch.arange(5.0)), f"load_file(device={name!r}) changes the numbers")


def _require_absent_devices_are_refused(accelerator: Accelerator, name: str) -> None:
    """Fails the check if a tensor of a device that is not here is loaded on another without being asked."""
    kind = accelerator.device_type
    file = io.BytesIO()
    torch.save(torch.ones(3, device=name), file, _use_new_zipfile_serialization=False)
    tag, absent = name.encode(), f"{kind}:{accelerator.device_count() + 5}".encode()
    if tag not in file.getvalue() or len(tag) != len(absent):
        return
    changed = io.BytesIO(file.getvalue().replace(tag, absent))
    with refused(f"torch.load of a tensor of {absent.decode()}, which is not here,", RuntimeError):
        torch.load(changed)


def _require_made_there(names: list[str]) -> None:
    """Fails if torch makes a tensor elsewhere than it is asked to: what reads a file does so too."""
    for name in names:
        one = torch.empty(1, device=name)
        made = {
            "torch.empty": one,
            "torch.empty_strided": torch.empty_strided((2,), (1,), device=name),
            "torch.empty_like": torch.empty_like(torch.ones(2), device=name),
            "new_empty": torch.ones(2).new_empty(2, device=name),
            "new_empty_strided": torch.ones(2).new_empty_strided((2,), (1,), device=name),
            "torch.zeros": torch.zeros(2, device=name),
            "torch.full": torch.full((2,), 3.0, device=name),
            "torch.arange": torch.arange(2, device=name),
            "torch.tensor": torch.tensor([1.0], device=name),
            "to()": torch.ones(2).to(name),
        }
        for how, tensor in made.items():
            require(is_on(tensor, name), f"a tensor that {how} makes on {name} is on {tensor.device}")


def _is_cloned_by_deepcopy(device: torch.device) -> bool:
    """Whether torch clones a tensor in copy.deepcopy, as on some devices: with memory of its own."""
    part = copy.deepcopy(torch.zeros(64, device=device)[:1])
    return part.untyped_storage().nbytes() < 64 * part.element_size()


def _ways(name: str) -> dict[str, Callable[[Any], Any]]:
    """Ways to another place and back; without torch.multiprocessing if a device cannot send to itself."""
    ways: dict[str, Callable[[Any], Any]] = {
        "torch.save and torch.load": _saved_and_loaded,
        "torch.save without zip": lambda things: _saved_and_loaded(things, zipped=False),
        "pickle": lambda things: pickle.loads(pickle.dumps(things)),
        "copy.deepcopy": copy.deepcopy,
    }
    with suppress(Exception):
        _sent(torch.ones(2, device=name))
        ways["torch.multiprocessing"] = _sent
    return ways


def _kinds(name: str) -> dict[str, torch.Tensor]:
    base = torch.arange(24.0, device=name).reshape(4, 6)
    return {
        "a tensor": base, "a transposed view": base.t(), "a part": base[1:3, ::2], "nothing": base[:0],
        "a tensor that requires a gradient": base.clone().requires_grad_(),
        "a parameter": torch.nn.Parameter(base.clone()),
        "a frozen parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
        "integers": base.int(), "truth values": base > 3, "a single number": base[1, 1],
        "1,003 numbers": torch.arange(1003.0, device=name),
        "70,001 numbers": torch.arange(70_001, device=name),
        "300,007 numbers": torch.arange(300_007.0, device=name),
        "the end of 70,001 numbers": torch.arange(70_001.0, device=name)[-5:],
        "a part of every second row": torch.arange(70_001.0, device=name)[1:].view(-1, 7)[::2, 3:],
        "an expanded row": base[:1].expand(3, 6),
        "images with channels last": base.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        **_lazy(name),
        **_of_each_dtype(name),
    }  # fmt: skip


_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def _of_each_dtype(name: str) -> dict[str, torch.Tensor]:
    """Numbers that need every bit of their dtype, none of them, and one, where the device has the dtype."""
    found: dict[str, torch.Tensor] = {}
    for dtype in _DTYPES:
        with suppress(RuntimeError, TypeError):
            numbers = torch.tensor(extremes(dtype), dtype=dtype).to(name)
            told = short(dtype)
            found |= {f"extremes of {told}": numbers, f"no {told}": numbers[:0], f"one {told}": numbers[1]}
    return found


_LAZY = ("a conjugated view", "a negated view")


def _lazy(name: str) -> dict[str, torch.Tensor]:
    """Views that are conjugated or negated when they are read, if the device has complex numbers."""
    values = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    with suppress(Exception):  # another check is about complex numbers
        there = values.to(name)
        return {
            "complex numbers": there, "a conjugated view": there.conj(),
            "a negated view": torch._neg_view(torch.arange(4.0, device=name)),
        }  # fmt: skip
    return {}


def _require_same_thing(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    require(type(found) is type(wanted), f"{what} is a {type(found).__name__}")
    require(found.device == wanted.device, f"{what} is on {found.device}")
    require(found.dtype == wanted.dtype, f"{what} is {found.dtype}")
    require(found.requires_grad == wanted.requires_grad, f"{what} has requires_grad={found.requires_grad}")
    require(found.shape == wanted.shape, f"{what} has the shape {tuple(found.shape)}")
    is_cloned = "copy.deepcopy" in what and _is_cloned_by_deepcopy(wanted.device)
    # Of a tensor with gaps only its elements may be sent; where there are none, the layout is kept.
    is_packed = "torch.multiprocessing" in what and torch.empty_like(wanted).stride() != wanted.stride()
    require(
        found.stride() == wanted.stride() or is_packed or is_cloned,
        f"{what} has the strides {found.stride()}, not {wanted.stride()}",
    )
    require(same_bits(_plain(found), _plain(wanted)), f"{what} has other values")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().flatten()


@check(
    "device_name", "current_device_name", "current_device",
    promise="Saved tensors that share memory share it again; models, optimizers and states are restored "
    "where they are mapped to.", of="tensors",
)  # fmt: skip
def models_are_saved(accelerator: Accelerator) -> None:
    names = device_names(accelerator)
    for name in names:
        base = torch.arange(24.0, device=name).reshape(4, 6)
        things = {"whole": base, "part": base[1:3], "column": base.t()[2], "again": base}
        ways: dict[str, Callable[[Any], Any]] = {"torch.save and torch.load": _saved_and_loaded}
        if not _is_cloned_by_deepcopy(base.device):
            ways["copy.deepcopy"] = copy.deepcopy
        for how, way in ways.items():
            found = way(things)
            found["whole"][1] = -1
            for key in ("part", "column", "again"):
                require(
                    shares_memory(found[key], found["whole"]),
                    f"tensors on {name} that share memory have memory of their own after {how}",
                )
            require(
                float(found["part"][0, 0]) == -1,
                f"a view of a tensor on {name} shows another part after {how}",
            )
            strides = found["column"].stride()
            require(
                strides == things["column"].stride(),
                f"a view on {name} has the strides {strides} after {how}",
            )
            require(
                equal(base[1], torch.arange(6.0, 12)),
                f"after {how} a change of the copy changes the original",
            )
        _require_model_saved(name, names)
        for place in ("cpu", *names):
            wanted = torch.zeros(1, device=place).device
            saved_as = torch.serialization.location_tag(base.untyped_storage())
            maps: dict[str, Any] = {
                "a name": place, "a torch.device": torch.device(place), "a dict": {saved_as: place},
                "a function": lambda storage, location, place=place: (
                    storage.cpu()
                    if place == "cpu"
                    else torch.UntypedStorage(storage.nbytes(), device=place).copy_(storage)
                ),
            }  # fmt: skip
            for what, mapping in maps.items():
                if is_host(accelerator) and what == "a function":
                    continue
                for weights_only in (True, False):
                    loaded = _loaded(_saved(base.half()), mapping, weights_only)
                    require(
                        loaded.device == wanted and equal(loaded, base.half()),
                        f"a tensor of {name} that torch.load maps to {place} by {what} is on "
                        f"{loaded.device}, and equal: {equal(loaded, base.half())}",
                    )
    if len(names) > 1:
        with accelerator.device(0):
            loaded = _loaded(_saved(torch.ones(2, device=names[1])), None, True)
        require(
            str(loaded.device) == names[1],
            f"a tensor of {names[1]}, loaded while {names[0]} is current, is on {loaded.device}",
        )
    for dtype in (*accelerator.supported_dtypes(), torch.int64, torch.int16, torch.uint8, torch.bool):
        values = torch.tensor(extremes(dtype), dtype=dtype).to(names[-1])
        for how, its_way in _ways(names[-1]).items():
            found = its_way(values)
            what = f"{dtype} on {names[-1]} after {how}"
            require(found.dtype == dtype, f"{what} is {found.dtype}")
            require(
                same_bits(found.cpu(), values.cpu()),
                f"{what} turns {values.tolist()} into {found.tolist()}",
            )


def _saved(things: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(things, file)
    return file


def _loaded(file: io.BytesIO, place: Any, weights_only: bool) -> torch.Tensor:
    file.seek(0)
    found: torch.Tensor = torch.load(file, map_location=place, weights_only=weights_only)
    return found


def _require_model_saved(name: str, names: list[str]) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).to(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    given = torch.randn(6, 5).to(name)
    model(given).square().mean().backward()
    optimizer.step()
    saved = _saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for place in ("cpu", *names):
        other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).to(place)
        its_own = torch.optim.Adam(other.parameters(), lr=0.5)
        saved.seek(0)
        state = torch.load(saved, map_location=place)
        other.load_state_dict(state["model"])
        its_own.load_state_dict(state["optimizer"])
        wanted = torch.zeros(1, device=place).device
        for key, tensor in other.state_dict().items():
            require(
                tensor.device == wanted,
                f"{key} of a model of {name} that is loaded on {place} is on {tensor.device}",
            )
            require(
                equal(tensor, model.state_dict()[key]),
                f"{key} of a model of {name}, loaded on {place}, is changed",
            )
        rate = its_own.param_groups[0]["lr"]
        require(rate == 0.1, f"an optimizer of {name}, loaded on {place}, has the rate {rate}")
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            for key, value in optimizer.state[theirs].items():
                found = its_own.state[ours][key]
                require(
                    equal(found, value), f"{key} of an optimizer of {name}, loaded on {place}, is changed"
                )
                right = found.device == wanted or key == "step"
                require(right, f"{key} of an optimizer of {name}, loaded on {place}, is on {found.device}")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    require(
        bool((next(model.parameters()) != 0).any()), f"copy.deepcopy of a model on {name} shares its weights"
    )
