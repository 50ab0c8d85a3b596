"""What cannot be imported without CUDA holds back the devices of all that import it, however many modules away."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.needed_extensions import extensions_built, line_that_needs_cuda
from porting import EACH_TARGET, ported_project, site

MAIN = "import torch\nfrom ops.attend import attend\n\nprint(attend(torch.rand(2).cuda()))\ntorch.cuda.empty_cache()\n"
KERNEL = "import {name} as kernel\n\n\ndef inner(x):\n    return kernel.run(x)\n"
OUTER = "from .inner import inner\n\n\ndef attend(x):\n    return inner(x)\n"
CUDA = 'CUDAExtension("deform_attn", ["a.cu"])'
SETUPS = {
    CUDA: [("deform_attn", True)],
    'CUDAExtension(name="pkg.deform_attn", sources=[])': [("deform_attn", True)],
    'NAME = "deform_attn"\nCUDAExtension(NAME, ["a.cu"])': [("deform_attn", True)],
    'kind = CUDAExtension\nkind(\n    "deform_attn", ["a.cu"])': [("deform_attn", True)],
    'kind = CppExtension\nif cuda:\n    kind = CUDAExtension\nkind("deform_attn", [])': [
        ("deform_attn", False)
    ],
    'kind = CppExtension\nif cuda:\n    kind = CUDAExtension\nelse:\n    raise OSError("no Cuda")\n'
    'kind("deform_attn", [])': [("deform_attn", True)],
    'CppExtension("deform_attn", ["a.cpp"])': [],
    'def make(name, sources):\n    flags = []\n    return CUDAExtension(name=name, sources=sources)\n\n\nmake("deform_attn", [])': [
        ("deform_attn", True)
    ],
}


def test_names_of_extensions_are_found_that_a_variable_holds() -> None:
    head = "from torch.utils.cpp_extension import (\n    CppExtension,\n    CUDAExtension)\n"
    for body, built in SETUPS.items():
        assert [*extensions_built(f"{head}{body}\n".encode())] == built, body


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import deform_attn\n", 1),
        ("import os\nfrom . import deform_attn\n", 2),
        ("from pkg.deform_attn import run\n", 1),
        ("from .xformers import attend\n", 0),
        ("import xformers.ops\n", 1),
        ("try:\n    import deform_attn\nexcept ImportError:\n    deform_attn = None\n", 0),
        ("try:\n    from .lib import deform_attn\nexcept ImportError:\n    import deform_attn\n", 2),
        ("try:\n    import own\nexcept ImportError:\n    import deform_attn\n", 0),
        ("import bitsandbytes\n", 0),
        ('import importlib\nops = importlib.import_module("fused_softmax_cuda")\n', 2),
        ('import importlib\nops = importlib.import_module("deform_attn")\n', 2),
        ('import importlib\nops = importlib.import_module("models.net_cuda")\n', 0),
        ('import importlib\n\n\ndef f():\n    return importlib.import_module("fused_softmax_cuda")\n', 0),
        ('from torch.utils.cpp_extension import load\nops = load("f", sources=["f.cpp", "f.cu"])\n', 2),
        ('from torch.utils.cpp_extension import load\nnames = ["f.cu"]\nops = load("f", sources=names)\n', 3),
        ('from torch.utils.cpp_extension import load\nops = load("f", sources=["f.cpp"])  # .cu\n', 0),
        ('from torch.utils.cpp_extension import load\n\n\ndef f():\n    return load("f", ["f.cu"])\n', 0),
    ],
)
def test_a_module_needs_cuda_by_what_it_imports_or_compiles_in_any_case(source: str, line: int) -> None:
    assert line_that_needs_cuda(source, frozenset({"deform_attn"})) == line


@EACH_TARGET
@pytest.mark.parametrize("name", ["deform_attn", "simple_knn"])
def test_a_module_that_needs_cuda_holds_back_what_imports_it_two_modules_away(
    name: str, target: str, tmp_path: Path
) -> None:
    files = {
        "main.py": MAIN,
        "ops/attend.py": OUTER,
        "ops/inner.py": KERNEL.format(name=name),
        "setup.py": f"from setuptools import setup\nfrom torch.utils.cpp_extension import CUDAExtension\nsetup(ext_modules=[{CUDA}])\n",
    }
    found = ported_project(tmp_path, files, target)["main.py"]
    entry = site(found, "torch.rand(2).cuda()")
    assert entry.status is Status.UNSAFE
    assert "inner.py:1, without which this file cannot be imported" in entry.reason
    assert site(found, "torch.cuda.empty_cache()").status is Status.UNSAFE


@EACH_TARGET
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (
            "def attend(x):\n    from .inner import inner\n    return inner(x)\n",
            KERNEL.format(name="deform_attn"),
        ),
        (
            OUTER,
            "try:\n    import deform_attn\nexcept ImportError:\n    deform_attn = None\n\n\ndef inner(x):\n    return x\n",
        ),
    ],
    ids=["import in a function", "optional import"],
)
def test_an_extension_that_a_program_can_do_without_holds_nothing_back(
    outer: str, inner: str, target: str, tmp_path: Path
) -> None:
    files = {
        "main.py": MAIN,
        "ops/attend.py": outer,
        "ops/inner.py": inner,
        "setup.py": f"from setuptools import setup\nfrom torch.utils.cpp_extension import CUDAExtension\nsetup(ext_modules=[{CUDA}])\n",
    }
    entry = site(ported_project(tmp_path, files, target)["main.py"], "torch.rand(2).cuda()")
    assert "cannot be imported" not in entry.reason


@EACH_TARGET
def test_a_module_with_the_name_of_its_package_is_not_imported_with_the_package(
    target: str, tmp_path: Path
) -> None:
    files = {
        "pkg/__init__.py": "import sys\n",
        "pkg/pkg.py": "import simple_knn\n",
        "pkg/utils/__init__.py": "",
        "pkg/utils/boxes.py": "def attend(x):\n    return x\n",
        "pkg/utils/main.py": MAIN.replace("ops.attend", "pkg.utils.boxes"),
    }
    entry = site(ported_project(tmp_path, files, target)["pkg/utils/main.py"], "torch.rand(2).cuda()")
    assert entry.status is Status.CONVERTED


@pytest.mark.parametrize(
    ("handler", "line"), [("    raise ImportError('install apex')", 2), ("    apex = None", 0)]
)
def test_an_import_is_needed_whose_error_ends_the_program(handler: str, line: int) -> None:
    source = f"try:\n    import apex\nexcept ImportError:\n{handler}\n"
    assert line_that_needs_cuda(source, frozenset()) == line


@EACH_TARGET
@pytest.mark.parametrize(
    ("init", "status"), [("from .ops import run\n", Status.UNSAFE), ("", Status.CONVERTED)]
)
def test_a_module_needs_cuda_if_its_package_imports_what_does(
    init: str, status: Status, target: str, tmp_path: Path
) -> None:
    move = "torch.arange(3).cuda()"
    files = {
        "pkg/__init__.py": init,
        "pkg/ops.py": "import simple_knn\n\n\ndef run(x):\n    return simple_knn.run(x)\n",
        "pkg/tools.py": f"import torch\n\n\ndef grid():\n    return {move}\n",
        "main.py": "from pkg.tools import grid\n\nprint(grid())\n",
    }
    assert site(ported_project(tmp_path, files, target)["pkg/tools.py"], move).status is status
