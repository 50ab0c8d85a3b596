"""Finds the cache folder, and checks that only those whom its user trusts can change its content.

Code from the cache is loaded and run, so a folder or file is used only if no user except this one and root
could have created or changed it. A path is checked from the root of the file system: each name is looked up
in a folder that others cannot change, so it refers to the same file when it is opened later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from functools import cache
from pathlib import Path

from acclimate.errors import CacheWriteError, InvalidEnvironmentError, UntrustedCacheError, excerpt

_MOST_LINKS = 40  # on one path, as Linux has it
try:
    import grp
    import pwd
except ImportError:  # a system without owners and modes, where nothing is checked
    grp = pwd = None  # type: ignore[assignment]

TRUST_VARIABLE = "ACCLIMATE_CACHE_TRUST"
"""Names the group whose members share the cache; :data:`EVERYONE` turns the checks off."""

EVERYONE = "everyone"

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def cache_root() -> Path:
    """Returns the absolute path of acclimate's cache folder, without creating it.

    The path is ``ACCLIMATE_CACHE``, else ``$XDG_CACHE_HOME/acclimate``, else ``~/.cache/acclimate``.

    Raises:
        CacheWriteError: there is no home folder, or no working directory for a relative path.
    """
    chosen = os.environ.get("ACCLIMATE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        if os.path.isabs(base):  # the XDG specification says to ignore a relative path
            return Path(base) / "acclimate"
        return Path.home().absolute() / ".cache" / "acclimate"
    except RuntimeError as error:  # from pathlib, for a user without HOME and without an entry in passwd
        raise CacheWriteError(
            f"there is no folder for the cache: {error} Set ACCLIMATE_CACHE to an absolute path"
        ) from error
    except FileNotFoundError as error:
        raise CacheWriteError(
            "the path of the cache is relative, and the working directory was deleted. "
            "Set ACCLIMATE_CACHE to an absolute path"
        ) from error


# -- folders -----------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Checks that only this user and root can change the content of a cache folder.

    A parent folder that others can write to is accepted if it is sticky, as ``/tmp`` is: others can add names
    to it, but not replace this user's. Folders that do not exist yet are accepted.

    Args:
        folder: an absolute path. Symbolic links in it are followed, and their folders are checked too.

    Raises:
        UntrustedCacheError: another user can change it; the message names the folder and says what to do.
        CacheWriteError: there is a file where a folder should be.
        OSError: the path cannot be followed.
    """
    if not checks_owners():
        return
    way, is_whole = _way_to(folder)
    shared: str | None = None  # the other users who can write to the parent folder
    for path, status in way:
        owner_is_trusted = is_trusted_owner(status.st_uid) or is_unmapped_root(status.st_uid)
        if stat.S_ISLNK(status.st_mode):
            if shared and not owner_is_trusted:
                raise _refused(folder, f'"{path}" is a link that belongs to {user_name(status.st_uid)}')
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise CacheWriteError(
                f'"{folder}" cannot be a folder of the cache, because "{path}" is a file. '
                "Set ACCLIMATE_CACHE to a folder"
            )
        if not owner_is_trusted:
            raise _refused(folder, f'"{path}" belongs to {user_name(status.st_uid)}')
        shared = _other_writers(path, status)
        if shared and not status.st_mode & stat.S_ISVTX:
            raise _refused(folder, f'"{path}" can be changed by {shared}')
    path, status = way[-1]
    if is_whole and shared:
        raise _refused(folder, f'"{path}" can be written to by {shared}')
    if is_whole and not is_trusted_owner(status.st_uid):
        raise _refused(folder, f'"{path}" belongs to {user_name(status.st_uid)}')


def make_folder(folder: Path) -> None:
    """Creates a cache folder that others cannot write to, regardless of the umask, and checks it."""
    check_folder(folder)
    missing: list[Path] = []
    for path in (folder, *folder.parents):
        if path.is_dir():
            break
        missing.insert(0, path)
    for path in missing:
        try:
            path.mkdir(0o755)
        except FileExistsError:  # another process was faster, or it is a dangling symbolic link
            if not path.is_dir():
                raise
        else:
            _share(path, 0o2775)
    if missing:
        check_folder(folder)


