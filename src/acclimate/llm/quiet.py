"""Keeps transformers' progress bars, hints and long errors off the user's terminal."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

_LONGEST_REASON = 300


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' warnings and progress bars in the ``with`` block.

    The caller checks what the warnings would say: parameters without weights are an error here.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="transformers")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
