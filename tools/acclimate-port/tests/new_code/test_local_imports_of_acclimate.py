"""The import of acclimate goes where the file imports torch: a file that needs no torch needs no acclimate."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH, ported_project

IMPORT = "from acclimate import get_accelerator"


def ported(source: str, *, unsafe: bool = False) -> str:
    settings = Settings("acclimate", unsafe=unsafe)
    once = port_text(textwrap.dedent(source), settings).text
    assert port_text(once, settings).text == once
    return once


def imports_acclimate(text: str) -> list[str]:
    """The lines that import acclimate, each with the line before it."""
    lines = text.splitlines()
    return [f"{lines[i - 1]}|{line}" for i, line in enumerate(lines) if IMPORT in line]


IN_FUNCTIONS = {
    "each function": (
        "def f():\n    import torch\n    return torch.cuda.is_available()\n\n\n"
        "def g(n):\n    import torch\n    return torch.empty(n, device='cuda')\n\n\n"
        "def h():\n    import torch\n    return torch.ones(1)\n",
        ["    import torch|    " + IMPORT] * 2,
    ),
    "a try": (
        "def f():\n    try:\n        import torch\n        return torch.cuda.is_available()\n"
        "    except ImportError:\n        return False\n",
        ["        import torch|        " + IMPORT],
    ),
    "a try before it": (
        "def f():\n    try:\n        import torch\n    except ImportError:\n        return False\n"
        "    return torch.cuda.is_available()\n",
        ["        import torch|        " + IMPORT],
    ),
    "a branch": (
        "def f(use):\n    if use:\n        import torch as th\n        return th.cuda.is_available()\n    return False\n",
        ["        import torch as th|        " + IMPORT],
    ),
    "a function around it": (
        "def f(n):\n    import torch\n\n    def g():\n        return torch.empty(n, device='cuda')\n\n    return g\n",
        ["    import torch|    " + IMPORT],
    ),
    "a branch for type checkers beside it": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import torch\n\n\n"
        "def f() -> 'torch.Tensor':\n    import torch\n    return torch.ones(1, device='cuda')\n",
        ["    import torch|    " + IMPORT],
    ),
    "many uses": (
        "def f(x):\n    if x:\n        import torch\n        torch.cuda.synchronize()\n        torch.cuda.synchronize()\n"
        "    else:\n        import torch\n        torch.cuda.synchronize()\n        torch.cuda.synchronize()\n",
        ["        import torch|        " + IMPORT] * 2,
    ),
}


@pytest.mark.parametrize("kind", IN_FUNCTIONS)
def test_a_function_that_imports_torch_imports_acclimate_beside_it(kind: str) -> None:
    source, expected = IN_FUNCTIONS[kind]
    text = ported(source)
    assert imports_acclimate(text) == expected
    assert "torch.cuda" not in text


OF_MODULES = {
    "if": "if find_spec('torch'):\n    import torch\n    import torch.nn as nn\n",
    "try": "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
    "two blocks": "try:\n    import torch\n    HAS = True\nexcept ImportError:\n    HAS = False\n\n"
    "if HAS:\n    from torch import nn\n",
}


@pytest.mark.parametrize("kind", OF_MODULES)
def test_a_module_that_may_go_without_torch_imports_acclimate_in_the_same_block(kind: str) -> None:
    source = f"{OF_MODULES[kind]}\n\ndef f():\n    return torch.cuda.is_available()\n"
    found = imports_acclimate(ported(source))
    assert len(found) == 1
    before, own = found[0].split("|")
    assert before.startswith("    import torch")
    assert own == f"    {IMPORT}"


def test_tests_that_are_skipped_without_torch_are_skipped_without_it_too() -> None:
    source = (
        "import pytest\n\ntorch = pytest.importorskip('torch')\n\n\ndef test():\n"
        "    assert torch.ones(1, device='cuda').sum() == 1\n"
    )
    assert imports_acclimate(ported(source)) == [f"torch = pytest.importorskip('torch')|{IMPORT}"]


ELSEWHERE = "def f():\n    import torch\n    return torch.cuda.synchronize()\n\n\ndef g():\n    device = 'cuda'\n    return device\n"


def test_code_that_no_import_of_torch_precedes_is_unsafe_and_gets_one_of_the_module() -> None:
    sites = port_text(ELSEWHERE, Settings("acclimate")).sites
    assert [one.status for one in sites] == [Status.CONVERTED, Status.UNSAFE]
    assert imports_acclimate(ported(ELSEWHERE)) == [f"    import torch|    {IMPORT}"]
    assert ported(ELSEWHERE, unsafe=True).startswith(IMPORT)


def test_code_on_the_line_of_the_import_is_not_edited() -> None:
    assert imports_acclimate(ported("def f():\n    import torch; return torch.cuda.is_available()\n")) == []
    assert imports_acclimate(ported("def f(): import torch; return torch.cuda.is_available()\n")) == []


def test_an_import_that_is_there_is_used() -> None:
    source = (
        f"def f():\n    import torch\n    {IMPORT}\n    get_accelerator().synchronize()\n"
        "    return torch.cuda.is_available()\n\n\ndef g():\n    import torch\n    return torch.cuda.is_available()\n"
    )
    assert imports_acclimate(ported(source)) == [f"    import torch|    {IMPORT}"] * 2


def test_the_added_functions_import_acclimate_themselves() -> None:
    source = "def f(net, ids):\n    import torch\n    return torch.nn.DataParallel(net, device_ids=ids)\n"
    text = ported(source, unsafe=True)
    assert "on_any_device(" in text
    assert text.startswith("def "), text
    space: dict[str, object] = {}
    exec(compile(text, "ported", "exec"), space)  # an import of either package would fail at the head
    assert text.count(IMPORT) == text.count("get_accelerator()") == 2


BUILD = {
    "setup.py": "from setuptools import setup\n\nfrom ops.utils import has_cuda\n\nhas_cuda()\nsetup(name='x')\n",
    "ops/__init__.py": "",
    "ops/utils.py": "def has_cuda():\n    import torch\n    return torch.cuda.is_available()\n",
    "ops/other.py": "def has_gpu():\n    import torch\n    return torch.cuda.is_available()\n",
}
FORMS = [
    "from ops.utils import has_cuda",
    "from ops import utils",
    "import ops.utils as u",
    "from .ops.utils import *",
]


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_a_build_script_imports_stays(form: str, target: str, tmp_path: Path) -> None:
    files = {**BUILD, "setup.py": f"from setuptools import setup\n\n{form}\n\nsetup(name='x')\n"}
    results = ported_project(tmp_path, files, target)
    assert [one.status for one in results["ops/utils.py"].sites] == [Status.LEFT]
    assert [one.status for one in results["ops/other.py"].sites] == [Status.CONVERTED]
