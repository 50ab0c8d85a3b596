"""Runs code as another user, in a child process; and folders that such a child can reach."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

MALLORY, ANN = 23457, 23456
"""Ids of two users that this machine does not know by name."""

_T = TypeVar("_T")

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as other users"
)


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that every user can look into, as those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="acclimate-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_user(uid: int, function: Callable[[], _T], umask: int = 0o022) -> _T:
    """What a function returns in a child of that user; raises what it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.umask(umask)
            try:
                told = (function(), None)
            except Exception as error:
                error.__traceback__ = None
                told = (None, error)
            os.write(writing, pickle.dumps(told))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    value, error = pickle.loads(content)
    if error is not None:
        raise error
    return value
