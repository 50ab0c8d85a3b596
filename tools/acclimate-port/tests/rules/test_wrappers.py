"""What wraps a whole model trains on any device: DataParallel, DistributedDataParallel, SyncBatchNorm."""

import copy
import textwrap
import types
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, ported_once_for_all, ported_project, site

torch = pytest.importorskip("torch", reason="runs ported code")

TARGETS = pytest.mark.parametrize("target", ["acclimate", "torch"])
Pair = namedtuple("Pair", "left right")


def module_of(source: str, target: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "ported"}
    exec(ported_once_for_all(source, target), space)
    return space


@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_the_data_parallel_of_torch_geometric_is_reported_as_left(target: str) -> None:
    source = (
        "import torch\nfrom torch_geometric.nn import DataParallel\n\n\n"
        "def build(model):\n    return DataParallel(model)\n"
    )
    ported = port_text(source, Settings(target, unsafe=True))
    assert ported.text == source
    assert [(site.code, site.status) for site in ported.sites] == [("ACC506", Status.LEFT)]


@TARGETS
def test_a_subclass_of_data_parallel_in_another_file_holds_back_the_test_around_it(target: str) -> None:
    source = (
        "import torch\nfrom batchnorm import DataParallelWithCallback\n\n\n"
        "def build(model):\n"
        "    if torch.cuda.is_available():\n        model = DataParallelWithCallback(model)\n    return model\n"
    )
    ported = port_text(source, Settings(target, unsafe=True))
    assert ported.text == source
    assert {(site.code, site.status) for site in ported.sites} == {
        ("ACC101", Status.LEFT),
        ("ACC506", Status.LEFT),
    }


@TARGETS
def test_a_file_that_imports_torch_in_a_function_can_be_imported_without_it(target: str) -> None:
    source = "def build(model):\n    import torch\n    return torch.nn.DataParallel(model)\n"
    space = module_of(source, target)
    assert "torch" not in space
    hook, batch = space["_move_inputs"], torch.ones(2)
    (moved,), options = hook(torch.nn.Linear(1, 1), (batch,), {})
    assert torch.equal(moved, batch)
    assert options == {}


class Batch(dict):  # type: ignore[type-arg]
    """A batch with names."""


@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_data_parallel_moves_what_torch_would_and_keeps_its_types(target: str) -> None:
    space: dict[str, Any] = {}
    exec(port_text(WRAPS, Settings(target)).text, space)
    for module in (torch.nn.Linear(2, 2, device="meta"), torch.nn.MSELoss()):
        parallel = torch.nn.DataParallel(module)
        (batch,), options = space["_move_inputs"](parallel, (Batch(x=torch.ones(1)),), {"n": [torch.ones(1)]})
        expected = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        assert type(batch) is Batch
        assert (batch["x"].device, options["n"][0].device) == (expected, expected)


@pytest.mark.parametrize("target", ["acclimate", "torch"])
def test_data_parallel_is_unsafe_where_the_file_reads_its_devices(target: str) -> None:
    source = f"{WRAPS}\n\ndef many(model):\n    return len(model.device_ids) > 1\n"
    assert "on_any_device" not in port_text(source, Settings(target)).text
    assert "on_any_device" in port_text(source, Settings(target, unsafe=True)).text


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
    ported = module_of(WRAPS, target)
    ported["accelerator_type"] = lambda: "meta"
    ported["get_accelerator"] = lambda: types.SimpleNamespace(device_name=lambda: "meta")
    model = ported["wrap"](Where())
    assert type(model) is torch.nn.DataParallel  # as programs test it before they look for `.module`
    x = torch.ones(2)
    (a, b, c, d), options = model(x, [x, (x, 1)], Pair(x, None), OrderedDict(k=x), mask=x, flag=True)
    assert {tensor.device.type for tensor in (a, b[0], b[1][0], c.left, d["k"], options["mask"])} == {"meta"}
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


