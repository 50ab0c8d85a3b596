"""With a quota of processor time, commands and native code use as many threads as it has processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm_processes import WarmProcesses

from acclimate.host.topology import processor_limit

pytestmark = pytest.mark.parametrize("own_group", [("cpu", ("cpu.max", "cpu.cfs_quota_us"))], indirect=True)

_START = """
import json, os, sys, torch
from pathlib import Path
torch.set_num_threads(4)

def tell(**values):
    print(json.dumps(values), flush=True)

def threads():
    return len(os.listdir("/proc/self/task"))
"""


_JOIN = """
(Path({group!r}) / "cgroup.procs").write_text(str(os.getpid()))
"""


def told(warm: WarmProcesses, code: str) -> dict[str, Any]:
    """Runs code in a process of its own; returns what it tells at its end."""
    done = warm.run(code=_START + code)
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def give_processors(group: Path, share: float) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{int(100000 * share)} 100000")
    else:
        period = int((group / "cpu.cfs_period_us").read_text())
        (group / "cpu.cfs_quota_us").write_text(str(int(period * share)))


@pytest.mark.parametrize("command", ["generate", pytest.param("bench", marks=pytest.mark.slow)])
def test_a_command_limits_torchs_threads(
    command: str, own_group: Path, tiny_folder: Path, warm: WarmProcesses
) -> None:
    give_processors(own_group, 1)
    options = {
        "generate": ["--model", str(tiny_folder), "--max-new-tokens", "2", "a"],
        "bench": [str(tiny_folder), "--prompt-tokens", "2", "--new-tokens", "2", "--sequences", "1"],
    }[command]
    code = f"""
from acclimate.cli import main
assert main({[command, *options]!r}) == 0
tell(threads=torch.get_num_threads())
"""
    assert told(warm, _JOIN.format(group=str(own_group)) + code) == {"threads": 1}


def test_the_native_step_keeps_to_the_quota_and_torch_to_the_users_threads(
    own_group: Path, tiny_folder: Path, warm: WarmProcesses
) -> None:
    give_processors(own_group, 1)
    code = f"""
import acclimate
model = acclimate.init_inference({str(tiny_folder)!r}, dtype="float32")
torch.randn(1_000_000).add(1)  # so that all new threads are the step's
before = threads()
model.generate(torch.arange(2, 8)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
tell(started=threads() - before, torchs=torch.get_num_threads())
"""
    free = told(warm, code)
    assert free["started"] == min(4, processor_limit()) - 1
    assert told(warm, _JOIN.format(group=str(own_group)) + code) == {"started": 0, "torchs": 4}


def test_what_has_no_native_step_keeps_to_the_quota_too(
    own_group: Path, tiny_folder: Path, warm: WarmProcesses
) -> None:
    give_processors(own_group, 1)
    code = f"""
import acclimate
from transformers import LogitsProcessor, LogitsProcessorList

class Observer(LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.threads = torch.get_num_threads()
        return scores

model = acclimate.init_inference({str(tiny_folder)!r}, dtype="float32")
observer = Observer()
model.generate(torch.arange(2, 8)[None], max_new_tokens=4, do_sample=False, num_beams=2, pad_token_id=0,
               logits_processor=LogitsProcessorList([observer]))
tell(during=observer.threads, after=torch.get_num_threads())
"""
    found = told(warm, _JOIN.format(group=str(own_group)) + code)
    assert found == {"during": 1, "after": 4}


@pytest.mark.parametrize("is_limited", [False, True])
def test_half_a_processor_more_gives_the_native_step_a_thread_more(
    is_limited: bool, own_group: Path, warm: WarmProcesses
) -> None:
    give_processors(own_group, 1.5)
    code = f"""
from acclimate.llm.kernels.torch_threads import at_most_threads, kernel_threads, limit_torch_threads
if {is_limited}:
    limit_torch_threads()
with at_most_threads(1):
    inside = kernel_threads()
tell(torchs=torch.get_num_threads(), native=kernel_threads(), inside=inside)
"""
    found = told(warm, _JOIN.format(group=str(own_group)) + code)
    native = min(2, processor_limit())
    assert found == {"torchs": 1 if is_limited else 4, "native": native, "inside": native}
