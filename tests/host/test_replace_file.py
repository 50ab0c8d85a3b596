"""Files are replaced as a whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from acclimate.host.replace_file import replace_file, umask


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_keeps_its_mode_and_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    replace_file(link, b"new")
    assert (link.is_symlink(), path.read_bytes(), mode_of(path)) == (True, b"new", 0o640)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "file") == 0o640


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's umask")
@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o7])
def test_the_umask_is_read_without_a_change_that_files_of_other_threads_would_get(
    mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
            assert umask() == mask
    finally:
        os.umask(before)


def test_a_mode_can_be_given(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"new", 0o600)
    assert mode_of(tmp_path / "file") == 0o600


def test_a_name_of_the_longest_length_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_failure_keeps_the_old_content_and_leaves_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])


def test_a_device_is_written_and_stays_a_device() -> None:
    replace_file(Path(os.devnull), b"new")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"new")