OPTIONS = [
    "options = {'device_ids': [rank], 'find_unused_parameters': True}\nm = DDP(m, **options)",
    "options = dict(device_ids=[rank])\nm, other = DDP(m, **options), DDP(m, **options)",
    "options = {}\nif args.many:\n    options['device_ids'] = [rank]\nm = DDP(m, **options)",
    "options = {}\noptions.update(device_ids=[rank])\nm = DDP(m, **options)",
    "options = {}\noptions.update({'device_ids': [rank]})\nm = DDP(m, **options)",
    "m = DDP(m, **{'device_ids': [rank]})",
    "m = DDP(m, [rank])",
    "wrap = functools.partial(DDP, device_ids=[rank])\nm = wrap(m)",
]


@TARGETS
@pytest.mark.parametrize("lines", OPTIONS)
def test_device_ids_are_none_on_a_host_however_they_are_given(lines: str, target: str) -> None:
    body = lines.replace("\n", "\n    ")
    source = (
        "import functools\n\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
        f"def f(m, rank, args):\n    {body}\n    return m\n"
    )
    text = ported_once_for_all(source, target)
    host = (
        "torch.accelerator.is_available()"
        if target == "torch"
        else 'get_accelerator().device_name() != "cpu"'
    )
    assert text.count(f"[rank] if {host} else None") == 1


NOT_TORCHS = [
    "from megatron.model import DistributedDataParallel as LocalDDP\n\nm = LocalDDP(m, args.in_fp32, args.contiguous)\n",
    "from .model import DistributedDataParallel\n\nm = DistributedDataParallel(m, args.in_fp32)\n",
    "from ..torch.nn.parallel import DDP\n\nm = DDP(m, args.in_fp32)\n",
    "from apex.parallel import DistributedDataParallel as D\n\nm = D(m, args.message, args.delay)\n",
    "import apex\n\nm = apex.parallel.DistributedDataParallel(m, 10000, True)\n",
    "import mylib\n\nmylib.barrier(device_ids=[0])\nmylib.init_process_group(device_id=device)\n",
    "import mylib\n\nm = mylib.DDP(m, device_ids=[0], output_device=0)\n",
    "class DDP:\n    def __init__(self, *given):\n        pass\n\n\nm = DDP(m, 1, True)\n",
    "class DDP(nn.Module):\n    pass\n\n\nm = DDP(m, device_ids=[0])\n",
    "import mylib\n\nD = mylib.parallel\nm = D.DistributedDataParallel(m, a, b)\n",
    "def barrier(device_ids):\n    pass\n\n\nbarrier(device_ids=[0])\n",
    # No import tells whose it is, so what an argument means by its place is not known.
    "from mylib import *\n\nm = DDP(m, [rank])\n",
    "try:\n    from apex.parallel import DistributedDataParallel as DDP\nexcept ImportError:\n"
    "    from torch.nn.parallel import DistributedDataParallel as DDP\n\nm = DDP(m, args.a)\n",
    "from mylib import DataParallel\n\nm = DataParallel(m, device_ids=[0])\n",
    "try:\n    from mylib import P\nexcept ImportError:\n    class P(nn.DataParallel):\n        pass\n\nm = P(m)\n",
]


@TARGETS
@pytest.mark.parametrize("lines", NOT_TORCHS)
def test_a_class_or_function_that_only_has_the_name_of_torchs_stays(lines: str, target: str) -> None:
    source = f"import torch\nfrom torch import nn\n{lines}"
    assert ported_once_for_all(source, target) == source


