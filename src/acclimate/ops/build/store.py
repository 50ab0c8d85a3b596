"""The cache of built libraries. Each appears complete, is built by one process at a time, and is never stale.

<cache>/ops/<op>/<key>/<op>.so      the library
<cache>/ops/<op>/<key>/build.json   its size, its digest, and the content of the key
<cache>/ops/<op>/<key>/build.log    the commands that made it
<cache>/ops/<op>/<key>.log          the log of a failed build

:mod:`acclimate.cache.publish` puts them there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from acclimate.cache.folder import cache_root, check_folder, make_folder, read_file
from acclimate.cache.lock import try_hold
from acclimate.cache.publish import UNWRITABLE, is_folder, leftovers, lock_file, publish, refusal, remove
from acclimate.errors import CacheWriteError, OpBuildError, UntrustedCacheError
from acclimate.ops.build.compile import LOG_NAME, Progress, build_library, watched
from acclimate.ops.build.recipe import Recipe
from acclimate.ops.build.run_compilers import build_timeout_s
from acclimate.ops.build.toolchain import compiler_versions

_logger = logging.getLogger("acclimate")
_build_logger = logging.getLogger("acclimate.ops.build")

_RECORD = "build.json"
_VERSIONS = "compilers.json"
_private_root: tuple[int, Path] | None = None


def ops_folder() -> Path:
    """Returns the folder of built libraries, without creating it."""
    return cache_root() / "ops"


def unloadable_reason(folder: Path | None = None) -> str | None:
    """Returns why no library in a folder, or the cache's, can be loaded; ``None`` if no reason is known."""
    if folder is None:
        try:
            folder = ops_folder()
        except CacheWriteError:  # each process then builds in a private folder
            return None
    for there in (folder, *folder.parents):
        try:
            flags = os.statvfs(there).f_flag
        except OSError:  # does not exist yet, or is not accessible
            continue
        if flags & getattr(os, "ST_NOEXEC", 0):  # not defined on every system
            return (
                f'"{folder}" is on a file system mounted "noexec", from which no library can be loaded. '
                "Set ACCLIMATE_CACHE to a folder on another file system"
            )
        return None
    return None


def versions(recipe: Recipe) -> list[str]:
    """Returns the version texts of a recipe's compilers, for its cache key."""
    try:
        memory = ops_folder() / _VERSIONS
    except CacheWriteError:
        return compiler_versions(recipe.compilers, None)
    return compiler_versions(recipe.compilers, memory)


def find(recipe: Recipe, key: str) -> Path | None:
    """Returns the intact library with this key in the cache or in this process's private folder."""
    for root in (*_trusted_root(), *_private_folders()):
        library = _intact(root / recipe.name / key, recipe.name)
        if library is not None:
            return library
    return None


def find_built_elsewhere(recipe: Recipe) -> Path | None:
    """Returns the newest intact library of the same source, by any compiler; for machines without one."""
    for root in _trusted_root(notice=logging.WARNING):
        folders = filter(is_folder, (root / recipe.name).glob(f"{recipe.source_key}-*"))
        newest_first = sorted(folders, key=_modified_s, reverse=True)
        intact = (_intact(folder, recipe.name) for folder in newest_first)
        return next((library for library in intact if library is not None), None)
    return None


def obtain(recipe: Recipe, key: str, progress: Progress | None = None) -> Path:
    """Returns the library with this key: an existing one, or one that this or another process builds now."""
    library = find(recipe, key)
    if library is not None:
        return library
    try:
        return _build_once(ops_folder(), recipe, key, progress)
    except OSError as error:
        reason = _reason(error)
        if reason is None:
            raise
    return _build_privately(recipe, key, progress, reason)


def check_cache() -> None:
    """Checks that a library that is built now stays for later processes.

    Raises:
        CacheWriteError: the cache cannot be used, so that a library would be removed with this process.
    """
    root = ops_folder()
    try:
        make_folder(root)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise CacheWriteError(
            f"the cache {root} cannot be used, so the library would not outlive this process: "
            f"{_reason(error) or error}"
        ) from error


def _trusted_root(notice: int = logging.DEBUG) -> list[Path]:
    """Returns the cache's folder of libraries, or nothing if there is no cache or others can write to it.

    ``notice`` is the level at which that is logged.
    """
    try:
        root = ops_folder()
        check_folder(root)
    except OSError as error:
        _say_once(notice, f"The cache of built ops is not used: {error}.")
        return []
    return [root]


def _reason(error: OSError) -> str | None:
    """Returns why the cache cannot be used, if that is the error; else ``None``."""
    if isinstance(error, CacheWriteError):
        return str(error)
    if error.errno in UNWRITABLE:
        return f"it cannot be written ({refusal(error)}). Set ACCLIMATE_CACHE to a writable folder"
    return None


