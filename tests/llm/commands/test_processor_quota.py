"""With a quota of processor time, commands and native code use as many threads as it has processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate.host.topology import processor_limit
from fresh_process import FreshProcesses

pytestmark = pytest.mark.parametrize("own_group", [("cpu", ("cpu.max", "cpu.cfs_quota_us"))], indirect=True)

_START = """
import os, sys, torch
from pathlib import Path
torch.set_num_threads(4)

def threads():
    return len(os.listdir("/proc/self/task"))
"""


_JOIN = """
(Path({group!r}) / "cgroup.procs").write_text(str(os.getpid()))
"""


def give_one_processor(group: Path) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text("100000 100000")
    else:
        (group / "cpu.cfs_quota_us").write_text((group / "cpu.cfs_period_us").read_text())


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_command_limits_torchs_threads(
    command: str, own_group: Path, tiny_folder: Path, fresh: FreshProcesses
) -> None:
    give_one_processor(own_group)
    options = {
        "generate": ["--model", str(tiny_folder), "--max-new-tokens", "2", "a"],
        "bench": [str(tiny_folder), "--prompt-tokens", "2", "--new-tokens", "2", "--sequences", "1"],
    }[command]
    code = f"""
from acclimate.cli import main
assert main({[command, *options]!r}) == 0
tell(threads=torch.get_num_threads())
"""
    assert fresh.check(_START + _JOIN.format(group=str(own_group)) + code).told == {"threads": 1}


def test_the_native_step_keeps_to_the_quota_and_torch_to_the_users_threads(
    own_group: Path, tiny_folder: Path, fresh: FreshProcesses
) -> None:
    give_one_processor(own_group)
    code = f"""
import acclimate
model = acclimate.init_inference({str(tiny_folder)!r}, dtype="float32")
torch.randn(1_000_000).add(1)  # so that all new threads are the step's
before = threads()
model.generate(torch.arange(2, 8)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
tell(started=threads() - before, torchs=torch.get_num_threads())
"""
    free = fresh.check(_START + code).told
    assert free["started"] == min(4, processor_limit()) - 1
    assert fresh.check(_START + _JOIN.format(group=str(own_group)) + code).told == {"started": 0, "torchs": 4}
