"""A program's device is safe only if all code that it runs is known to follow torch's devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.survey import Survey
from acclimate_port.source.unknown_code import unknown_code
from porting import AVAILABLE, EACH_TARGET, ported_project, site

CHOICE = f"'cuda' if {AVAILABLE} else 'cpu'"
MAIN = "import torch\n{head}\n\n\ndef main(x):\n    torch.manual_seed(1)\n    torch.cuda.manual_seed_all(1)\n    device = {choice}\n    return {use}\n\n\nmain(torch.ones(2))\n"
KNOWN = {
    "torch's package": ("import timm", "timm.create_model('m').to(device)(x.to(device))"),
    "a package of the host": ("import numpy", "numpy.ones(2) * x.to(device).cpu().numpy()"),
    "Python": ("import random", "x.to(device) * random.random()"),
    "the project": ("from net import Net", "Net().to(device)(x.to(device))"),
    "a module of the project's package": ("from parts.layer import Layer", "Layer().to(device)"),
    "an operator of torch": ("", "torch.ops.aten.relu(x.to(device))"),
    "code of torch's hub": ("", "torch.hub.load('pytorch/vision', 'resnet18').to(device)"),
    "a model without code of its own": (
        "from transformers import AutoModel",
        "AutoModel.from_pretrained('own', trust_remote_code=False).to(device)",
    ),
    "a generated module": ("from parts._version import version", "print(version, x.to(device))"),
}
UNKNOWN = {
    "what it moves": ("import graphs", "graphs.load('g')[0].to(device)"),
    "what gets the device": ("import graphs", "graphs.run(device=device)"),
    "what gets a tensor": ("import graphs", "graphs.run(x.to(device))"),
    "a base class": (
        "import graphs\n\n\nclass Net(graphs.Module):\n    pass",
        "Net().to(device)",
    ),
    "an entry of a table": ("import graphs\n\nRUN = {'a': graphs.run}", "RUN['a'](x.to(device))"),
    "a name in an annotation": ("import graphs\n\nx: graphs.Graph", "x.to(device)"),
    "all names of a package": ("from graphs import *", "run(x.to(device))"),
    "an import in a function": (
        "def run(x):\n    import graphs\n    return graphs.run(x)",
        "run(x.to(device))",
    ),
    "an import that may fail": (
        "try:\n    import graphs\nexcept ImportError:\n    graphs = None",
        "graphs.run(x.to(device)) if graphs else x.to(device)",
    ),
    "a compiled module": ("from parts import _C", "_C.run(x.to(device))"),
    "a compiled module in a folder": ("from csrc.fast import run", "run(x.to(device))"),
    "an operator of the project's own": ("", "torch.ops.own.run(x.to(device))"),
    "code of a hub": ("", "torch.hub.load('own/code', 'net').to(device)"),
    "a compiled model": ("from torch import jit", "jit.load('net.pt', map_location=device)(x.to(device))"),
    "an extension": (
        "from glob import glob\n\nfrom torch.utils.cpp_extension import load",
        "load('fast', sources=glob('*.c*')).run(x.to(device))",
    ),
    "code of a model's authors": (
        "from transformers import AutoModel",
        "AutoModel.from_pretrained('own', trust_remote_code=True).to(device)",
    ),
    "an operator by another name": ("from torch import ops", "ops.own.run(x.to(device))"),
    "another file": ("from helper import run", "run(x.to(device))"),
}
FILES = {
    "net.py": "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x\n",
    "parts/__init__.py": "",
    "parts/layer.py": "import torch\n\n\nclass Layer(torch.nn.Module):\n    pass\n",
    "csrc/setup_fast.py": "print('builds fast')\n",
    "helper.py": "import graphs\n\n\ndef run(x):\n    return graphs.run(x)\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", [*KNOWN, *UNKNOWN])
def test_a_device_is_safe_where_all_code_of_its_program_is_known(
    kind: str, target: str, tmp_path: Path
) -> None:
    head, use = KNOWN.get(kind) or UNKNOWN[kind]
    files = {"main.py": MAIN.format(head=head, use=use, choice=CHOICE), **FILES}
    found = ported_project(tmp_path, files, target)["main.py"]
    choice = site(found, CHOICE)
    assert choice.status is (Status.CONVERTED if kind in KNOWN else Status.UNSAFE), choice
    assert ("nothing shows that" in choice.reason) == (kind in UNKNOWN), choice
    # A seed is right wherever the program computes.
    assert site(found, "torch.cuda.manual_seed_all(1)").status is Status.CONVERTED


@EACH_TARGET
def test_code_that_one_program_alone_runs_makes_no_other_unsafe(target: str, tmp_path: Path) -> None:
    files = {
        "one.py": MAIN.format(head="import graphs", use="graphs.run(x.to(device))", choice=CHOICE),
        "two.py": MAIN.format(head="", use="x.to(device)", choice=CHOICE),
    }
    found = ported_project(tmp_path, files, target)
    statuses = [site(found[name], CHOICE).status for name in ("one.py", "two.py")]
    assert statuses == [Status.UNSAFE, Status.CONVERTED]


def test_the_first_line_of_each_function_with_unknown_code_is_found() -> None:
    text = "import graphs\n\n\ndef f():\n    return graphs\n\n\ndef g():\n    return 1\n\n\nclass A:\n    held = graphs.A\n"
    assert unknown_code(text, Survey()) == {"<module>": 1, "f": 5, "A": 13}


def test_an_extension_that_the_project_builds_is_unknown_also_where_a_module_has_its_name() -> None:
    known = Survey(modules=frozenset({"fast"}), with_code=frozenset({"fast"}), built=frozenset({"fast"}))
    assert unknown_code("from fast import run\n", known) == {"<module>": 1}
    assert unknown_code("from .fast import run\n", known) == {}


def test_a_folder_named_like_a_known_package_and_settings_of_such_a_name_are_known() -> None:
    known = Survey(modules=frozenset({"torch", "pkg", "config"}), with_code=frozenset({"config"}))
    assert unknown_code("from torch.distributed.run import get_args_parser\n", known) == {}
    assert unknown_code("from pkg.config import _C as cfg\n", known) == {}


def test_a_file_that_this_python_cannot_parse_has_none() -> None:
    assert unknown_code("import graphs\nprint graphs\n", Survey()) == {}
