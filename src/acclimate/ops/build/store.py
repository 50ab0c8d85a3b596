"""The cache of built libraries: whole or absent, built once by however many processes ask, never stale.

<cache>/ops/<op>/<key>/<op>.so      the library
<cache>/ops/<op>/<key>/build.json   its size and digest, and all that the key was made of
<cache>/ops/<op>/<key>/build.log    the commands that made it
<cache>/ops/<op>/<key>.log          of a build that failed

How it gets there is :mod:`acclimate.cache.publish`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from acclimate.cache import cache_root
from acclimate.cache.lock import try_hold
from acclimate.cache.publish import leftovers, lock_file, publish
from acclimate.errors import InvalidEnvironmentError, OpBuildError
from acclimate.ops.build.compile import LOG_NAME, Progress, build_library, compiler_versions
from acclimate.ops.build.recipe import Recipe

_logger = logging.getLogger("acclimate")

_RECORD = "build.json"
# What says that a folder cannot be written, as opposed to a bug of ours.
_UNWRITABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR,
    errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE,
}  # fmt: skip

_private_root: tuple[int, Path] | None = None


def ops_folder() -> Path:
    """Where built libraries are; not created here."""
    # Absolute, since compilers run in another folder than this process.
    return cache_root().absolute() / "ops"


def versions(recipe: Recipe) -> list[str]:
    """What the compilers of a recipe say of themselves, for its cache key.

    Raises:
        OpBuildError: a compiler cannot be run.
    """
    return compiler_versions(recipe.compilers, ops_folder() / "compilers.json")


def find(recipe: Recipe, key: str) -> Path | None:
    """The intact library of one key, in the cache or in this process's private folder."""
    for root in (ops_folder(), *_private_folders()):
        library = _intact(root / recipe.name / key, recipe.name)
        if library is not None:
            return library
    return None


def find_built_elsewhere(recipe: Recipe) -> Path | None:
    """The newest intact library of the same source, whatever compiler made it; for machines without one."""
    folders = (ops_folder() / recipe.name).glob(f"{recipe.source_key}-*")
    newest_first = sorted((folder for folder in folders if folder.is_dir()), key=_age_s)
    intact = (_intact(folder, recipe.name) for folder in newest_first)
    return next((library for library in intact if library is not None), None)


def obtain(recipe: Recipe, key: str, progress: Progress | None = None) -> Path:
    """The library of one key: found, or built by this process or by another that it waited for.

    Raises:
        OpBuildError: it does not compile; the message has the compiler's, the command and the log's place.
        OpLockTimeoutError: another process was building it for longer than ``ACCLIMATE_BUILD_TIMEOUT``.
    """
    library = find(recipe, key)
    if library is not None:
        return library
    try:
        return _build_once(ops_folder(), recipe, key, progress)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        return _build_privately(recipe, key, progress, error)


def _build_once(root: Path, recipe: Recipe, key: str, progress: Progress | None) -> Path:
    folder = root / recipe.name / key

    def build(private: Path) -> None:
        started = time.monotonic()
        try:
            built = build_library(recipe, private, progress)
        except OpBuildError as error:
            raise OpBuildError(f"{error}\nLog: {_keep_log(private, folder)}") from error.__cause__
        _record(built, recipe, time.monotonic() - started)
        _log_of_failure(folder).unlink(missing_ok=True)

    publish(
        folder,
        build,
        lambda: _intact(folder, recipe.name) is not None,
        f'building the op "{recipe.name}"',
        timeout_s=_timeout_s(),
    )
    return folder / f"{recipe.name}.so"


def _build_privately(recipe: Recipe, key: str, progress: Progress | None, error: OSError) -> Path:
    """Builds for this process alone, where the cache cannot be written."""
    global _private_root
    if not _private_folders():
        folder = Path(tempfile.mkdtemp(prefix="acclimate-ops-"))
        _logger.warning(
            "The cache of built ops %s cannot be written (%s), so this process builds them in %s, for itself "
            "alone. Set ACCLIMATE_CACHE to a folder that can be written.",
            ops_folder(),
            error.strerror,
            folder,
        )
        _private_root = os.getpid(), folder
        atexit.register(_remove_private_folder)
    return _build_once(_private_folders()[0], recipe, key, progress)


def _private_folders() -> list[Path]:
    return [_private_root[1]] if _private_root is not None else []


def _remove_private_folder() -> None:
    if _private_root is not None and _private_root[0] == os.getpid():  # a forked child must leave it
        shutil.rmtree(_private_root[1], ignore_errors=True)


# -- one folder --------------------------------------------------------------------------------------


def _intact(folder: Path, name: str) -> Path | None:
    """The library in a folder, if it is as its record says."""
    library = folder / f"{name}.so"
    try:
        record = json.loads((folder / _RECORD).read_bytes())
        if library.stat().st_size != record["size"] or _digest(library) != record["sha256"]:
            _logger.info("%s is damaged, and will be rebuilt.", library)
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return library


def _record(library: Path, recipe: Recipe, seconds: float) -> None:
    record: dict[str, Any] = {
        "size": library.stat().st_size,
        "sha256": _digest(library),
        "seconds": round(seconds, 2),
        "made_of": recipe.description,
        "compilers": [list(command) for command in recipe.compilers],
    }
    (library.parent / _RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _age_s(folder: Path) -> float:
    try:
        return -folder.stat().st_mtime
    except OSError:
        return 0.0


def _log_of_failure(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _keep_log(private: Path, folder: Path) -> Path:
    """Moves the log of a failed build to where its reader can find it later."""
    return (private / LOG_NAME).replace(_log_of_failure(folder))


def _timeout_s() -> float:
    text = os.environ.get("ACCLIMATE_BUILD_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise InvalidEnvironmentError(
            f'ACCLIMATE_BUILD_TIMEOUT is "{text}", but has to be a number of seconds from 0 on.'
        )
    return seconds


# -- cleaning ----------------------------------------------------------------------------------------


def clean(names: list[str] | None = None) -> tuple[list[Path], list[Path]]:
    """Removes built libraries, logs and what dead builders left.

    Args:
        names: of ops; ``None`` for all.

    Returns:
        The folders of libraries that were removed, and the lock files of builds in progress, which stay.
    """
    removed: list[Path] = []
    busy: list[Path] = []
    root = ops_folder()
    parents = [root / name for name in names] if names is not None else sorted(root.glob("*/"))
    for parent in parents:
        for key in sorted({_key_of(path) for path in parent.iterdir()} if parent.is_dir() else ()):
            folder = parent / key
            lock = try_hold(lock_file(folder))
            if lock is None:
                busy.append(lock_file(folder))
                continue
            with lock:
                if folder.is_dir():
                    removed.append(folder)
                for path in [folder, *leftovers(folder)]:
                    shutil.rmtree(path, ignore_errors=True)
                _log_of_failure(folder).unlink(missing_ok=True)
                lock_file(folder).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: a build is in progress
            parent.rmdir()
    if names is None:
        (root / "compilers.json").unlink(missing_ok=True)
    return removed, busy


def _key_of(path: Path) -> str:
    """The key in any file name of the cache: keys have no dot."""
    return path.name.lstrip(".").partition(".")[0]
