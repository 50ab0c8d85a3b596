"""What wraps a whole model trains on any device: DataParallel, DistributedDataParallel, SyncBatchNorm."""

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from porting import ported_once_for_all

TARGETS = pytest.mark.parametrize("target", ["acclimate", "torch"])
Pair = namedtuple("Pair", "left right")


def module_of(source: str, target: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "ported"}
    exec(ported_once_for_all(source, target), space)
    return space


WRAPS = "import torch\n\n\ndef wrap(model):\n    return torch.nn.DataParallel(model)\n"


class Where(torch.nn.Module):
    """Says on which devices its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, device="meta"))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return inputs, options


@TARGETS
def test_a_ported_data_parallel_moves_its_inputs_to_the_models_device(target: str) -> None:
    model = module_of(WRAPS, target)["wrap"](Where())
    assert type(model) is torch.nn.DataParallel  # as programs test it before they look for `.module`
    x = torch.ones(2)
    (a, b, c, d), options = model(x, [x, (x, 1)], Pair(x, None), OrderedDict(k=x), mask=x, flag=True)
    assert {each.device.type for each in (a, b[0], b[1][0], c.left, d["k"], options["mask"])} == {"meta"}
    assert type(c) is Pair
    assert c.right is None
    assert options["flag"] is True


@TARGETS
def test_a_ported_data_parallel_has_torchs_names_and_can_be_copied_and_saved(target: str) -> None:
    model = module_of(WRAPS, target)["wrap"](torch.nn.Linear(2, 2))
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.module.bias += 1
    torch.testing.assert_close(other(torch.ones(1, 2)), model(torch.ones(1, 2)) + 1)


@TARGETS
@pytest.mark.parametrize(
    ("line", "wrapped"),
    [
        ("m = torch.nn.DataParallel(m, device_ids=[0]).cuda()", "on_any_device(torch.nn.DataParallel(m, device_ids=[0])).to("),
        ("m = P(m.cuda())", "on_any_device(P(m.to("),
        ("m = Sub(m)", "on_any_device(Sub(m))"),
    ],
)  # fmt: skip
def test_every_way_to_make_a_data_parallel_is_ported(line: str, wrapped: str, target: str) -> None:
    source = (
        "import torch\nfrom torch.nn.parallel import DataParallel as P\n\n\nclass Sub(P):\n    pass\n\n\n"
        f"def f(m):\n    {line}\n    return isinstance(m, P)\n"
    )
    assert wrapped in ported_once_for_all(source, target)


@TARGETS
@pytest.mark.parametrize(
    "source",
    [
        "import torch\n\n\nclass Own(torch.nn.DataParallel):\n    def scatter(self, *a):\n        return a\n\n\nm = Own(x)\n",
        "from torch.nn.parallel import data_parallel\n\n\ndef f(m, x):\n    if x.is_cuda:\n        return data_parallel(m, x)\n",
        "from torch.nn.parallel import scatter, replicate\n\n\ndef f(m, x):\n    return replicate(m, [0]), scatter(x, [0])\n",
        "from torch.nn.parallel import DataParallel\n\n\ndef f(m):\n    return type(m) is DataParallel\n",
    ],
)
def test_ways_to_share_a_batch_that_only_torch_on_cuda_has_stay(source: str, target: str) -> None:
    assert ported_once_for_all(source, target) == source
