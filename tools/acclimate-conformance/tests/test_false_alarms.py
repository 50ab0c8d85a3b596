"""What checks once mistook for faults of a device, where no accelerator is right and unusual by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from acclimate_conformance.checks import endings
from acclimate_conformance.checks.runtime.names import _is_same
from fresh_process import plain_environment


@pytest.mark.parametrize(
    ("id_of_the_other", "device", "same"), [(3, "cuda:0", True), (4, "cuda:0", False), (3, "cuda:1", False)]
)
def test_streams_of_two_classes_are_one_stream_if_their_device_and_number_are_the_same(
    id_of_the_other: int, device: str, same: bool
) -> None:
    one = SimpleNamespace(device=torch.device("cuda:0"), stream_id=3, of="torch")
    other = SimpleNamespace(device=torch.device(device), stream_id=id_of_the_other, of="a vendor")
    assert one != other
    assert _is_same(one, other) is same
    assert _is_same("a stream without a number", "a stream without a number")


@pytest.mark.parametrize(("written", "seen"), [(b"KeyboardInterrupt\n", ""), (b"a fault\n", "exit code 1")])
def test_ctrl_c_may_end_a_process_as_an_error_that_nothing_catches(
    written: bytes, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = "is ended by Ctrl-C"
    assert endings._WAYS[way][1] == -signal.SIGINT

    def ends() -> None:
        os.write(2, written)
        os._exit(1)

    monkeypatch.setitem(endings._WAYS, way, (ends, -signal.SIGINT))
    monkeypatch.setattr(endings, "_LENGTH", 4)  # for one thread: OpenMP's others do not survive a fork
    told = endings._Ending("cpu", way, {}).wrong()
    assert (seen in told) if seen else not told


HELD_TWICE = """
import torch
from types import SimpleNamespace
from acclimate.selection import get_accelerator
from acclimate_conformance.checks.memory.walks import _Memory

accelerator = get_accelerator()
walk = _Memory(accelerator)
for _ in range(2):
    walk._hold(0, lambda: torch.zeros(5 << 20, dtype=torch.uint8, device="sim:0"), 5 << 20)
one, other = walk.held
one.tensors.append(one.tensors[0].contiguous())
assert one.tensors[0] is one.tensors[1]
walk.look()
answers = iter([0, 0, one, other, "data"])
walk.replaces(SimpleNamespace(choice=lambda given: next(answers)))
walk.look()
print(len(walk.held), len(walk.held[0].tensors))
"""


@pytest.mark.usefixtures("warm_starts")
def test_a_tensor_that_a_walk_holds_twice_takes_over_other_memory_once() -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    environment = {**plain_environment(), "ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": ""}
    run = subprocess.run(
        [sys.executable, "-c", HELD_TWICE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "1 3\n", run.stderr
