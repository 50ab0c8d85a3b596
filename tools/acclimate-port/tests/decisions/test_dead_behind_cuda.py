"""An edit that can only run after code which ends the program elsewhere is not offered as safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH, EACH_TARGET, ported_project, site, site_of

MOVE = "torch.randn(2, 3).cuda()"
LAZY = "ops = None\n\n\ndef load():\n    global ops\n    if ops is None:\n        ops = cpp_extension.load(name='ops', sources=['a.cu'])\n"
BUILDERS = {
    "at once": "def load():\n    return cpp_extension.load(name='ops', sources=['a.cpp', 'a.cu'])\n",
    "by a function inside": "def load():\n    def one(name, sources):\n        return cpp_extension.load(name=name, sources=sources)\n\n    one('ops', ['a.cu'])\n",
    "the first time": LAZY,
    "through another": f"{LAZY.replace('load()', 'build()')}\n\ndef load():\n    build()\n",
}
OPTIONAL = {
    "for the host too": "def load():\n    return cpp_extension.load(name='ops', sources=['a.cpp'])\n",
    "where CUDA is": "def load():\n    if torch.cuda.is_available():\n        return cpp_extension.load(name='ops', sources=['a.cu'])\n",
    "in a try": "def load():\n    try:\n        return cpp_extension.load(name='ops', sources=['a.cu'])\n    except OSError:\n        return None\n",
}
TEST = f"import torch\nfrom fused import load\n\n\ndef test_softmax():\n    load()\n    x = {MOVE}\n    assert x.sum() < 9\n"


def _built(builder: str, target: str, folder: Path, test: str = TEST) -> Status:
    head = "import torch\nfrom torch.utils import cpp_extension\n\n\n"
    files = {"fused/__init__.py": f"{head}{builder}", "test_softmax.py": test}
    return site(ported_project(folder, files, target)["test_softmax.py"], MOVE).status


@EACH_TARGET
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_device_after_a_build_of_an_extension_for_cuda_is_unsafe(
    kind: str, target: str, tmp_path: Path
) -> None:
    assert _built(BUILDERS[kind], target, tmp_path) is Status.UNSAFE


@pytest.mark.parametrize("kind", OPTIONAL)
def test_a_device_after_a_build_that_may_not_happen_is_safe(kind: str, tmp_path: Path) -> None:
    assert _built(OPTIONAL[kind], "acclimate", tmp_path) is Status.CONVERTED


def test_a_device_before_a_build_is_safe(tmp_path: Path) -> None:
    test = TEST.replace("    load()\n", "").replace("< 9\n", "< 9\n    load()\n")
    assert _built(BUILDERS["at once"], "acclimate", tmp_path, test) is Status.CONVERTED


KERNEL = (
    "import _backend\n\n\nclass Kernel:\n    def forward(self, data):\n        {check}\n"
    "        return _backend.pool_cuda_forward(data)\n"
)
LAYER = "import torch\nfrom kernel import Kernel\n\n\nclass Pool(torch.nn.Module):\n    def forward(self, data):\n        return Kernel().forward(data)\n"
USER = f"import torch\nfrom layer import Pool\n\n\ndef example():\n    return Pool()({MOVE})\n\n\nexample()\n"


@EACH_TARGET
@pytest.mark.parametrize(
    "check", ["if not data.is_cuda:\n            raise TypeError", "assert data.is_cuda"]
)
def test_tensors_for_a_function_that_refuses_others_than_cudas_stay_there(
    check: str, target: str, tmp_path: Path
) -> None:
    files = {"kernel.py": KERNEL.format(check=check), "layer.py": LAYER, "main.py": USER}
    found = site(ported_project(tmp_path, files, target)["main.py"], MOVE)
    assert found.status is Status.UNSAFE
    assert "kernel.py:6" in found.reason


FLAG = (
    "import torch\n\n\ndef setup(args):\n    if args.profile:\n        {call}\n\n\ndef step(args, x):\n"
    '    if args.profile and x.ndim:\n        torch.cuda.nvtx.range_push("step")\n    return x * 2\n'
)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("torch.cuda.cudart().cudaProfilerStart()", Status.UNSAFE),
        ("torch.cuda.memory._record_memory_history()", Status.UNSAFE),
        ("print('on')", Status.CONVERTED),
    ],
)
def test_ranges_under_a_flag_go_with_what_needs_cuda_under_it(call: str, status: Status) -> None:
    ported = port_text(FLAG.format(call=call), Settings("acclimate"))
    assert site_of(ported, "torch.cuda.nvtx.range_push").status is status
    other = FLAG.format(call=call).replace("args.profile and", "args.ranges and")
    assert (
        site_of(port_text(other, Settings("acclimate")), "torch.cuda.nvtx.range_push").status
        is Status.CONVERTED
    )


@BOTH
@pytest.mark.parametrize(
    "call", ["self.scatter(x, y, [{}])", "scatter_kwargs(x, y, [{}])", "replicate(x, ({},))"]
)
def test_the_number_of_a_device_in_a_list_for_a_split_batch_stays(call: str, target: str) -> None:
    number = "torch.cuda.current_device()"
    text = f"import torch\n\n\nclass Wrapped:\n    def forward(self, x, y):\n        return {call.format(number)}\n"
    assert site_of(port_text(text, Settings(target)), number).status is Status.LEFT
    kept = text.replace("self.scatter(", "self.show(").replace("scatter_kwargs(", "show(")
    kept = kept.replace("replicate(", "show(")
    assert site_of(port_text(kept, Settings(target)), number).status is not Status.LEFT


@BOTH
@pytest.mark.parametrize(("name", "status"), [("test_memory", Status.UNSAFE), ("report", Status.CONVERTED)])
def test_a_figure_of_memory_that_a_test_compares_is_unsafe(name: str, status: Status, target: str) -> None:
    text = (
        f"import torch\n\n\ndef {name}(self):\n    def figure():\n        return torch.cuda.memory_allocated(0)\n\n"
        "    first = figure()\n    self.assertEqual(first, figure())\n"
    )
    assert site_of(port_text(text, Settings(target)), "torch.cuda.memory_allocated(0)").status is status


@pytest.mark.parametrize("given", ['"step"', '"step {}", n', '"{n}", n=n'])
def test_a_range_keeps_its_message_and_what_the_message_formats(given: str) -> None:
    text = f"import torch\n\n\ndef step(n):\n    with torch.cuda.nvtx.range({given}):\n        return n\n"
    ported = port_text(text, Settings("acclimate"))
    assert site_of(ported, "torch.cuda.nvtx.range").status is Status.CONVERTED
    assert f"nvtx.range({given}):" in ported.text
