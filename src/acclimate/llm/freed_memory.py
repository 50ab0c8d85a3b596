"""Returns freed memory to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


def return_freed_memory() -> None:
    """Returns the C library's free heap memory to the system, which until then counts as this process's.

    The tokenizers library frees two thirds of what it allocates for a vocabulary of 262,144: 190 MB that the
    C library would keep. Only glibc has a function for this; elsewhere this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], Any] | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no library of the whole process
        return None
    function: Callable[[int], Any] | None = getattr(library, "malloc_trim", None)
    return function
