"""Decides which users and groups may change the cache: this user, root, and a group that the user names."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

from acclimate.errors import InvalidEnvironmentError, excerpt

try:
    import grp
    import pwd
except ImportError:  # a system without owners and modes, where nothing is checked
    grp = pwd = None  # type: ignore[assignment]

TRUST_VARIABLE = "ACCLIMATE_CACHE_TRUST"
"""Names the group whose members share the cache; :data:`EVERYONE` turns the checks off."""

EVERYONE = "everyone"


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
