"""An agent's connection to a launcher that falls silent, exits, or is not a launcher."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

import pytest

from acclimate.launch.remote import agent
from acclimate.launch.remote.agent import LauncherConnection
from acclimate.launch.remote.protocol import FROM_HOST, FROM_LAUNCHER, SocketChannel


@pytest.fixture
def both_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SocketChannel, LauncherConnection]]:
    """The launcher's end, and a host's that takes it for lost after a short silence."""
    monkeypatch.setattr(agent, "SILENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = SocketChannel(socket.create_connection(server.getsockname()), FROM_HOST)
        there = SocketChannel(server.accept()[0], FROM_LAUNCHER)
    yield here, LauncherConnection(there)
    here.close()
    there.close()


def is_told_something(launcher: LauncherConnection, within_s: float) -> bool:
    """Whether the supervisor would look: something has come, or it is time to."""
    silence_s = within_s if launcher.lost_at is None else launcher.lost_at - time.monotonic()
    came = select.select([launcher], [], [], max(0.0, min(within_s, silence_s)))[0]
    return bool(came) or silence_s < within_s


def test_a_launcher_that_says_nothing_for_long_is_taken_for_lost(
    both_ends: tuple[SocketChannel, LauncherConnection],
) -> None:
    here, launcher = both_ends
    here.send({"alive": True})
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() is None
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() == agent.LAUNCHER_LOST
    assert not is_told_something(launcher, 0.5)  # it is told once


def test_a_launcher_that_a_user_has_suspended_may_be_silent(
    both_ends: tuple[SocketChannel, LauncherConnection],
) -> None:
    here, launcher = both_ends
    here.send({"pause": True})
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() is None
    assert not is_told_something(launcher, 1)
    here.send({"alive": True})
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() is None
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() == agent.LAUNCHER_LOST


def test_a_launcher_that_is_gone_ends_the_ranks_and_so_does_its_word(
    both_ends: tuple[SocketChannel, LauncherConnection],
) -> None:
    here, launcher = both_ends
    here.send({"stop": "Because."})
    assert launcher.reason_to_stop() == "Because."
    here.close()
    assert is_told_something(launcher, 10)
    assert launcher.reason_to_stop() == agent.LAUNCHER_LOST