@TARGETS
@pytest.mark.parametrize(
    ("lines", "is_safe"),
    [
        ("DDP = torch.nn.parallel.DistributedDataParallel\nm = DDP(m, {})\n", True),
        ("class DDP(torch.nn.parallel.DistributedDataParallel):\n    pass\nm = DDP(m, {})\n", True),
        (
            "def f(m):\n    from torch.nn.parallel import DistributedDataParallel as D\n    m = D(m, {})\n",
            True,
        ),
        ("from mylib import *\nm = DDP(m, device_ids={})\n", False),
        ("def f(m, DDP):\n    m = DDP(m, device_ids={})\n", False),
    ],
)
def test_device_ids_are_edited_where_the_class_is_torchs_and_unsafe_where_nothing_tells(
    lines: str, is_safe: bool, target: str
) -> None:
    source = "import torch\n" + lines.format("[rank]")
    sites = [site for site in port_text(source, Settings(target)).sites if site.code == "ACC502"]
    assert [site.safe for site in sites] == [is_safe]
    assert "[rank] if " in ported_once_for_all(source, target)


SYNC = """
import torch
from torch import nn


def build(norm=None, many=True):
    kind = nn.SyncBatchNorm if many else nn.BatchNorm2d
    layers = nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8, eps=1e-3), kind(8), make(norm=nn.SyncBatchNorm)
    return [each for each in layers if isinstance(each, nn.SyncBatchNorm)]


def make(norm):
    return norm(4)
"""


@TARGETS
def test_a_synchronised_norm_that_is_made_directly_is_an_ordinary_one_on_a_host(target: str) -> None:
    text = ported_once_for_all(SYNC, target)
    assert text.count("torch.nn.BatchNorm2d)") == 3
    assert "isinstance(each, nn.SyncBatchNorm)" in text


@TARGETS
def test_a_synchronised_norm_of_unknown_dimensions_is_left_with_a_reason(target: str) -> None:
    source = "from torch import nn\n\n\ndef f():\n    return nn.SyncBatchNorm(8)\n"
    ported = port_text(source, Settings(target, unsafe=True))
    assert ported.text == source
    assert "raises on a CPU" in ported.sites[0].reason


OWN_CONVERSIONS = [
    """
    class SyncWithAct(nn.SyncBatchNorm):
        pass

    def convert(m, group=None):
        return SyncWithAct(8) if m.act else nn.SyncBatchNorm(8, eps=m.eps)
    """,
    """
    def convert(m, group=None):
        made = m
        if isinstance(m, torch.nn.modules.batchnorm._BatchNorm):
            made = nn.SyncBatchNorm(m.num_features, m.eps)
        for name, child in m.named_children():
            made.add_module(name, convert(child))
        return made
    """,
    """
    def convert(m, group=None):
        made = torch.nn.SyncBatchNorm(m.num_features)
        made.running_mean = m.running_mean
        return made
    """,
    """
    from mine import SyncBatchNormAct

    def convert(m, group=None):
        return SyncBatchNormAct(8) if m.act else nn.SyncBatchNorm(8)
    """,
    """
    def make(group):
        return nn.SyncBatchNorm(8, 1e-5, 0.1, True, True, group)
    """,
    """
    def make(*given):
        return nn.SyncBatchNorm(*given)
    """,
]


@TARGETS
@pytest.mark.parametrize("source", OWN_CONVERSIONS)
def test_a_programs_own_conversion_to_synchronised_norms_is_left_as_a_whole(source: str, target: str) -> None:
    text = "import torch\nfrom torch import nn\n\nfirst = nn.Conv2d(3, 8, 3)\n" + textwrap.dedent(source)
    assert ported_once_for_all(text, target) == text


INDEXES = [
    "d = 0 if torch.cuda.is_available() else -1",
    "d = -1 if not torch.cuda.is_available() else gpu",
    "d = gpu if torch.cuda.is_available() and gpu else -1",
    "if torch.cuda.is_available():\n    d = 0\nelse:\n    d = -1",
    "d = -1\nif torch.cuda.is_available():\n    d = 0",
    "found = torch.cuda.is_available()\nd = 0 if found else -1",
]


@pytest.mark.parametrize("lines", INDEXES)
def test_an_index_of_minus_one_still_stands_for_the_host(lines: str) -> None:
    source = "import torch\n\n\ndef f(gpu=0):\n    " + lines.replace("\n", "\n    ") + "\n    return d\n"
    text = ported_once_for_all(source, "acclimate")
    assert "is_available" not in text
    assert 'device_name() != "cpu"' in text or 'device_name() == "cpu"' in text


