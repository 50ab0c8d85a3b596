"""Edits of one purpose are made together or not at all.

In each program one of them is left or unsafe, so a safe port must leave the others too.
"""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET

BACKENDS = [
    # The device that the same function chooses stays, since its branch reads what only CUDA has.
    "class A:\n    def __init__(self, rank):\n        self.backend = 'nccl' if torch.cuda.is_available() else 'gloo'\n"
    "        if torch.cuda.is_available():\n            self.device = torch.device('cuda', rank)\n"
    "            print(torch.backends.cudnn.version())\n        else:\n            self.device = torch.device('cpu')\n",
    # The default of a parameter is looked up when the module is imported.
    "def init(rank, backend='nccl'):\n    if torch.cuda.is_available():\n        dist.init_process_group(backend=backend)\n"
    "        dist.all_reduce(torch.tensor([1], device='cuda'))\n",
    # A test of the backend stays, and skips on a CPU.
    "class A(T):\n    def setUp(self, backend='nccl'):\n        self.backend = backend\n"
    "        if torch.cuda.is_available():\n            self.device = torch.device('cuda:0')\n"
    "        else:\n            self.device = torch.device('cpu')\n"
    "        if self.backend == 'nccl' and self.device == torch.device('cpu'):\n            self.skipTest('no')\n",
]
NUMBERS = [
    "def f(rank):\n    gpu = rank % torch.cuda.device_count()  # acclimate: ignore\n    torch.cuda.set_device(gpu)\n"
    "    dist.init_process_group(backend='nccl', rank=rank)\n",
    "def f(rank):\n    n = torch.cuda.device_count()  # acclimate: ignore\n    torch.cuda.set_device(rank % n)\n",
    "def f(rank):\n    count = torch.cuda.device_count()  # acclimate: ignore\n    with torch.cuda.device(int(rank / count)):\n        pass\n",
    # The terms of one sum.
    "def f(q):\n    stats = torch.cuda.memory_stats(q.device)\n    held = stats['reserved_bytes.all.current']\n"
    "    free, _ = torch.cuda.mem_get_info(0)\n    return free + held\n",
    "def f(q):\n    return torch.cuda.mem_get_info(0)[0] - torch.cuda.memory_stats(q.device)['active_bytes.all.current']\n",
]
BLOCKS = [
    "def f(x: torch.Tensor, y):\n    return x.pin_memory(), y.pin_memory()\n",
    "def f(x: torch.Tensor, y):\n    x, y = x.cuda(), y.cuda()\n    return x, y\n",
    "def f(x, devices, stream):\n    with torch.cuda.device(devices[0]), torch.cuda.stream(stream):\n"
    "        x = x.cuda(devices[0])\n    return x\n",
    "def f(x, n):\n    with torch.cuda.device_of(x):\n        return x * torch.arange(n).cuda()\n",
    "def f(run):\n    try:\n        return run()\n    except torch.cuda.OutOfMemoryError:\n"
    "        torch.cuda.caching_allocator_delete(run)\n        torch.cuda.empty_cache()\n",
    "def f(model):\n    return DataParallel(model.cuda(), device_ids=[torch.cuda.current_device()])\n",
    "def f(kw):\n    if kw is None:\n        return torch.cuda.amp.GradScaler()\n    elif kw:\n"
    "        return torch.cuda.amp.GradScaler(**kw)\n",
    "class A:\n    def f(self, first: torch.Tensor, index):\n        x = first\n        if index:\n"
    "            x = x.cuda(index.number)\n        else:\n            x = x.cuda()\n        return x\n",
    "def f(t):\n    if type(t) == torch.Tensor:\n        if t.device != torch.device('cuda'):\n"
    "            t = t.to(torch.device('cuda'))\n    return t\n",
]


@EACH_TARGET
@pytest.mark.parametrize("body", [*BACKENDS, *NUMBERS, *BLOCKS])
def test_a_part_of_one_purpose_is_not_ported_alone(body: str, target: str) -> None:
    source = f"import torch\nimport torch.distributed as dist\n\n\n{body}"
    assert port_text(source, Settings(target)).text == source


WHOLE = [
    "def f(rank):\n    torch.cuda.set_device(rank)\n    dist.init_process_group('nccl', rank=rank)\n",
    "def f(x: torch.Tensor, i: int):\n    with torch.cuda.device(i):\n        return x.cuda()\n",
    "def f(run):\n    try:\n        return run()\n    except torch.cuda.OutOfMemoryError:\n        torch.cuda.empty_cache()\n",
    "def f(kw):\n    if kw is None:\n        return torch.cuda.amp.GradScaler()\n    else:\n"
    "        return torch.cuda.amp.GradScaler(init_scale=2.0)\n",
]


@EACH_TARGET
@pytest.mark.parametrize("body", WHOLE)
def test_the_parts_of_one_purpose_are_ported_together(body: str, target: str) -> None:
    found = port_text(f"import torch\nimport torch.distributed as dist\n\n\n{body}", Settings(target))
    assert [site.text for site in found.sites if not site.safe or site.status.value != "converted"] == []


UNKNOWN = "\n\ndef move(weight):\n    return weight.cuda()\n"
RANDOM = [
    "def f(seed):\n    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []\n"
    f"    with torch.random.fork_rng(devices=devices):\n        if devices:\n            torch.cuda.manual_seed_all(seed)\n{UNKNOWN}",
    "def f(seed):\n    devices = list(range(torch.cuda.device_count()))\n"
    f"    with torch.random.fork_rng(devices):\n        torch.cuda.manual_seed_all(seed)\n{UNKNOWN}",
    "def f(state, index):\n    def set_state():\n        torch.cuda.default_generators[index].set_state(state)\n\n"
    "    torch.cuda._lazy_call(set_state)\n",
]


@EACH_TARGET
@pytest.mark.parametrize("body", RANDOM)
def test_a_seed_stays_with_the_devices_whose_states_are_kept(body: str, target: str) -> None:
    source = f"import torch\n\n\n{body}"
    assert port_text(source, Settings(target)).text == source
