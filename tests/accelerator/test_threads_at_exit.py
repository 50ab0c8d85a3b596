"""A process ends only when the threads of Gloo and of autograd are done with its tensors."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from acclimate.accelerator import threads_at_exit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the state of a thread")

_PR_SET_NAME = 15


@contextmanager
def torchs_thread(name: bytes, busy_s: float) -> Iterator[threading.Event]:
    """Runs a thread with a name of torch's, which computes for a time and then waits."""
    done, end = threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name)
        named.set()
        until = time.monotonic() + busy_s
        while time.monotonic() < until and not end.is_set():
            pass
        done.set()
        end.wait()

    named = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    named.wait()
    try:
        yield done
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("name", [b"pt_gloo_runloop", b"pt_autograd_1"])
def test_an_end_waits_for_a_thread_that_works(name: bytes) -> None:
    with torchs_thread(name, busy_s=0.3) as done:
        threads_at_exit.settle()
        assert done.is_set()


def test_a_thread_that_never_rests_keeps_the_end_for_a_second_only() -> None:
    before = time.monotonic()
    with torchs_thread(b"pt_gloo_runloop", busy_s=600.0) as done:
        threads_at_exit.settle()
        assert not done.is_set()
    assert 1 <= time.monotonic() - before < 60


ENDS = """
import sys
from acclimate import get_accelerator
from acclimate.accelerator import threads_at_exit

threads_at_exit.settle.__code__ = (lambda: print("settled", flush=True)).__code__
{ask}
"""


@pytest.mark.parametrize(
    "ask",
    [
        "get_accelerator().communication_backend_name()",
        "import acclimate.comm",
        "from acclimate import use_accelerator\nwith use_accelerator('sim'): pass",
    ],
)
@pytest.mark.usefixtures("warm_starts")
def test_a_process_that_may_use_gloo_or_a_device_waits_at_its_end_and_once(ask: str) -> None:
    code = ENDS.format(ask=f"{ask}\n{ask}")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, "settled\n"), ended.stderr
