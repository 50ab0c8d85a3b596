"""The cache is used only where nobody but its user and root can put code into it; real users try."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_users import ANN, MALLORY, as_user, needs_root, public_folder

from acclimate.cache.folder import cache_root, check_folder, check_tree, make_folder, open_file, read_file
from acclimate.cache.lock import hold
from acclimate.cache.publish import publish_once
from acclimate.errors import CacheWriteError, UntrustedCacheError
from quick_parameters import quick


@pytest.fixture
def place() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


def own(path: Path, uid: int, mode: int) -> Path:
    """Makes a folder, or takes what is there, and gives it to a user."""
    if not os.path.lexists(path):
        path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


# -- folders that are refused -------------------------------------------------------------------------


def world_writable(place: Path) -> Path:
    return own(place / "cache", ANN, 0o777)


def sticky(place: Path) -> Path:
    return own(place / "cache", ANN, 0o1777)


def anothers(place: Path) -> Path:
    return own(place / "cache", MALLORY, 0o755)


def anothers_and_open_to_all(place: Path) -> Path:
    return own(place / "cache", MALLORY, 0o1777)


def below_anothers(place: Path) -> Path:
    return own(own(place / "hers", MALLORY, 0o755) / "cache", ANN, 0o700)


def below_one_open_to_all(place: Path) -> Path:
    return own(own(place / "open", 0, 0o777) / "cache", ANN, 0o700)


def not_there_below_one_open_to_all(place: Path) -> Path:
    return own(place / "open", 0, 0o777) / "cache"


def open_to_a_group(place: Path) -> Path:
    folder = own(place / "cache", ANN, 0o775)
    os.chown(folder, ANN, 100)
    return folder


def below_one_open_to_a_group(place: Path) -> Path:
    project = own(place / "project", 0, 0o775)
    os.chown(project, 0, 100)
    return own(project / "cache", ANN, 0o700)


def a_link_planted_in_a_sticky_folder(place: Path) -> Path:
    own(place / "tmp", 0, 0o1777)
    own(place / "real", ANN, 0o755)
    (place / "tmp/cache").symlink_to(place / "real")
    os.chown(place / "tmp/cache", MALLORY, MALLORY, follow_symlinks=False)
    return place / "tmp/cache"


def a_link_through_anothers_folder(place: Path) -> Path:
    own(own(place / "hers", MALLORY, 0o755) / "cache", ANN, 0o755)
    (place / "cache").symlink_to("hers/cache")
    return place / "cache"


def out_of_anothers_folder_again(place: Path) -> Path:
    own(place / "hers", MALLORY, 0o755)
    own(place / "cache", ANN, 0o755)
    return place / "hers/../cache"


def open_to_a_user_by_an_access_list(place: Path) -> Path:
    folder = own(place / "cache", ANN, 0o755)
    os.chown(folder, ANN, 0)
    no_id = 0xFFFFFFFF
    entries = [(1, 7, no_id), (2, 7, MALLORY), (4, 5, no_id), (16, 7, no_id), (32, 5, no_id)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_access", content)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")
    return folder


REFUSED = {
    prepare.__name__: prepare
    for prepare in (
        world_writable, sticky, anothers, anothers_and_open_to_all, below_anothers, below_one_open_to_all,
        not_there_below_one_open_to_all, open_to_a_group, below_one_open_to_a_group,
        a_link_planted_in_a_sticky_folder, a_link_through_anothers_folder, open_to_a_user_by_an_access_list,
    )
}  # fmt: skip


@needs_root
@pytest.mark.parametrize(
    "prepare",
    quick(
        REFUSED,
        "world_writable",
        "anothers",
        "below_anothers",
        "below_one_open_to_all",
        "open_to_a_group",
        "a_link_planted_in_a_sticky_folder",
        "open_to_a_user_by_an_access_list",
    ),
)
def test_a_folder_is_refused_that_is(prepare: Callable[[Path], Path], place: Path) -> None:
    folder = prepare(place)
    with pytest.raises(UntrustedCacheError, match="Set ACCLIMATE_CACHE to a folder that only you can write"):
        as_user(ANN, lambda: check_folder(folder))
    with pytest.raises(UntrustedCacheError):
        as_user(ANN, lambda: publish_once(folder / "op", lambda private: (private / "x").touch()))


@needs_root
def test_the_message_names_the_folder_that_is_at_fault_and_who_can_change_it(place: Path) -> None:
    folder = below_anothers(place)
    with pytest.raises(UntrustedCacheError) as refused:
        as_user(ANN, lambda: check_folder(folder))
    assert str(refused.value).startswith(f'"{place}/hers" belongs to the user with uid {MALLORY}, who could')
    folder = world_writable(place)
    with pytest.raises(UntrustedCacheError) as refused:
        as_user(ANN, lambda: check_folder(folder))
    assert str(refused.value).startswith(f'"{folder}" can be changed by every user, who could')


@needs_root
def test_root_refuses_the_cache_in_a_users_home(place: Path) -> None:
    home = own(place / "ann", ANN, 0o755)
    with pytest.raises(UntrustedCacheError):
        make_folder(home / ".cache/acclimate")
    assert list(home.iterdir()) == []  # where a folder of root's would be in its owner's way


# -- folders that are used ----------------------------------------------------------------------------


def ones_own(place: Path) -> Path:
    return own(place / "cache", ANN, 0o755)


def not_there_yet(place: Path) -> Path:
    return own(place / "home", ANN, 0o755) / "a/b"


def ones_own_in_a_sticky_folder(place: Path) -> Path:
    return own(own(place / "tmp", 0, 0o1777) / "cache", ANN, 0o700)


def roots(place: Path) -> Path:
    return own(place / "cache", 0, 0o755)


def open_to_roots_group(place: Path) -> Path:
    folder = own(place / "cache", ANN, 0o775)
    os.chown(folder, ANN, 0)
    return folder


def in_a_home_that_is_a_link(place: Path) -> Path:
    own(own(place / "data", 0, 0o755) / "ann", ANN, 0o755)
    (place / "ann").symlink_to("data/ann")
    return place / "ann/cache"


@needs_root
@pytest.mark.parametrize(
    "prepare",
    [ones_own, not_there_yet, ones_own_in_a_sticky_folder, open_to_roots_group, in_a_home_that_is_a_link],
    ids=lambda prepare: prepare.__name__,
)
def test_a_folder_is_used_that_is(prepare: Callable[[Path], Path], place: Path) -> None:
    folder = prepare(place)
    as_user(ANN, lambda: publish_once(folder / "op", lambda private: (private / "x").touch()))
    as_user(ANN, lambda: check_tree(folder))
    assert (folder / "op/x").stat().st_uid == ANN


@needs_root
def test_a_cache_that_root_made_is_read_by_users_and_not_written(place: Path) -> None:
    folder = roots(place)
    publish_once(folder / "op", lambda private: (private / "x").touch())
    as_user(ANN, lambda: publish_once(folder / "op", lambda private: None))
    with pytest.raises(CacheWriteError, match="cannot be written"):
        as_user(ANN, lambda: publish_once(folder / "other", lambda private: None))


@needs_root
def test_members_of_a_group_share_a_cache_when_told_to(place: Path) -> None:
    """Two members use what the other made; a third user and a member who was not told refuse it."""
    passwd, group = place / "passwd", place / "group"
    passwd.write_text("root:x:0:0::/:\nann:x:23456:23456::/:\nbob:x:23458:23458::/:\neve:x:23457:23457::/:\n")
    group.write_text("root:x:0:\nann:x:23456:\nbob:x:23458:\neve:x:23457:\nteam:x:23500:ann,bob\n")
    cache = own(place / "cache", 0, 0o2770)
    os.chown(cache, 0, 23500)
    script = place / "publish.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "from acclimate.cache import publish_once\n"
        "from acclimate.errors import AcclimateError\n"
        "user, uid, told = sys.argv[1], int(sys.argv[2]), sys.argv[3]\n"
        "os.initgroups(user, uid); os.setgid(uid); os.setuid(uid)\n"
        "if told: os.environ['ACCLIMATE_CACHE_TRUST'] = told\n"
        "def build(private): (private / 'x').touch(); print('built', end=' ')\n"
        f"try: publish_once(Path({str(cache)!r}) / 'deep/op', build); print('used')\n"
        "except AcclimateError as error: print(type(error).__name__)\n"
    )
    users = [("ann", 23456, "team"), ("bob", 23458, "team"), ("bob", 23458, ""), ("ann", 23456, "teem")]
    command = f"mount --bind {passwd} /etc/passwd && mount --bind {group} /etc/group"
    for user, uid, told in users:
        command += f" && umask 077 && {sys.executable} {script} {user} {uid} '{told}'"
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=600
    )
    if "built" not in ended.stdout and ("mount" in ended.stderr or "unshare" in ended.stderr):
        pytest.skip(f"this system refuses a mount namespace: {ended.stderr}")
    assert ended.stdout.splitlines() == [
        "built used",
        "used",
        "UntrustedCacheError",
        "InvalidEnvironmentError",
    ], ended.stderr
    assert {stat.S_IMODE(path.stat().st_mode) for path in (cache / "deep", cache / "deep/op")} == {0o2775}


@needs_root
def test_everyone_is_trusted_where_the_user_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_CACHE_TRUST", "everyone")
    check_folder(world_writable(place))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_published_is_nobody_elses_to_change_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    def build(private: Path) -> None:
        (private / "file").touch(0o666)
        (private / "folder").mkdir(0o777)
        (private / "folder/program").touch(0o777)

    before = os.umask(umask)
    try:
        publish_once(tmp_path / "a/b/op", build)
    finally:
        os.umask(before)
    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(made) == 7  # with the lock
    assert [path for path in made if path.lstat().st_mode & 0o022] == []
    check_tree(tmp_path / "a")


# -- files --------------------------------------------------------------------------------------------


def a_link(path: Path) -> None:
    (path.parent / "target").write_text("precious")
    path.symlink_to("target")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def open_to_all(path: Path) -> None:
    path.write_text("x")
    path.chmod(0o666)


def of_another(path: Path) -> None:
    path.write_text("x")
    os.chown(path, MALLORY, MALLORY)


@pytest.mark.parametrize(
    "plant",
    [a_link, a_fifo, a_folder, open_to_all, pytest.param(of_another, marks=needs_root)],
    ids=lambda plant: plant.__name__,
)
def test_a_file_is_neither_read_nor_locked_that_is(plant: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / ".op.lock"
    plant(path)
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the kernel
        read_file(path)
    with pytest.raises(OSError), hold(path, 0, "testing"):  # noqa: PT011
        pass
    if plant is a_link:
        assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize("plant", [a_link, a_folder], ids=lambda plant: plant.__name__)
def test_a_lock_that_is_no_file_is_named_by_its_path(plant: Callable[[Path], None], tmp_path: Path) -> None:
    lock = tmp_path / ".op.lock"
    plant(lock)
    with pytest.raises(CacheWriteError, match=re.escape(str(lock))):
        publish_once(tmp_path / "op", lambda private: None)


def test_a_socket_is_no_file(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(OSError):  # noqa: PT011
            open_file(tmp_path / "s")
        with pytest.raises(UntrustedCacheError, match="not an ordinary file"):
            check_tree(tmp_path)


def test_a_lock_file_that_is_another_name_of_a_file_leaves_that_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / ".op.lock")
    with hold(tmp_path / ".op.lock", 0, "testing"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


# -- a place that cannot be a cache -------------------------------------------------------------------


def test_a_file_where_the_cache_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheWriteError, match=r'because ".*/file" is a file'):
        make_folder(tmp_path / "file" / "ops")


def test_links_that_go_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        check_folder(tmp_path / "a")


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to("nowhere")
    with pytest.raises(CacheWriteError, match="cannot be written"):
        publish_once(tmp_path / "cache/op", lambda private: None)


@needs_root
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "ACCLIMATE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CacheWriteError, match="Set ACCLIMATE_CACHE to an absolute path"):
        as_user(ANN, cache_root)


def test_a_user_that_does_not_exist_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_CACHE", "~no-such-user/cache")
    with pytest.raises(CacheWriteError, match="Set ACCLIMATE_CACHE to an absolute path"):
        cache_root()


def test_a_fifo_in_place_of_what_a_dead_builder_left_is_removed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".op.01234567.partial")
    os.mkfifo(tmp_path / ".other.01234567.partial")
    publish_once(tmp_path / "op", lambda private: (private / "x").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".op.lock", ".other.lock", "op"]
