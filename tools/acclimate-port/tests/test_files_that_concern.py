"""A quick look at a file's bytes passes by those that hold nothing to port, and only those."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, may_concern
from acclimate_port.files.workers import port_files

NOTHING = {
    "a load to a device": "import torch\n\nstate = torch.load(\n    path(1),\n    map_location=torch.device('cpu'),\n)\n",
    "a load that no module gets": "import torch\n\ndata, slices = torch.load(path)\n",
    "the device of a tensor named after an index": "import torch\n\ny = x.to(edge_index.device)\n",
    "another library": "import numpy as np\n\nx = np.ones(3)\n",
}
SOMETHING = {
    "a move": "x.cuda()\n",
    "a name": "from torch import cuda\n\ncuda.empty_cache()\n",
    "a device": "import torch\n\nx = torch.ones(3, device='cuda')  # on the device\n",
    "a flag": "import torch\n\nuse_cuda = True\n",
    "a move before a comment": "import torch\n\nx.cuda()  # acclimate: ignore[ACC201]\n",
    "the first device": "import torch\n\ny = x.to(0)\n",
    "a device by its number": "import torch\n\ny = x.to(args.gpu_id)\n",
    "settings": "model:\n  device: cuda\n",
    "a load": "import torch\n\nmodel.load_state_dict(torch.load(path))\n",
    "one of two loads": "import torch\n\na = torch.load(p, map_location='cpu')\nb = torch.load(p)\nw.copy_(b)\n",
    "a text with a sign for a comment": "import torch\n\nx = '#'; y = x.cuda()\n",
}


@pytest.mark.parametrize("kind", NOTHING)
def test_a_file_without_code_for_one_device_is_passed_by(kind: str) -> None:
    assert not may_concern(NOTHING[kind].encode())


@pytest.mark.parametrize("kind", SOMETHING)
def test_a_file_with_code_for_one_device_is_looked_at(kind: str) -> None:
    assert may_concern(SOMETHING[kind].encode())


def test_a_file_that_was_forgotten_can_be_ported_again(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("import torch\n\ntorch.cuda.empty_cache()\n")
    paths = sorted(tmp_path.glob("*.py"))
    first, second = (port_files(paths, Settings(), False, 1, lambda: None) for _ in range(2))
    assert [one.after for one in first] == [one.after for one in second]
    assert all(one.changed and not one.failure for one in second)
