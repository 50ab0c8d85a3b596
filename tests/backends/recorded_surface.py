"""Stands in for a vendor's device module: has the recorded names, and takes the recorded arguments only.

Nothing computes. A function answers with something of the right type, so that code which uses the answer
goes on, and whatever is called in a way that the surface does not allow raises what Python would raise.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

SURFACES = Path(__file__).parent / "surfaces"
GIBIBYTE = 2**30


@dataclass(frozen=True)
class Surface:
    """One recorded module."""

    package: str
    version: str
    source: str
    module: str
    names: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @property
    def device_type(self) -> str:
        """torch's name for the device; ``accelerator`` and an empty name are torch's own modules."""
        return self.module.removeprefix("torch").removeprefix(".")

    def __str__(self) -> str:
        return f"{self.module}-{self.package}-{self.version}"


def surfaces() -> Iterator[Surface]:
    """Every recorded module."""
    for path in sorted(SURFACES.glob("*.json")):
        yield Surface(**json.loads(path.read_text(encoding="utf-8")))


RECORDED = tuple(surfaces())


@cache
def parameters(text: str) -> inspect.Signature:
    """A recorded signature."""
    arguments = ast.parse(f"lambda {text[1:-1]}: 0", mode="eval").body
    assert isinstance(arguments, ast.Lambda)
    made: Callable[..., Any] = eval(compile(ast.Expression(arguments), "surface", "eval"))
    return inspect.signature(made)


class Calls(list[str]):
    """What was called in a way that the surface does not allow, whoever caught the exception."""

    def bind(self, what: str, signature: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Passes over calls whose arguments fit, or are not known.

        Raises:
            TypeError: they do not fit.
        """
        if signature is None:
            return
        try:
            parameters(signature).bind(*args, **kwargs)
        except TypeError as error:
            shown = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
            self.append(f"{what}{signature} was called with ({shown})")
            raise TypeError(f"{what}{signature}: {error}") from None


@dataclass(frozen=True)
class Device:
    """A device that this process's torch does not know."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def stand_in(surface: Surface, calls: Calls) -> types.ModuleType:
    """A module with the names of a surface."""
    return _module(surface.module, surface.names, surface.device_type, calls)


def _module(
    name: str, names: Mapping[str, Mapping[str, Any]], device_type: str, calls: Calls
) -> types.ModuleType:
    module = types.ModuleType(name)
    answers = _answers(module, device_type)
    for key, data in names.items():
        setattr(module, key, _member(module, key, data, answers, device_type, calls))
    return module


def _member(
    home: types.ModuleType,
    name: str,
    data: Mapping[str, Any],
    answers: Mapping[str, Any],
    device_type: str,
    calls: Calls,
) -> Any:
    what = f"{home.__name__}.{name}"
    if data["kind"] == "module":
        return _module(what, data["names"], device_type, calls)
    if data["kind"] == "class":
        return _class(home, name, data, device_type, calls)
    if name in answers and not callable(answers[name]):
        return answers[name]
    if data["kind"] == "function" or name in answers:
        return _function(what, data.get("signature"), answers.get(name), calls)
    # Known to be there and not what it is: a class, as torch's Stream and Event are.
    return _class(home, name, {"signature": None, "methods": {}}, device_type, calls)


def _function(
    what: str, signature: str | None, answer: Callable[..., Any] | None, calls: Calls
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.bind(what, signature, args, kwargs)
        return answer(*args, **kwargs) if answer is not None else None

    call.__name__ = what
    if signature is not None:
        call.__signature__ = parameters(signature)  # type: ignore[attr-defined]
    return call


def _class(
    home: types.ModuleType, class_name: str, data: Mapping[str, Any], device_type: str, calls: Calls
) -> type[Any]:
    what = f"{home.__name__}.{class_name}"
    answers = {**_METHODS, "record_event": lambda event=None: home.Event() if event is None else event}

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.bind(what, data["signature"], args, kwargs)
        self.device = Device(device_type, 0)
        self.device_index, self.device_type, self.stream_id = 0, 1, 0

    members: dict[str, Any] = {"__init__": construct}
    for name, signature in data["methods"].items():
        if signature is None:
            continue  # a field
        is_static = signature.startswith("static ")
        text = signature.removeprefix("static ")
        text = text if is_static else _without_self(text)
        method = _function(f"{what}.{name}", text, answers.get(name), calls)
        members[name] = staticmethod(method) if is_static else _bound(method)
    if (data["signature"] is None and not data["methods"]) or data.get("bases"):
        # Something of it is not known: nothing of what streams, events and graphs do is refused.
        for name, answer in answers.items():
            if not name.startswith("__"):
                members.setdefault(name, _bound(_function(f"{what}.{name}", None, answer, calls)))
    return type(class_name, (), members)


def _without_self(text: str) -> str:
    first, comma, rest = text[1:-1].partition(", ")
    return text if first.startswith("*") else f"({rest})" if comma else "()"


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: method(*args, **kwargs)


_METHODS: dict[str, Callable[..., Any]] = {
    "__enter__": lambda *args: None,
    "__exit__": lambda *args: None,
    "query": lambda *args: True,
    "synchronize": lambda *args: None,
    "elapsed_time": lambda *args: 1.5,
    "record": lambda *args: None,
    "wait": lambda *args: None,
    "wait_event": lambda *args: None,
    "wait_stream": lambda *args: None,
    "replay": lambda *args, **kwargs: None,
    "reset": lambda *args: None,
}


class _Properties(types.SimpleNamespace):
    """What is known of a device; what a vendor adds to it reads as true."""

    def __getattr__(self, name: str) -> bool:
        if name.startswith("has_"):
            return True
        raise AttributeError(name)


class _CudaRuntime:
    """The functions of CUDA's runtime that torch hands out."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def _answers(module: types.ModuleType, device_type: str) -> dict[str, Any]:
    """What the functions of a device module answer, by name; and the values in it."""
    one_device = device_type == "mps"
    generators = [torch.Generator() for _ in range(1 if one_device else 2)]

    def stream(*args: Any) -> Any:
        made: Any = getattr(module, "Stream", None)
        return made(stream_id=0) if one_device and made is not None else made() if made is not None else None

    def enter(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(*args: Any) -> int:
        return GIBIBYTE

    def memory_stats(*args: Any) -> dict[str, int]:
        if one_device:  # torch's allocator for Metal keeps none
            raise RuntimeError("Allocator for mps is not a DeviceAllocator.")
        return {"allocated_bytes.all.current": GIBIBYTE, "InUse": GIBIBYTE}

    return {
        "device_count": lambda: len(generators),
        "current_device": lambda: 0,
        "current_device_index": lambda: 0,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_device_name": lambda *args: "a device",
        "get_name": lambda: "a device",
        "get_core_count": lambda: 8,
        "get_device_capability": lambda *args: (9, 0) if device_type == "cuda" else {"has_fp16": True},
        "get_device_properties": lambda *args: _Properties(name="a device", total_memory=2 * GIBIBYTE),
        "default_generators": generators,
        "_get_default_mps_generator": lambda: generators[0],
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "initial_seed": lambda: 7,
        "current_stream": stream,
        "default_stream": stream,
        "stream": enter,
        "device": enter,
        "graph": enter,
        "memory_stats": memory_stats,
        "mem_get_info": lambda *args: (GIBIBYTE, 2 * GIBIBYTE),
        "get_memory_info": lambda *args: (GIBIBYTE, 2 * GIBIBYTE),
        "memory_summary": lambda *args: "a table",
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), memory
        ),
        **dict.fromkeys(("current_allocated_memory", "driver_allocated_memory"), memory),
        "recommended_max_memory": lambda: 2 * GIBIBYTE,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_current_stream_capturing": lambda: False,
        "_lazy_call": lambda callback, **kwargs: callback(),
        "cudart": _CudaRuntime,
        "current_accelerator": lambda *args: Device(device_type),
    }