def check_tree(folder: Path) -> None:
    """Checks a folder of the cache and everything in it.

    Raises:
        UntrustedCacheError: others can change something in it, or it contains an entry that is neither a file
            nor a folder.
        OSError: it cannot be read.
    """
    check_folder(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            _check_entry(path, os.lstat(path))


def settle_modes(folder: Path) -> None:
    """Removes other users' write permission from everything in a folder that this process created."""
    for path in (folder, *folder.rglob("*")):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            continue
        if mode & 0o022:
            path.chmod(stat.S_IMODE(mode) & ~0o022)
        _share(path, 0o2775 if stat.S_ISDIR(mode) else 0o664)


# -- files -------------------------------------------------------------------------------------------


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file in a checked folder; returns a descriptor, which the caller must close.

    Symbolic links are not followed. The check is made on the opened file.

    Raises:
        UntrustedCacheError: it is not this user's or root's, or others can write to it.
        OSError: it cannot be opened, or is a link.
    """
    # O_NONBLOCK, because opening a FIFO would wait for a writer.
    descriptor = os.open(path, flags | os.O_CLOEXEC | _NOFOLLOW | _NONBLOCK, 0o644)
    try:
        status = os.fstat(descriptor)
        _check_entry(path, status)
        if not stat.S_ISREG(status.st_mode):
            raise _not_a_file(path)
        if flags & os.O_CREAT and status.st_uid == os.geteuid():
            _share(path, 0o664)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path) -> bytes:
    """Returns the content of a file, which is opened with :func:`open_file`."""
    with open(open_file(path), "rb") as file:
        return file.read()


# -- who can change it -------------------------------------------------------------------------------


def _way_to(folder: Path) -> tuple[list[tuple[Path, os.stat_result]], bool]:
    """Returns every folder and symbolic link from the root to a path, and whether the path exists."""
    current = Path(folder.anchor)
    way = [(current, os.lstat(current))]
    names = list(reversed(folder.parts[1:]))
    links = 0
    while names:
        name = names.pop()
        if name == "..":
            current = current.parent
            way.append((current, os.lstat(current)))
            continue
        path = current / name
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return way, False
        way.append((path, status))
        if not stat.S_ISLNK(status.st_mode):
            current = path
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        target = Path(os.readlink(path))
        if target.is_absolute():
            current = Path(target.anchor)
            names += reversed(target.parts[1:])
        else:
            names += reversed(target.parts)
    if way[-1][0] != current:  # a link to the root or to "."
        way.append((current, os.lstat(current)))
    return way, True


def _check_entry(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise _not_a_file(path)
    if not checks_owners():
        return
    if not is_trusted_owner(status.st_uid):
        raise _refused(path, f'"{path}" belongs to {user_name(status.st_uid)}')
    others = _other_writers(path, status)
    if others:
        raise _refused(path, f'"{path}" can be changed by {others}')


def _other_writers(path: Path, status: os.stat_result) -> str | None:
    """Returns the users besides the owner who can write to a file or folder, for a message."""
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if status.st_mode & stat.S_IWGRP and not is_trusted_group(status.st_gid, path):
        return f"the group {group_name(status.st_gid)}"
    return None


def _share(path: Path, mode: int) -> None:
    """Gives a new file or folder to the group that shares the cache, if there is one."""
    gid = shared_group()
    if gid is not None:
        os.chown(path, -1, gid)
        path.chmod(mode)


def _refused(path: Path, reason: str) -> UntrustedCacheError:
    return UntrustedCacheError(
        f'{reason}, who could put other code into the cache ("{path}"). Set ACCLIMATE_CACHE to a folder that '
        "only you can write to; or remove the write permission of others, and delete files that they could "
        f"have put there. {TRUST_VARIABLE}=GROUP trusts the members of a group"
    )


def _not_a_file(path: Path) -> UntrustedCacheError:
    return UntrustedCacheError(f'"{path}" in the cache is not an ordinary file. Delete it')


# -- owners ---------------------------------------------------------------------------------------


def checks_owners() -> bool:
    """Whether the system has owners and modes, and the user has not turned the checks off."""
    return hasattr(os, "geteuid") and os.environ.get(TRUST_VARIABLE) != EVERYONE


def shared_group() -> int | None:
    """Returns the id of the group whose members share the cache; ``None`` if no group does.

    Raises:
        InvalidEnvironmentError: ``ACCLIMATE_CACHE_TRUST`` names no group.
    """
    name = os.environ.get(TRUST_VARIABLE)
    if not name or name == EVERYONE or grp is None:
        return None
    return _group_id(name)


def is_trusted_owner(uid: int) -> bool:
    """Whether a file of this owner may be loaded: root, this user, or a member of the sharing group."""
    if uid in (0, os.geteuid()):
        return True
    gid = shared_group()
    return gid is not None and gid in _groups(uid)


def is_unmapped_root(uid: int) -> bool:
    """Whether this is the overflow uid, as which a user namespace without root shows root.

    Every other unmapped user of the host appears with this uid too. So an owner with this uid is accepted for
    a parent folder of the cache, where such a user can only rename entries, but not for files to load.
    """
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False
    return uid == overflow == os.lstat("/").st_uid


def is_trusted_group(gid: int, path: Path) -> bool:
    """Whether a file that this group can write to is as safe as one that only its owner can write to.

    This is true for root's group, for a group whose only member is this user (distributions create one per
    user, with a umask of 002), and for the group that shares the cache.
    """
    if _has_access_list(path):  # with an ACL, the group bits are the mask for other users and groups
        return False
    return gid == shared_group() or _is_own_group(gid, os.geteuid())


def user_name(uid: int) -> str:
    """Returns a user's name for a message: "ann (uid 1000)"."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"the user with uid {uid}"


def group_name(gid: int) -> str:
    """Returns a group's name for a message: "staff (gid 50)"."""
    with contextlib.suppress(KeyError):
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    return f"with gid {gid}"


@cache
def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise InvalidEnvironmentError(
            f'{TRUST_VARIABLE} is "{excerpt(name)}", but there is no such group here. Set it to the name of '
            f'the group that shares the cache, to "{EVERYONE}" to turn the checks off, or unset it.'
        ) from None


@cache
def _groups(uid: int) -> frozenset[int]:
    """Returns the ids of the groups that a user is in."""
    try:
        user = pwd.getpwuid(uid)
        return frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
    except (KeyError, OSError):
        return frozenset()


@cache
def _is_own_group(gid: int, uid: int) -> bool:
    try:
        group = grp.getgrgid(gid)
        owner = "root" if gid == 0 else pwd.getpwuid(uid).pw_name
    except KeyError:
        return gid == 0
    is_private = gid == 0 or (group.gr_name == owner and pwd.getpwuid(uid).pw_gid == gid)
    return is_private and set(group.gr_mem) <= {owner}


def _has_access_list(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    except (OSError, AttributeError):
        return False
