"""The kernels share torch's threads, and change nothing of them for others."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from acclimate.llm.kernels.torch_threads import one_thread
from fresh_process import FreshProcesses

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")

_PRODUCTS = """
import os, torch
torch.set_num_threads(3)
from acclimate.llm.kernels import PackedWeight

def threads():
    return len(os.listdir("/proc/self/task"))

def of_torch():
    torch.randn(1_000_000).add(1)

before = threads()
weights = [PackedWeight.dense(torch.randn(3000, 512)), PackedWeight.quantize(torch.randn(3000, 512), "int8")]
blocks = torch.zeros(3000 * 16 * 18, dtype=torch.uint8)
of_torch()
torchs = threads()
for weight in weights:
    for rows in (1, 2, 16, 17, 40):
        weight.linear(torch.randn(rows, 512))
        of_torch()
    weight.top(torch.randn(1, 512))
    weight.dequantize()
PackedWeight.from_gguf(blocks, "Q4_0", (3000, 512))
tell(before=before, torchs=torchs, all=threads())
"""


@linux
def test_products_between_torchs_operators_use_torchs_threads(fresh: FreshProcesses) -> None:
    told = fresh.check(_PRODUCTS).told
    assert told["torchs"] == told["before"] + 2  # else the rest shows nothing
    assert told["all"] == told["torchs"]


@pytest.fixture
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_one_thread_changes_nothing_for_other_threads() -> None:
    seen = []
    with one_thread():
        own = torch.get_num_threads()
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert (own, seen, torch.get_num_threads()) == (1, [3], 3)


@linux
def test_operators_in_one_thread_start_no_threads(fresh: FreshProcesses) -> None:
    code = """
import os, torch
torch.set_num_threads(3)
from acclimate.llm.kernels.torch_threads import one_thread

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
with one_thread():
    x = torch.randn(600, 600)
    (x @ x).softmax(-1).sort()
    x.bfloat16() @ x.bfloat16()
inside = threads()
(x @ x).add(1)
tell(inside=inside - before, after=threads() - before)
"""
    assert fresh.check(code).told == {"inside": 0, "after": 2}
