"""Keeps transformers' progress bars, hints and long errors off the user's terminal."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from acclimate.errors import AcclimateError, MissingExtraError, UnsupportedModelError
from acclimate.imports import ForkSafeLock

_LONGEST_REASON = 300


class _Quiet:
    """What silences transformers, as long as any thread needs it.

    Its settings and Python's filters of warnings are the process's. Two threads that each put back what they
    found would leave what the other one had set.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._inside = 0
        self._undo = contextlib.ExitStack()

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._silence()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._undo.close()

    def _silence(self) -> None:
        from transformers.utils import logging

        self._undo.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            self._undo.callback(logging.enable_progress_bar)
        self._undo.enter_context(warnings.catch_warnings())
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        warnings.filterwarnings("ignore", module="transformers")


_quiet = _Quiet()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' warnings and progress bars in the ``with`` block.

    The caller checks what the warnings would say: parameters without weights are an error here.
    """
    _quiet.enter()
    try:
        yield
    finally:
        _quiet.leave()


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1]
    while said and said[-1].endswith(":") and len(said) < len(lines):  # the line introduces the next one
        said.append(lines[len(said)])
    text = " ".join(said) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"


def why_unusable(error: BaseException) -> str:
    """Says why a library could not use a model's files.

    Libraries use values from files unchecked, so Python's message for a bad one is about their code.
    """
    said = first_line(error)
    if isinstance(error, (TypeError, AttributeError, LookupError)):
        return f"its files contain a value of the wrong kind ({type(error).__name__}: {said})"
    return said


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the host or a device is out of memory."""
    import torch

    from acclimate.accelerator.memory import is_host_out_of_memory

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or is_host_out_of_memory(error)


@contextlib.contextmanager
def explained_failures(action: str, what: str) -> Iterator[None]:
    """Turns errors that transformers raises in the block into errors that name a model.

    Args:
        action: what transformers does: "load".
        what: the model, for messages: "the model in FOLDER".

    Raises:
        MissingExtraError: the model needs a package that is not installed.
        UnsupportedModelError: transformers raised any other error, except out-of-memory errors.
    """
    try:
        yield
    except AcclimateError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"{what} needs one more package: {first_line(error)}") from error
    except Exception as error:  # any type: transformers does not check a config's fields
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(f"transformers cannot {action} {what}: {why_unusable(error)}") from error
