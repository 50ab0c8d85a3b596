"""The recorder reads from a module's source what the module really has."""

from __future__ import annotations

import ast
import inspect
import zipfile
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from record_surfaces import names_of, names_used, open_wheel
from recorded_surface import RECORDED, Surface, parameters

INSTALLED = torch.__version__.partition("+")[0]
OF_INSTALLED = [surface for surface in RECORDED if (surface.package, surface.version) == ("torch", INSTALLED)]

MADE_UP = {
    "vendor/__init__.py": "from . import device",
    "vendor/device/__init__.py": """
import os
from typing import Any
from vendor._C import Base
from .memory import *
from .streams import Stream, Event as _Event
from . import nvtx
from ..other import elsewhere
__all__ = ["is_available", "from_c"]
Event = _Event
default_generators: tuple = ()
_private = 1
gone = 2
del gone
if os.name == "nt":
    def only_there(): ...
else:
    def is_available(*, check=False, device=os.name) -> bool: ...
def _lazy_call(callable, **kwargs): ...
""",
    "vendor/device/memory.py": """
from vendor.device import Stream
__all__ = ["allocated"]
def allocated(device: int | None = None, /, *rest): ...
def hidden(): ...
""",
    "vendor/device/streams.py": """
from .._C import Base
class Stream(Base):
    def __new__(cls, device=None, **kwargs): ...
    def synchronize(self, timeout_s: float = 1.5): ...
    @property
    def device(self): ...
class Event(torch._C.Event):
    @staticmethod
    def make(kind): ...
""",
    "vendor/device/nvtx.py": "def range_push(msg): ...\n_own = 3\n",
    "vendor/other.py": "def elsewhere(): ...\n",
    "vendor/_C/__init__.pyi": """
class Base:
    stream_id: int
    @overload
    def __new__(cls): ...
    @overload
    def __new__(cls, number: int): ...
    def query(self) -> bool: ...
""",
}


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, dict[str, Any]]:
    wheel = tmp_path / "vendor-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, source in MADE_UP.items():
            archive.writestr(name, source)
    package = open_wheel(wheel)
    assert (package.name, package.version) == ("vendor", "1.2")
    module = package.module("vendor.device")
    assert module is not None
    return names_of(module)


def test_a_module_is_followed_through_its_imports(recorded: dict[str, dict[str, Any]]) -> None:
    assert recorded == {
        "Event": {
            "kind": "class",
            "signature": None,
            "methods": {"make": "static (kind)"},
            "bases": ["torch._C.Event"],
        },
        "Stream": {
            "kind": "class",
            "signature": "(device=None, **kwargs)",
            "methods": {
                "device": None,
                "query": "(self)",
                "stream_id": None,
                "synchronize": "(self, timeout_s=1.5)",
            },
        },
        "_lazy_call": {"kind": "function", "signature": "(callable, **kwargs)"},
        "allocated": {"kind": "function", "signature": "(device=None, /, *rest)"},
        "default_generators": {"kind": "value"},
        "from_c": {"kind": "reexport", "signature": None},
        "is_available": {"kind": "function", "signature": "(*, check=False, device=...)"},
        "nvtx": {
            "kind": "module",
            "names": {"range_push": {"kind": "function", "signature": "(msg)"}},
        },
        "only_there": {"kind": "function", "signature": "()"},
    }


def test_the_uses_of_a_module_are_what_is_known_of_one_without_source() -> None:
    tree = ast.parse("torch.sdaa.synchronize(0)\nx = torch.sdaa.Stream\ntorch.cuda.init()")
    assert names_used(tree, "torch.sdaa") == {
        "Stream": {"kind": "reexport", "signature": None},
        "synchronize": {"kind": "function", "signature": None},
    }


@pytest.mark.parametrize("surface", OF_INSTALLED or [None], ids=str)
def test_what_was_read_is_what_the_installed_torch_has(surface: Surface | None) -> None:
    if surface is None:
        pytest.skip(f"no surface of torch {INSTALLED} is recorded")
    module = reduce(getattr, surface.module.split(".")[1:], torch)
    wrong = []
    for name, data in surface.names.items():
        if not hasattr(module, name):
            wrong.append(f"{name} is recorded and not there")
        elif data["kind"] == "function":
            try:
                real = inspect.signature(getattr(module, name))
            except ValueError:
                continue  # made in C
            told = [
                (parameter.name, parameter.kind)
                for parameter in parameters(data["signature"]).parameters.values()
            ]
            if told != [(parameter.name, parameter.kind) for parameter in real.parameters.values()]:
                wrong.append(f"{name}{data['signature']} is {name}{real}")
    assert wrong == []


def test_nothing_that_the_installed_torch_defines_is_missed() -> None:
    for surface in OF_INSTALLED:
        if not surface.device_type:
            continue  # torch itself, of which three classes are recorded
        module = reduce(getattr, surface.module.split(".")[1:], torch)
        defined = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        }
        assert {name for name in defined - set(surface.names) if not name.endswith("Storage")} == set()
