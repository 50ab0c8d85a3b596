"""Asynchronous I/O under torch.compile: operators in a graph, or calls between two graphs.

A blocking transfer is an operator in the graph, ``acclimate::aio_read`` or ``acclimate::aio_write``, whose
arguments are the handle's number and the file's name. A write and a later read have no data in common, so
each declares that it changes one tensor, the same for all handles: the compiler then neither drops a write,
whose result nobody uses, nor reorders transfers. (torch's own mark for operators with side effects excludes
operators that change an argument, as a read does.)

A non-blocking transfer cannot be an operator. Its tensor is in use after the call has returned, which no
schema can express: the compiler would copy the tensor meanwhile, or reuse its memory. So these transfers,
``wait()``, and opening and closing a handle run between two graphs.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import PurePath
from typing import Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch

from acclimate.ops.aio import failures
from acclimate.ops.registry import define_in_place

Awaited: TypeAlias = Literal["nothing", "this", "own"]
"""Which transfers a call waits for: none, its own, or also its thread's earlier ones."""
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# The reason shown with fullgraph=True.
_OUTSIDE = (
    "opening and closing an AsyncIOHandle, its async transfers and wait() run between graphs, as a tensor "
    "that changes after the call has returned cannot be part of one; sync_pread and sync_pwrite can"
)

# The offset may vary between calls without a new graph; the other values are constants of the graph.
_READ = (
    "aio_read(Tensor(a!) order, Tensor(b!) buffer, int handle, str filename, SymInt file_offset, *, "
    "bool validate=False, bool whole_rest=False) -> ()"
)
_WRITE = (
    "aio_write(Tensor(a!) order, Tensor buffer, int handle, str filename, SymInt file_offset, *, "
    "bool validate=False, bool atomic=False, bool wait_all=False) -> ()"
)


class Transfers(Protocol):
    """The method of a handle that a running graph calls."""

    def transfer(
        self,
        buffer: torch.Tensor,
        filename: str,
        offset: int,
        writes: bool,
        validates: bool,
        waits_for: Awaited,
        **options: bool,
    ) -> int:
        """Reads or writes the buffer, and waits as ``waits_for`` says."""


_numbers = itertools.count(1)
# A graph holds the handle's number, so that it does not keep the handle alive and can be stored.
_handles: weakref.WeakValueDictionary[int, Transfers] = weakref.WeakValueDictionary()

with torch.inference_mode(False):
    _order = torch.zeros((), dtype=torch.int64, device="cpu")


def register(handle: Transfers) -> int:
    """Returns a new number by which graphs refer to a handle."""
    define()
    number = next(_numbers)
    _handles[number] = handle
    return number


def define() -> None:
    """Defines the operators, once per process."""
    # The tensor's own memory is transferred, so the compiler must not change its strides.
    tags = (torch.Tag.needs_exact_strides,)
    define_in_place(_READ, _read, tags)
    define_in_place(_WRITE, _write, tags)


def transfer_in_graph(
    number: int,
    buffer: torch.Tensor,
    filename: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    file_offset: int,
    writes: bool,
    validate: bool,
    **options: bool,
) -> None:
    """Adds a read or a write to the graph that is being traced."""
    operator = torch.ops.acclimate.aio_write if writes else torch.ops.acclimate.aio_read
    operator(_order, buffer.detach(), number, _name(filename), file_offset, validate=validate, **options)


def _name(filename: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """Returns a file's name by operations that the compiler can trace."""
    # The compiler cannot trace str(path): from Python 3.13 on it calls C code, and before Python 3.12 a bound
    # method of a string, which torch 2.10 does not trace.
    names = ("_raw_paths", "_parts") if isinstance(filename, PurePath) else ()
    parts = next((getattr(filename, name) for name in names if hasattr(filename, name)), None)
    return os.path.join(*parts) if parts else os.fsdecode(filename)


def _read(
    order: torch.Tensor,
    buffer: torch.Tensor,
    handle: int,
    filename: str,
    file_offset: int,
    *,
    validate: bool = False,
    whole_rest: bool = False,
) -> None:
    order.add_(1)
    waits_for: Awaited = "this" if whole_rest else "own"
    _find(handle, filename).transfer(
        buffer, filename, file_offset, False, validate, waits_for, whole_rest=whole_rest
    )


def _write(
    order: torch.Tensor,
    buffer: torch.Tensor,
    handle: int,
    filename: str,
    file_offset: int,
    *,
    validate: bool = False,
    atomic: bool = False,
    wait_all: bool = False,
) -> None:
    order.add_(1)
    waits_for: Awaited = "own" if wait_all else "this"
    _find(handle, filename).transfer(buffer, filename, file_offset, True, validate, waits_for, atomic=atomic)


def _find(number: int, filename: str) -> Transfers:
    handle = _handles.get(number)
    if handle is None:
        raise failures.closed_handle(filename)
    return handle


def outside_graphs(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes compiled code call a function between two graphs.

    Like ``torch.compiler.disable``, but imports the compiler, which takes a second, only while compiling.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=_OUTSIDE)
            return cast(_Result, torch.compiler.disable(function)(*args, **kwargs))
        return function(*args, **kwargs)

    return call
