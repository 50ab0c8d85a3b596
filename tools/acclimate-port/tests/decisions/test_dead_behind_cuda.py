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
    "for the host too": "def load():\n    return cpp_extension.load(name='ops', sources=['a.cpp'])\n",
    "where CUDA is": "def load():\n    if torch.cuda.is_available():\n        return cpp_extension.load(name='ops', sources=['a.cu'])\n",
    "in a try": "def load():\n    try:\n        return cpp_extension.load(name='ops', sources=['a.cu'])\n    except OSError:\n        return None\n",
}
TEST = f"import torch\nfrom fused import load\n\n\ndef test_softmax():\n    load()\n    x = {MOVE}\n    assert x.sum() < 9\n"


def _built(builder: str, target: str, folder: Path) -> Status:
    head = "import torch\nfrom torch.utils import cpp_extension\n\n\n"
    files = {"fused/__init__.py": f"{head}{builder}", "test_softmax.py": TEST}
    return site(ported_project(folder, files, target)["test_softmax.py"], MOVE).status


@EACH_TARGET
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_device_beside_a_build_of_an_extension_is_unsafe(kind: str, target: str, tmp_path: Path) -> None:
    assert _built(BUILDERS[kind], target, tmp_path) is Status.UNSAFE


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


STAYS = "torch.cuda.synchronize(torch.device('cuda', 1))"
"""A wait that is unsafe beside a library for CUDA, and raises on other machines."""
AFTER = {
    "in the same block": ("    {}\n    torch.cuda.empty_cache()\n", True),
    "in a block after it": ("    {}\n    for _ in x:\n        torch.cuda.empty_cache()\n", True),
    "after a block that surely runs": (
        "    with torch.no_grad():\n        {}\n    torch.cuda.empty_cache()\n",
        True,
    ),
    "before it": ("    torch.cuda.empty_cache()\n    {}\n", False),
    "after a branch": ("    if x is None:\n        {}\n    torch.cuda.empty_cache()\n", False),
    "after what may not run": ("    x is None or {}\n    torch.cuda.empty_cache()\n", False),
    "where the error is caught": (
        "    try:\n        {}\n    except RuntimeError:\n        pass\n    torch.cuda.empty_cache()\n",
        False,
    ),
}


@BOTH
@pytest.mark.parametrize("kind", AFTER)
def test_what_runs_only_after_a_call_that_needs_cuda_stays_with_it(kind: str, target: str) -> None:
    body, is_dead = AFTER[kind]
    text = f"import cupy\nimport torch\n\n\ndef f(x):\n{body.format(STAYS)}"
    found = site_of(port_text(text, Settings(target)), "torch.cuda.empty_cache()")
    assert found.status is (Status.UNSAFE if is_dead else Status.CONVERTED)
    assert ("runs before it" in found.reason) == is_dead


MEASURE = (
    "import torch\n\n\ndef figures():\n    return torch.cuda.memory_allocated({device})\n\n\n"
    "def measure(f):\n    torch.cuda.empty_cache()\n    {call}\n    torch.cuda.synchronize()\n    return {figure}\n"
)


@BOTH
@pytest.mark.parametrize(
    ("call", "figure", "waits", "frees"),
    [
        ("f()", "figures()", Status.UNSAFE, Status.CONVERTED),
        ("f()", "torch.cuda.memory_allocated(f.device)", Status.UNSAFE, Status.CONVERTED),
        ("torch.cuda.reset_peak_memory_stats(f.device)", "1", Status.UNSAFE, Status.UNSAFE),
        ("f()", "1", Status.CONVERTED, Status.CONVERTED),
    ],
)
def test_the_calls_of_a_measurement_stay_with_its_figures(
    call: str, figure: str, waits: Status, frees: Status, target: str
) -> None:
    text = MEASURE.format(call=call, figure=figure, device="measure.device")
    ported = port_text(text, Settings(target))
    assert site_of(ported, "torch.cuda.synchronize()").status is waits
    assert site_of(ported, "torch.cuda.empty_cache()").status is frees


@BOTH
@pytest.mark.parametrize(
    ("use", "status"),
    [("torch.cuda.memory_allocated(device)", Status.UNSAFE), ("torch.zeros(3).to(device)", Status.CONVERTED)],
)
def test_a_device_stays_with_the_figures_that_get_it(use: str, status: Status, target: str) -> None:
    text = (
        "import torch\n\n\ndef show(number, device=None):\n    if device is None:\n"
        f"        device = torch.device('cuda', number)\n    print({use})\n"
    )
    assert site_of(port_text(text, Settings(target)), "torch.device('cuda', number)").status is status


TOOLS = {
    "at once": ("subprocess.check_output(['nvidia-smi', '-L'])", Status.UNSAFE),
    "where CUDA is": (
        "subprocess.check_output(['nvidia-smi']) if torch.cuda.is_available() else b''",
        Status.CONVERTED,
    ),
    "another tool": ("subprocess.check_output(['nproc'])", Status.CONVERTED),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", TOOLS)
def test_a_device_after_a_function_that_runs_nvidias_tools_is_unsafe(
    kind: str, target: str, tmp_path: Path
) -> None:
    run, status = TOOLS[kind]
    lib = f"import subprocess\n\nimport torch\n\n\ndef count():\n    return len({run})\n"
    choice = '"cuda" if torch.cuda.is_available() else "cpu"'
    main = f"import torch\nfrom lib import count\n\nnumber = count()\nx = torch.zeros(number).to({choice})\n"
    found = ported_project(tmp_path, {"lib.py": lib, "main.py": main}, target)["main.py"]
    assert site(found, choice).status is status


@EACH_TARGET
@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("torch.cuda.get_device_capability(device)[0] >= 8", Status.UNSAFE),
        ("torch.cuda.get_device_properties(device).name", Status.CONVERTED),
        ("torch.cuda.get_device_capability(0)[0] >= 8", Status.CONVERTED),
    ],
)
def test_a_device_goes_with_a_call_of_another_file_that_gets_it_and_stays(
    call: str, status: Status, target: str, tmp_path: Path
) -> None:
    lib = f"import torch\n\n\ndef ask(device):\n    return {call}\n"
    choice = '"cuda" if torch.cuda.is_available() else "cpu"'
    main = f"import torch\nfrom lib import ask\n\ndevice = torch.device({choice})\nprint(ask(device), torch.zeros(3).to(device))\n"
    found = ported_project(tmp_path, {"lib.py": lib, "main.py": main}, target)["main.py"]
    assert site(found, choice).status is status


@BOTH
@pytest.mark.parametrize(
    ("moved", "status"),
    [
        ("model.to('cuda')", Status.UNSAFE),
        ("torch.zeros(3, device='cuda')", Status.UNSAFE),
        ("torch.load('a', map_location='cuda')", Status.CONVERTED),
        ("print('cuda')", Status.CONVERTED),
    ],
)
def test_what_runs_only_after_a_move_to_cuda_stays_with_it(moved: str, status: Status, target: str) -> None:
    text = f"import apex\nimport torch\n\n\ndef f(model):\n    {moved}\n    torch.cuda.empty_cache()\n"
    assert site_of(port_text(text, Settings(target)), "torch.cuda.empty_cache()").status is status