def _build_once(root: Path, recipe: Recipe, key: str, progress: Progress | None) -> Path:
    folder = root / recipe.name / key

    def build(private: Path) -> None:
        started = time.monotonic()
        _build_logger.info(
            'compiling the op "%s" (%d files); this happens once', recipe.name, len(recipe.units)
        )
        try:
            built = build_library(recipe, private, shown)
        except OpBuildError as error:
            raise OpBuildError(f"{error}\nLog: {_keep_log(private, folder)}") from error.__cause__
        _record(built, recipe, time.monotonic() - started)
        _log_of_failure(folder).unlink(missing_ok=True)

    with watched(progress) as shown:
        publish(
            folder,
            build,
            lambda: _intact(folder, recipe.name) is not None,
            f'building the op "{recipe.name}"',
            timeout_s=build_timeout_s(),
        )
    return folder / f"{recipe.name}.so"


def _build_privately(recipe: Recipe, key: str, progress: Progress | None, reason: str) -> Path:
    """Builds in a private folder of this process, since the cache cannot be used."""
    global _private_root
    if not _private_folders():
        try:
            folder = Path(tempfile.mkdtemp(prefix="acclimate-ops-"))
            check_folder(folder)
        except OSError as error:
            raise CacheWriteError(
                f"there is no folder to build in: the cache cannot be used ({reason}), and neither can the "
                f"folder for temporary files ({error})"
            ) from error
        _logger.warning(
            "This process compiles ops for itself alone, in %s, and every start compiles them again, which "
            "can take minutes. The cache is not used: %s.",
            folder,
            reason,
        )
        _private_root = os.getpid(), folder
        # As ``atexit``, and also in a process of multiprocessing, which ends without it.
        Finalize(None, _remove_private_folder, exitpriority=0)
    return _build_once(_private_folders()[0], recipe, key, progress)


def _private_folders() -> list[Path]:
    return [_private_root[1]] if _private_root is not None else []


def _remove_private_folder() -> None:
    if _private_root is not None and _private_root[0] == os.getpid():  # not in a forked child
        shutil.rmtree(_private_root[1], ignore_errors=True)


# -- one folder --------------------------------------------------------------------------------------


def _intact(folder: Path, name: str) -> Path | None:
    """Returns the library in a folder if it matches its record."""
    library = folder / f"{name}.so"
    try:
        check_folder(folder)
        record = json.loads(read_file(folder / _RECORD))
        content = read_file(library)
        if len(content) != record["size"] or _digest(content) != record["sha256"]:
            _logger.info("%s is damaged and will be built again.", library)
            return None
    except FileNotFoundError:
        return None
    except UntrustedCacheError as error:
        _say_once(logging.WARNING, f"A built op is not used: {error}.")
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return library


@cache
def _say_once(level: int, message: str) -> None:
    _logger.log(level, "%s", message)


def _record(library: Path, recipe: Recipe, seconds: float) -> None:
    content = library.read_bytes()
    record: dict[str, Any] = {
        "size": len(content),
        "sha256": _digest(content),
        "seconds": round(seconds, 2),
        "made_of": recipe.description,
        "compilers": [list(command) for command in recipe.compilers],
    }
    (library.parent / _RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _modified_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _log_of_failure(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _keep_log(private: Path, folder: Path) -> Path:
    """Moves the log of a failed build out of the private folder, which is removed."""
    return (private / LOG_NAME).replace(_log_of_failure(folder))


# -- cleaning ----------------------------------------------------------------------------------------


def clean(names: list[str] | None = None) -> tuple[list[Path], list[Path]]:
    """Removes built libraries, logs and the remains of killed builders, of all ops or those named.

    Returns:
        The removed folders, and the lock files of builds in progress, which stay.

    Raises:
        CacheWriteError: there is no cache, others can write to it, or it cannot be read.
    """
    removed: list[Path] = []
    busy: list[Path] = []
    root = ops_folder()
    check_folder(root)
    try:
        ops = sorted(path.name for path in root.iterdir()) if names is None else names
        # A link's target is not part of the cache.
        for parent in (root / op for op in ops if is_folder(root / op)):
            _clean_op(parent, removed, busy)
        if names is None:
            (root / _VERSIONS).unlink(missing_ok=True)
    except FileNotFoundError:  # the cache is empty, or another process is cleaning it
        pass
    except OSError as error:
        if isinstance(error, CacheWriteError):
            raise
        raise CacheWriteError(f"the cache {root} cannot be cleaned: {error}") from error
    return removed, busy


def _clean_op(parent: Path, removed: list[Path], busy: list[Path]) -> None:
    check_folder(parent)
    for key in sorted({_key_of(path) for path in parent.iterdir()} - {""}):
        folder = parent / key
        lock = try_hold(lock_file(folder))
        if lock is None:
            busy.append(lock_file(folder))
            continue
        with lock:
            if is_folder(folder):
                removed.append(folder)
            for path in [folder, *leftovers(folder)]:
                remove(path)
            _log_of_failure(folder).unlink(missing_ok=True)
            lock_file(folder).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: a build is in progress
        parent.rmdir()


def _key_of(path: Path) -> str:
    """Returns the key in a file name of the cache; keys contain no dot."""
    return path.name.lstrip(".").partition(".")[0]