@TARGETS
def test_a_barrier_keeps_its_devices_which_every_backend_takes(target: str) -> None:
    source = "import torch\n\n\ndef f(rank):\n    torch.distributed.barrier(device_ids=[rank])\n"
    found = port_text(source, Settings(target, unsafe=True))
    assert found.text == source
    assert not found.sites


@TARGETS
def test_what_goes_with_an_argument_that_is_taken_out_is_not_called_left(target: str) -> None:
    source = "import torch\n\nx = torch.utils.data.DataLoader(d, pin_memory_device='cuda')\n"
    found = port_text(source, Settings(target, unsafe=True))
    assert "DataLoader(d)" in found.text
    assert {site.status for site in found.sites} == {Status.CONVERTED}


@EACH_TARGET
def test_a_wrapper_whose_devices_another_file_reads_is_unsafe(target: str, tmp_path: Path) -> None:
    files = {
        "train.py": "import torch\nimport data\nimport net\n\nmodel = torch.nn.DataParallel(net.Net())\ndata.infer(model)\n",
        "net.py": "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x\n",
        "data.py": "import torch\n\n\ndef infer(model):\n    return model(torch.ones(1).to(model.device_ids[0]))\n",
    }
    wrapped = "torch.nn.DataParallel(net.Net())"
    found = site(ported_project(tmp_path, files, target)["train.py"], wrapped)
    assert found.status is Status.UNSAFE
    assert "data.py:5 reads the devices of a wrapped model" in found.reason
    files["data.py"] = files["data.py"].replace("model.device_ids", "args.device_ids")
    assert site(ported_project(tmp_path, files, target)["train.py"], wrapped).status is Status.CONVERTED


MADE = "import torch\nfrom nets import Net\n\n\ndef f(x):\n    model = torch.nn.DataParallel(Net(){})\n    {}\n    return model(x)\n"


@EACH_TARGET
@pytest.mark.parametrize(
    ("move", "use", "is_safe"),
    [
        ("", "pass", False),
        (".cuda()", "pass", True),
        ("", "model.cuda()", True),
        ("", "prepare(model)", True),
    ],
)
def test_a_model_that_only_data_parallel_moves_would_stay_on_the_host(
    move: str, use: str, is_safe: bool, target: str
) -> None:
    sites = port_text(MADE.format(move, use), Settings(target)).sites
    assert [one.safe for one in sites if one.code == "ACC506"] == [is_safe], sites


ALONE = """\
import torch

model = Net()
if flag:
    model = torch.nn.DataParallel(model)
    model.load_state_dict(state)
    model = model.module
{use}
"""


@EACH_TARGET
@pytest.mark.parametrize(
    ("use", "is_safe"),
    [
        ("print(model(torch.ones(1)))", False),
        ("model.to(place)", True),
        ("train(model)", True),
        ("torch.set_default_device(place)", True),
    ],
)
def test_a_model_that_is_wrapped_and_never_moved_stays_where_it_is(
    use: str, is_safe: bool, target: str
) -> None:
    sites = port_text(ALONE.format(use=use), Settings(target)).sites
    assert [one.safe for one in sites if one.code == "ACC506"] == [is_safe], sites


@TARGETS
@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu"])
def test_a_layer_that_exchanges_its_statistics_is_made_only_where_torch_runs_it(
    kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import torch\n\n\ndef f(m):\n    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n"
    space = module_of(source, target)
    if target == "acclimate":
        space["get_accelerator"] = lambda: types.SimpleNamespace(device_name=lambda: kind)
        is_made = kind == "xpu"
    else:  # torch has no process group for Apple's GPUs, so the model trains alone there
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind != "cpu")
        is_made = kind != "cpu"
    made = space["f"](torch.nn.Sequential(torch.nn.BatchNorm1d(2)))[0]
    assert isinstance(made, torch.nn.SyncBatchNorm) == is_made
