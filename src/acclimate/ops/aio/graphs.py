"""What torch.compile makes of input and output: operators of a graph, or calls between two graphs.

A transfer that is waited for is an operator of the graph, ``acclimate::aio_read`` or
``acclimate::aio_write``, named by its handle's number and the file's name. Nothing but the order in which
they run ties a write to a later read, so each says that it changes one tensor, the same for all handles: the
compiler then neither drops a write, whose result no one uses, nor moves a transfer past another one. (torch's
own mark for operators with effects excludes those that change an argument, which a read does.)

A transfer that is not waited for cannot be one. Its tensor changes, or must not, after the call has returned,
which no schema says: the compiler would copy the tensor meanwhile, or give its memory to another. So these,
``wait()``, and opening and closing a handle, are called between two graphs, as they are.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import PurePath
from typing import ParamSpec, Protocol, TypeVar, cast

import torch

from acclimate.ops.aio import failures
from acclimate.ops.registry import define_in_place

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# What a user reads who asked for one graph.
_OUTSIDE = (
    "opening and closing an AsyncIOHandle, its async transfers and wait() run between graphs, as a tensor "
    "that changes after the call has returned cannot be part of one; sync_pread and sync_pwrite can"
)

# The offset may vary from call to call without a new graph; the rest is part of the graph.
_READ = (
    "aio_read(Tensor(a!) order, Tensor(b!) buffer, int handle, str filename, SymInt file_offset, *, "
    "bool validate=False, bool whole_rest=False) -> ()"
)
_WRITE = (
    "aio_write(Tensor(a!) order, Tensor buffer, int handle, str filename, SymInt file_offset, *, "
    "bool validate=False, bool atomic=False, bool wait_all=False) -> ()"
)


class Transfers(Protocol):
    """What a handle does when a graph runs."""

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Reads all of the rest of a file."""

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Writes the buffer, and waits for that alone."""

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Reads as much as the buffer takes, and waits for all requests."""

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
        *,
        atomic: bool = False,
    ) -> int:
        """Writes the buffer, and waits for all requests."""


_numbers = itertools.count(1)
# A graph holds a number, so that it keeps no handle alive, and can be stored.
_handles: weakref.WeakValueDictionary[int, Transfers] = weakref.WeakValueDictionary()

with torch.inference_mode(False):
    _order = torch.zeros((), dtype=torch.int64, device="cpu")


def register(handle: Transfers) -> int:
    """Gives a handle the number by which graphs name it."""
    define()
    number = next(_numbers)
    _handles[number] = handle
    return number


def define() -> None:
    """Defines the operators, once per process."""
    # The memory that moves is the tensor's own, so its strides have to be as the caller made them.
    tags = (torch.Tag.needs_exact_strides,)
    define_in_place(_READ, _read, tags)
    define_in_place(_WRITE, _write, tags)


def read_in_graph(
    number: int,
    buffer: torch.Tensor,
    filename: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    file_offset: int,
    validate: bool,
    *,
    whole_rest: bool,
) -> None:
    """Puts a read into the graph that is being made."""
    torch.ops.acclimate.aio_read(
        _order, buffer.detach(), number, _name(filename), file_offset,
        validate=validate, whole_rest=whole_rest,
    )  # fmt: skip


def write_in_graph(
    number: int,
    buffer: torch.Tensor,
    filename: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    file_offset: int,
    validate: bool,
    *,
    atomic: bool = False,
    wait_all: bool,
) -> None:
    """Puts a write into the graph that is being made."""
    torch.ops.acclimate.aio_write(
        _order, buffer.detach(), number, _name(filename), file_offset,
        validate=validate, atomic=atomic, wait_all=wait_all,
    )  # fmt: skip


def _name(filename: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """A file's name, in a way that the compiler follows."""
    # From Python 3.13 on str(path) parses in C what a path was made of, which the compiler cannot follow.
    parts = getattr(filename, "_raw_paths", None) if isinstance(filename, PurePath) else None
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
    if whole_rest:
        _find(handle, filename).read(buffer, filename, validate, file_offset)
    else:
        _find(handle, filename).pread(buffer, filename, validate, file_offset=file_offset)


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
    if wait_all:
        _find(handle, filename).pwrite(buffer, filename, validate, file_offset=file_offset, atomic=atomic)
    else:
        _find(handle, filename).write(buffer, filename, validate, file_offset)


def _find(number: int, filename: str) -> Transfers:
    handle = _handles.get(number)
    if handle is None:
        raise failures.closed_handle(filename)
    return handle


def outside_graphs(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that compiled code calls between two graphs, as it is.

    The same as ``torch.compiler.disable``, except that the compiler, which takes a second to import, is only
    imported where something is compiled.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():  # the compiler takes this way when it traces this very function
            torch._dynamo.graph_break(msg=_OUTSIDE)
            return cast(_Result, torch.compiler.disable(function)(*args, **kwargs))
        return function(*args, **kwargs)

    return call
