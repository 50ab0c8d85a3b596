"""A test that stays beside code of the host holds back the device whose tensors would take that side."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
PROGRAM = f"import torch\nfrom sort import order\n\ndevice = torch.device({CHOICE})\nprint(order(torch.rand(4, device=device)))\n"
HEAD = "import numpy as np\nimport torch\n\n\n"
OF_CUDA = "def order_cuda(x):\n    return x.argsort()\n"
OF_HOST = {
    "numpy": "return torch.from_numpy(np.argsort(x.numpy()))",
    "a kernel for the CPU": "return sorting.order_cpu(x)",
}
OF_ANY = {
    "numpy of a copy on the host": "return torch.from_numpy(np.argsort(x.cpu().numpy()))",
    "torch": "return x.argsort()",
    "a move": "return move_to_cpu(x).argsort()",
}


def ported(folder: Path, other: str, target: str) -> Status:
    """The status of the device of a program that runs a test whose other side is given."""
    order = f"def order(x):\n    if x.is_cuda:\n        return order_cuda(x)\n    {other}\n\n\n"
    files = {"main.py": PROGRAM, "sort.py": HEAD + order + OF_CUDA}
    return site(ported_project(folder, files, target)["main.py"], CHOICE).status


@EACH_TARGET
@pytest.mark.parametrize("kind", OF_HOST)
def test_a_side_for_the_host_holds_the_device_back(kind: str, target: str, tmp_path: Path) -> None:
    assert ported(tmp_path, OF_HOST[kind], target) is Status.UNSAFE


@EACH_TARGET
@pytest.mark.parametrize("kind", OF_ANY)
def test_a_side_for_any_device_holds_nothing_back(kind: str, target: str, tmp_path: Path) -> None:
    assert ported(tmp_path, OF_ANY[kind], target) is Status.CONVERTED


@EACH_TARGET
def test_an_else_for_the_host_counts_as_what_follows_does(target: str, tmp_path: Path) -> None:
    order = "def order(x):\n    return order_cuda(x) if x.is_cuda else order(x.numpy())\n\n\n"
    files = {"main.py": PROGRAM, "sort.py": HEAD + order + OF_CUDA}
    assert site(ported_project(tmp_path, files, target)["main.py"], CHOICE).status is Status.UNSAFE