class Torch(types.ModuleType):
    """The real torch, but for one device's module and what belongs to it.

    Tensors of the device are made on the host.
    """

    def __init__(self, device: Surface, torchs: Mapping[str, Surface], calls: Calls) -> None:
        super().__init__("torch")
        self._type = device.device_type
        for name in ("Stream", "Event"):
            setattr(self, name, _class(self, name, torchs[""].names[name], self._type, calls))
        setattr(self, self._type, stand_in(device, calls))
        self.accelerator = stand_in(torchs["accelerator"], calls)
        self.backends = types.SimpleNamespace(mps=stand_in(torchs["backends.mps"], calls))
        answers = _answers(getattr(self, self._type), self._type)
        # torch.accelerator serves the device: it counts the same devices, and its streams are torch's own.
        answers["current_stream"] = lambda *args: self.Stream()
        for name, data in torchs["accelerator"].names.items():
            if data["kind"] == "function":
                what = f"torch.accelerator.{name}"
                setattr(self.accelerator, name, _function(what, data["signature"], answers.get(name), calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, named: Any, index: int | None = None) -> Any:
        text = str(named)
        kind, _, number = text.partition(":")
        if kind != self._type:
            return torch.device(named) if index is None else torch.device(named, index)
        return Device(kind, int(number) if number else index)

    def _on_host(self, make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith(self._type):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._on_host(torch.empty, *args, **kwargs)

    def ones(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._on_host(torch.ones, *args, **kwargs)

    def as_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._on_host(torch.as_tensor, *args, **kwargs)


def stand_in_for_torch(
    surface: Surface, torch_version: str, patch: pytest.MonkeyPatch, calls: Calls | None = None
) -> Torch:
    """Gives acclimate's modules a torch that has a recorded device module; torch itself keeps its own."""
    ours = {
        recorded.device_type: recorded
        for recorded in RECORDED
        if (recorded.package, recorded.version) == ("torch", torch_version)
    }
    made = Torch(surface, ours, Calls() if calls is None else calls)
    for name, module in list(sys.modules.items()):
        if name.startswith(("acclimate.accelerator", "acclimate.backends")) and "torch" in vars(module):
            patch.setattr(module, "torch", made)
    return made
