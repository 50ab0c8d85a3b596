"""Contains failures of vendors' code: exceptions, output, and, by a trial in a fork, exits and crashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import IO, Any

from acclimate.cache import cache_root
from acclimate.host.process_status import signal_name
from acclimate.host.replace_file import replace_file

_LIMIT_S = 60.0
_PRINTED_LINES = 3
_LONGEST_REASON = 2000
_MEMORY, _MOST_REMEMBERED = "imports.json", 64
_NOT_OF_ONE_DEVICE = ("torch.accelerator", "torch.cpu")
"""Modules with a count of devices that have no context of their own."""


def why_it_fails(name: str, load: Callable[[], Any]) -> str | None:
    """Returns why loading fails in a forked child; ``None`` if it succeeds or a fork is impossible."""
    key = _key(name)
    if key in _remembered():
        return None
    if not hasattr(os, "fork") or threading.active_count() > 1 or _device_is_in_use():
        return None  # in such a process a child may fail although this process would not
    with tempfile.TemporaryFile() as printed:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # torch's threads, which the child does not need
            child = os.fork()
        if child == 0:
            _try_and_exit(load, printed, writing)
        os.close(writing)
        told, status = _wait(child, reading)
        printed.seek(0)
        lines = printed.read().decode(errors="replace").splitlines()
    if status is None:
        return None  # timed out
    if told.get("failed") is False:
        if key is not None:
            _remember(key)
        return None
    reason = str(told["reason"]) if "reason" in told else f"it ends the process ({_ending(status)})"
    heard = dict.fromkeys(line.strip() for line in lines if line.strip())
    heard = {line: None for line in heard if line not in reason}
    return f'{reason} (it printed: "{" ".join(list(heard)[-_PRINTED_LINES:])}")' if heard else reason


def _try_and_exit(load: Callable[[], Any], printed: IO[bytes], writing: int) -> None:
    """Runs in the child; does not return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
        told: dict[str, Any] = {"failed": False}
        try:
            with contained():
                load()
        except VendorCodeError as error:
            told = {"failed": True, "reason": str(error)[:_LONGEST_REASON]}
        os.write(writing, json.dumps(told).encode())
    finally:
        os._exit(0)


def _wait(child: int, reading: int) -> tuple[dict[str, Any], int | None]:
    """Returns the child's answer and its wait status; the status is ``None`` if the child timed out."""
    deadline = time.monotonic() + _LIMIT_S
    told = b""
    with open(reading, "rb", buffering=0) as stream:
        while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = stream.read(65536)
            if not part:
                break
            told += part
            # Does not wait for the pipe's end, since a process that the package started may keep it open.
            if part.endswith(b"}"):
                break
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {}, None
    return json.loads(told or b"{}"), os.waitpid(child, 0)[1]


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal_name(-code)


def _device_is_in_use() -> bool:
    """Whether this process has a device context, which a forked child cannot use.

    Asks the modules of devices, and not ``torch.accelerator``: torch keeps its first answer, and would know
    no device that a package adds later.
    """
    try:
        for name, module in list(sys.modules.items()):
            is_of_device = name.rpartition(".")[0] == "torch" and "device_count" in vars(module)
            if not is_of_device or name in _NOT_OF_ONE_DEVICE:
                continue
            told = getattr(module, "is_initialized", None)
            if told() if told is not None else module.device_count() > 0:  # torch's for Metal does not tell
                return True
        return False
    except Exception:  # noqa: BLE001 - a vendor's module may fail
        return True


# -- successful attempts are not repeated -----------------------------------------------------------------


def _key(name: str) -> str | None:
    """Returns a digest of everything an attempt depends on; ``None`` if the package cannot be located."""
    origin = origin_of(name)
    if origin is None:
        return None
    try:
        status = os.stat(origin)
    except OSError:
        return None
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    parts = (name, origin, status.st_mtime_ns, status.st_size, torch, sys.version)
    return hashlib.sha256(repr((*parts, os.environ.get("LD_LIBRARY_PATH"))).encode()).hexdigest()[:32]


def origin_of(name: str) -> str | None:
    """Returns the file of a module's top-level package, without importing it."""
    try:
        spec = find_spec(name.partition(".")[0])
    except Exception:  # noqa: BLE001 - a stand-in in sys.modules has no spec, or an import hook fails
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _remembered() -> list[str]:
    try:
        kept = json.loads((cache_root() / _MEMORY).read_text())
    except (OSError, ValueError, RuntimeError):  # not there yet, damaged, or there is no home folder
        return []
    return [str(key) for key in kept] if isinstance(kept, list) else []


def _remember(key: str) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the next process then tries again
        root = cache_root()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = [*_remembered(), key][-_MOST_REMEMBERED:]
        replace_file(root / _MEMORY, json.dumps(keys).encode(), 0o600)


_LONGEST = 1000


class VendorCodeError(Exception):
    """A vendor's code failed; the message says how, in one line."""


def describe(error: BaseException, whole: bool = False) -> str:
    """Returns an exception's type and first line, or whole message, on one line that is not too long."""
    try:
        message = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # noqa: BLE001 - a vendor's __str__ may raise anything
        message = []
    if not message:
        return type(error).__name__
    text = " ".join(message) if whole else message[0]
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Turns any exception of a vendor's code, except Ctrl-C, into :class:`VendorCodeError`."""
    try:
        yield
    except (KeyboardInterrupt, VendorCodeError):
        raise
    except BaseException as error:
        raise VendorCodeError(describe(error)) from error


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """Sends output of a package's import to stderr, so that it does not spoil a program's output."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
            kept = os.dup(1)
        except (OSError, ValueError):  # there is no standard output
            yield
            return
        try:
            os.dup2(2, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
