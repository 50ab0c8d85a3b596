"""A program whose tensors come to an extension or a process that takes only CUDA's keeps its device."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.cuda_tensors import given_to_cuda
from porting import EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
LOADED = "import torch\nfrom torch.utils.cpp_extension import load\n\nfused = load('fused', sources=['a.cpp', 'a.cu'])\n\n\n"
IN_TRY = (
    "import torch\nfrom torch.utils.cpp_extension import load\n\ntry:\n    fused = load('fused', sources=['a.cpp', 'a.cu'])\n"
    "except OSError:\n    fused = None\n\n\n"
)
LAZY = (
    "import torch\nfrom torch.utils.cpp_extension import load\n\n\ndef kernels():\n"
    "    return load('fused', sources=['a.cpp', 'a.cu'])\n\n\n"
)
IMPORTED = (
    "import torch\n\ntry:\n    from mine import _C as fused\nexcept ImportError:\n    fused = None\n\n\n"
)
BY_CLASS = f"{IN_TRY}class Act(torch.autograd.Function):\n    def forward(self, x):\n        return fused.act(x)\n\n\n"
HOST = "torch.nn.functional.leaky_relu(x)"

BESIDE_HOST = {
    "a branch that returns": f"{IMPORTED}def act(x):\n    if x.device.type == 'cpu':\n        return {HOST}\n    return fused.act(x)\n",
    "an else": f"{IMPORTED}def act(x):\n    if x.is_cpu:\n        y = {HOST}\n    else:\n        y = fused.act(x)\n    return y\n",
    "a negated test": f"{IMPORTED}def act(x):\n    if not x.is_cpu:\n        return fused.act(x)\n    return {HOST}\n",
    "another device than the host": (
        f"{IMPORTED}def act(x):\n    if x.device != torch.device('cpu'):\n        return fused.act(x)\n    return {HOST}\n"
    ),
    "a function of torch's": f"{BY_CLASS}def act(x):\n    return {HOST} if x.device.type == 'cpu' else Act.apply(x)\n",
    "a function that builds": LAZY.replace("return load", "global fused\n    fused = load")
    + f"def act(x):\n    if x.device.type == 'cpu':\n        return {HOST}\n    kernels()\n    return fused.act(x)\n",
    "an import in the branch": (
        f"import torch\n\n\ndef act(x):\n    if x.device.type == 'cpu':\n        return {HOST}\n"
        "    import act_cuda\n\n    return act_cuda.forward(x)\n"
    ),
}
ON_ANY = {
    "a test for the extension": (
        f"{IMPORTED}def act(x):\n    if x.device.type == 'cpu' or fused is None:\n        return {HOST}\n    return fused.act(x)\n"
    ),
    "a test for CUDA": f"{IMPORTED}def act(x):\n    if x.is_cuda:\n        return fused.act(x)\n    return {HOST}\n",
    "the extension on both sides": (
        f"{IMPORTED}def act(x):\n    if x.is_cpu:\n        return fused.act_on_host(x)\n    return fused.act(x)\n"
    ),
    "no extension": f"import torch\n\n\ndef act(x):\n    if x.is_cpu:\n        return {HOST}\n    return x.relu()\n",
    "settings": (
        "import torch\nfrom config.defaults import _C\n\n\ndef act(x):\n    if x.device.type == 'cpu':\n        return x\n"
        "    return x * _C.SCALE\n"
    ),
}

START = "import torch\nimport torch.multiprocessing as mp\n\n\ndef main(net, q, device, work):\n"
SENT = {
    "a shared model": "    net = net.to(device)\n    net.share_memory()\n",
    "a shared tensor": "    x = torch.zeros(3).cuda().share_memory_()\n",
    "a model that another statement moves": "    net.cuda()\n    net.share_memory()\n",
    "an argument of a process": "    net.to(device)\n    mp.Process(target=work, args=(0, net))\n",
    "an argument of spawned processes": "    x = torch.zeros(3, device=device)\n    mp.spawn(work, nprocs=2, args=(x,))\n",
    "a tensor in a queue": "    q.put(torch.zeros(3).to(device).detach())\n",
}
NOT_SENT = {
    "a model of the host": "    net.share_memory()\n    net = net.to(device)\n".replace(
        "net = net", "own = net"
    ),
    "a model that goes to the host": "    net = net.to('cpu')\n    net.share_memory()\n",
    "a model in another type": "    net = net.to(torch.float16)\n    net.share_memory()\n",
    "a device": "    mp.spawn(work, nprocs=2, args=(device,))\n",
    "a number in a queue": "    q.put(net.to(device)(3).item())\n",
}


@pytest.mark.parametrize("kind", BESIDE_HOST)
def test_an_extension_is_found_behind_a_test_for_the_host(kind: str) -> None:
    assert [*given_to_cuda(BESIDE_HOST[kind])] == ["act"]


def test_a_module_that_builds_an_extension_when_it_is_imported_is_found_whole() -> None:
    text = f"{LOADED}class Net:\n    pass\n\n\ndef act(x):\n    return fused.act(x)\n"
    assert given_to_cuda(text) == dict.fromkeys(("Net", "act", "<module>"), 4)
    assert given_to_cuda(text.replace("a.cu", "a.cc")) == {}
    assert given_to_cuda(text.replace(LOADED, IN_TRY)) == {}


@pytest.mark.parametrize("kind", ON_ANY)
def test_code_that_other_accelerators_pass_by_is_no_such_test(kind: str) -> None:
    assert given_to_cuda(ON_ANY[kind]) == {}


def test_an_extension_that_the_project_builds_is_known_by_its_name() -> None:
    text = BESIDE_HOST["an else"].replace("_C as fused", "ops as fused")
    assert given_to_cuda(text) == {}
    assert [*given_to_cuda(text, frozenset({"ops"}))] == ["act"]


@pytest.mark.parametrize("kind", SENT)
def test_what_another_process_gets_from_the_device_is_found(kind: str) -> None:
    assert [*given_to_cuda(START + SENT[kind], spawns=True)] == ["main"]


@pytest.mark.parametrize("kind", NOT_SENT)
def test_what_another_process_gets_from_elsewhere_is_not_found(kind: str) -> None:
    assert given_to_cuda(START + NOT_SENT[kind], spawns=True) == {}


def test_a_copy_of_the_process_gets_no_tensor() -> None:
    assert given_to_cuda(START + SENT["an argument of a process"]) == {}


@EACH_TARGET
def test_a_program_is_held_back_by_an_operator_of_another_file(target: str, tmp_path: Path) -> None:
    files = {
        "ops.py": BESIDE_HOST["a branch that returns"],
        "main.py": f"import torch\nfrom ops import act\n\nact(torch.ones(3, device={CHOICE}))\n",
    }
    found = site(ported_project(tmp_path, files, target)["main.py"], CHOICE)
    assert found.status is Status.UNSAFE
    assert "ops.py:10" in found.reason


@EACH_TARGET
@pytest.mark.parametrize("workers", ["0", "args.workers"])
def test_a_dataset_on_the_device_is_held_back_if_workers_get_it(
    workers: str, target: str, tmp_path: Path
) -> None:
    move = "torch.ones(3).cuda()"
    files = {
        "data.py": "import torch\n\n\nclass Own(torch.utils.data.Dataset):\n    def __init__(self):\n"
        f"        self.weights = {move}\n",
        "main.py": f"import torch\nfrom data import Own\n\nloader = torch.utils.data.DataLoader(Own(), num_workers={workers})\n",
    }
    found = site(ported_project(tmp_path, files, target)["data.py"], move)
    assert found.status is (Status.CONVERTED if workers == "0" else Status.UNSAFE), found


PACKAGES = {
    "imported in a function": "def use(x):\n    from apex import amp\n    return amp.initialize(x)\n",
    "tried at import": "try:\n    import cupy\nexcept ImportError:\n    cupy = None\n\n\ndef use(x):\n    return cupy.asarray(x)\n",
    "for NVIDIA's driver": "import pynvml\n\n\ndef use(x):\n    pynvml.nvmlInit()\n    return x\n",
    "with all names": "from pynvml import *\n\n\ndef use(x):\n    nvmlInit()\n    return x\n",
    "with kernels": "from numba import cuda\n\n\n@cuda.jit\ndef fill(x):\n    x[0] = 1\n\n\ndef use(x):\n    fill[1, 1](x)\n",
}
OPTIONAL_PACKAGES = {
    "by an answer": "try:\n    import cupy\nexcept ImportError:\n    cupy = None\n\n\ndef use(x):\n    return cupy.asarray(x) if cupy else x\n",
    "by a flag": "def use(x, fused=False):\n    if fused:\n        from apex import amp\n        x = amp.initialize(x)\n    return x\n",
    "after a return": "try:\n    import cupy\nexcept ImportError:\n    cupy = None\n\n\ndef use(x):\n    if cupy is None:\n        return x\n"
    "    return cupy.asarray(x)\n",
    "in a try": "def use(x):\n    try:\n        from apex import amp\n        return amp.initialize(x)\n    except ImportError:\n        return x\n",
    "compiled for the host": "import numba\n\n\n@numba.njit\ndef fill(x):\n    x[0] = 1\n\n\ndef use(x):\n    fill(x)\n",
}
TAKER = f"import torch\nfrom lib import use\n\nprint(use(torch.zeros(3).to({CHOICE})))\n"


@EACH_TARGET
@pytest.mark.parametrize("kind", PACKAGES)
def test_a_device_goes_with_a_package_for_cuda_that_another_file_needs(
    kind: str, target: str, tmp_path: Path
) -> None:
    found = site(
        ported_project(tmp_path, {"lib.py": PACKAGES[kind], "main.py": TAKER}, target)["main.py"], CHOICE
    )
    assert found.status is Status.UNSAFE


@pytest.mark.parametrize("kind", OPTIONAL_PACKAGES)
def test_a_device_is_safe_beside_a_package_for_cuda_that_another_file_may_use(
    kind: str, tmp_path: Path
) -> None:
    files = {"lib.py": OPTIONAL_PACKAGES[kind], "main.py": TAKER}
    assert site(ported_project(tmp_path, files, "acclimate")["main.py"], CHOICE).status is Status.CONVERTED
