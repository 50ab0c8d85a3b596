"""gloo takes no tensors of most devices: a program that exchanges the host's tensors today keeps the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.process_groups import on_groups
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
MAIN = f"import torch\nfrom start import start, wrap\n\nstart()\nwrap(torch.nn.Linear(2, 2).to({CHOICE}))\n"
START = (
    "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
    "def start():\n    dist.init_process_group({backend})\n\n\ndef wrap(model):\n    return {wrapped}\n"
)


@pytest.mark.parametrize(
    ("backend", "wrapped", "target", "is_safe"),
    [
        ("'gloo'", "DDP(model)", "torch", False),
        ("", "DDP(model)", "torch", False),
        ("'gloo'", "dist.all_reduce(model.weight)", "torch", False),
        ("'gloo'", "DDP(model)", "acclimate", False),
        ("backend='gloo', rank=0", "dist.broadcast(model.weight, 0)", "acclimate", False),
        ("'gloo')  # not (nccl", "DDP(model)", "acclimate", False),
        ("'gloo'", "cherry.optim.Distributed(model.parameters(), model)", "acclimate", False),
        ("", "DDP(model)", "acclimate", True),
        (f"{CHOICE.replace('cuda', 'nccl', 1).replace('cpu', 'gloo')}", "DDP(model)", "acclimate", True),
        ("'gloo'", "model", "torch", True),
        ("'nccl'", "DDP(model)", "torch", True),
    ],
)
def test_a_device_of_process_groups_keeps_the_host(
    backend: str, wrapped: str, target: str, is_safe: bool, tmp_path: Path
) -> None:
    files = {"main.py": MAIN, "start.py": START.format(backend=backend, wrapped=wrapped)}
    found = site(ported_project(tmp_path, files, target)["main.py"], CHOICE)
    assert (found.status is Status.CONVERTED) == is_safe, found
    assert is_safe or "start.py:10" in found.reason


def test_a_constant_may_name_gloo(tmp_path: Path) -> None:
    start = "GROUP = 'gloo'\n" + START.format(backend="GROUP", wrapped="DDP(model)")
    found = site(
        ported_project(tmp_path, {"main.py": MAIN, "start.py": start}, "acclimate")["main.py"], CHOICE
    )
    assert found.status is not Status.CONVERTED, found


def test_a_device_that_is_always_cudas_is_not_of_the_host(tmp_path: Path) -> None:
    main = "import torch\nfrom start import start, wrap\n\nstart()\nwrap(torch.nn.Linear(2, 2).cuda())\n"
    files = {"main.py": main, "start.py": START.format(backend="'gloo'", wrapped="DDP(model)")}
    found = site(ported_project(tmp_path, files, "torch")["main.py"], "torch.nn.Linear(2, 2).cuda()")
    assert found.status is Status.CONVERTED


@EACH_TARGET
@pytest.mark.parametrize(
    ("backend", "status"), [("'gloo'", Status.UNSAFE), ("'nccl'", Status.CONVERTED), ("", Status.CONVERTED)]
)
def test_a_device_that_is_always_cudas_stays_in_a_file_whose_groups_are_all_of_gloo(
    backend: str, status: Status, target: str, tmp_path: Path
) -> None:
    start = START.format(backend=backend, wrapped="DDP(model)")
    main = f"import torch\n{start}\n\nstart()\nwrap(torch.nn.Linear(2, 2).cuda())\n"
    found = ported_project(tmp_path, {"main.py": main}, target)["main.py"]
    assert site(found, "torch.nn.Linear(2, 2).cuda()").status is status


def test_what_exchanges_tensors_is_found_by_its_function() -> None:
    text = (
        START.format(backend="", wrapped="DDP(model)")
        + "\n\nclass C:\n    def f(self, x):\n        dist.broadcast(x, 0)\n"
    )
    assert on_groups(text) == {"wrap": 10, "C": 15}
    assert on_groups("distributed.all_reduce(") == {}
