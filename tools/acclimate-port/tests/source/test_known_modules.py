"""What a file shows to be a module or a tensor, so that its move is safe."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH

HEAD = """\
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    pass


"""
KNOWN = [
    "def f(rank: int, model):\n    model = model.cuda(rank)\n    return DDP(model, device_ids=[rank])\n",
    "def f(rank: int, model):\n    return DDP(module=model.cuda(rank), device_ids=[rank])\n",
    "def f(model):\n    model.cuda()\n    return torch.nn.DataParallel(model)\n",
    "def f(model: DDP):\n    return model.cuda()\n",
    "def f(big):\n    make = Net if big else nn.Linear\n    return make().cuda()\n",
    "def f(module: type[nn.Module]):\n    return module().cuda()\n",
    "def f(net: type[Net]):\n    return net().cuda()\n",
    "def f(make, state):\n    model = make()\n    model.load_state_dict(state)\n    model.train()\n    return model.cuda()\n",
    "def f(model: nn.Module):\n    for p in model.parameters():\n        p.data = p.data.cuda()\n",
]


@BOTH
@pytest.mark.parametrize("code", KNOWN)
def test_what_a_wrapper_gets_or_a_class_makes_is_a_module(code: str, target: str) -> None:
    found = port_text(HEAD + code, Settings(target))
    assert ".cuda(" not in found.text
    assert all(one.status is Status.CONVERTED for one in found.sites), found.sites


UNKNOWN = [
    "def f(model):\n    model.cuda()\n    return wrap(model)\n",
    "def f(model):\n    model.cuda()\n    return DDP(other, model)\n",
    "def f(make):\n    return make().cuda()\n",
    "def f(big, other):\n    make = Net if big else other\n    return make().cuda()\n",
    "def f(make: type):\n    return make().cuda()\n",
    "def f(packed: nn.utils.rnn.PackedSequence):\n    return [p.cuda() for p in packed]\n",
]


@BOTH
@pytest.mark.parametrize("code", UNKNOWN)
def test_what_nothing_shows_to_be_a_module_is_unsafe(code: str, target: str) -> None:
    assert Status.UNSAFE in {one.status for one in port_text(HEAD + code, Settings(target)).sites}
