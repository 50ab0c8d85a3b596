"""Edits leave no second import, no doubled parentheses and no test within the same test."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH, program, reasons


@BOTH
@pytest.mark.parametrize("line", ["import torch.cuda", "import torch.cuda, torch.cuda.amp"])
def test_an_import_of_cuda_goes_where_torch_is_imported_above_it(line: str, target: str) -> None:
    source = f"import os\nimport torch\n{line}\n\nprint(os.name, torch.cuda.current_stream())\n"
    assert port_text(source, Settings(target, unsafe=True)).text.count("import torch\n") == 1


@BOTH
def test_an_import_of_cuda_that_alone_binds_torch_becomes_one_of_torch(target: str) -> None:
    source = "import torch.cuda\n\n\ndef f():\n    torch.cuda.synchronize()\n"
    assert port_text(source, Settings(target)).text.startswith("import torch\n")


@BOTH
def test_a_choice_in_parentheses_leaves_one_pair(target: str) -> None:
    source = program('return device or ("cuda" if torch.cuda.is_available() else "cpu")')
    assert "((" not in port_text(source, Settings(target)).text


def test_a_call_within_the_same_test_gets_no_second_one() -> None:
    source = program(
        "if torch.cuda.is_available():\n    torch.cuda.empty_cache()\n"
        "elif hasattr(torch.mps, 'empty_cache'):\n    torch.mps.empty_cache()"
    )
    assert port_text(source, Settings("torch")).text.count('not in ("cpu", "mps")') == 1


def test_another_run_finds_what_an_edit_wrote_to_be_no_code_for_other_devices() -> None:
    source = program('if "cuda" in device:\n    return 1\ntorch.cuda.empty_cache()')
    once = port_text(source, Settings("torch"))
    twice = port_text(once.text, Settings("torch"))
    assert once.text != source
    assert [(s.text, s.reason) for s in twice.sites] == [
        (s.text, s.reason) for s in once.sites if s.status is not Status.CONVERTED
    ]


@BOTH
def test_a_static_method_cuda_of_a_class_of_the_file_stays_also_unsafely(target: str) -> None:
    source = (
        "import torch\n\n\nclass Q:\n    @staticmethod\n    def cuda(w, device):\n        return w.to(device)\n\n\n"
        "def f(w, device):\n    return Q.cuda(w, device)\n"
    )
    assert port_text(source, Settings(target, unsafe=True)).text == source


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        "return torch.autograd.Variable(x.cuda())",
        "return model.rows().contiguous().cuda()",
        "saved = torch.backends.cudnn.allow_tf32\nreturn saved, y.cuda()",
    ],
)
def test_what_takes_or_gives_tensors_alone_shows_a_tensor(body: str, target: str) -> None:
    found = port_text(program(body), Settings(target))
    assert ".cuda()" not in found.text
    assert not [site for site in found.sites if site.status is Status.LEFT]


@BOTH
@pytest.mark.parametrize("told", ["List[torch.Tensor]", "list[torch.Tensor]", "Sequence[torch.Tensor]"])
def test_the_elements_of_annotated_lists_are_tensors(told: str, target: str) -> None:
    source = f"from typing import List, Sequence\n\nimport torch\n\n\ndef f(xs: {told}):\n    return [x.cuda() for x in xs]\n"
    assert ".cuda()" not in port_text(source, Settings(target)).text


@BOTH
def test_a_docstring_that_speaks_of_a_command_keeps_nothing(target: str) -> None:
    source = (
        'import torch\n\n\ndef f():\n    """As nvidia-smi shows."""\n    return torch.cuda.synchronize()\n'
    )
    assert "torch.cuda" not in port_text(source, Settings(target)).text


@BOTH
@pytest.mark.parametrize("line", ["from distutils import spawn", "from distutils.util import strtobool"])
def test_a_module_of_build_tools_makes_no_build_script_unless_it_builds(line: str, target: str) -> None:
    source = f"{line}\n\nimport torch\n\n\ndef f(x: torch.Tensor):\n    return x.cuda()\n"
    assert ".cuda()" not in port_text(source, Settings(target)).text


CHOOSES_SOURCES = """
import torch

sources = ["src/nms.c"]
if torch.cuda.is_available():
    sources += ["src/nms_cuda.c"]
"""


@BOTH
@pytest.mark.parametrize(
    ("line", "builder"),
    [
        ("from torch.utils.ffi import create_extension", "create_extension('_ext.nms', sources)"),
        ("import torch.utils.ffi as ffi", "ffi.create_extension('_ext.nms', sources)"),
        ("from torch.utils.cpp_extension import CppExtension", "CppExtension('nms', sources)"),
        ("from torch.utils import cpp_extension", "cpp_extension.CUDAExtension('nms', sources)"),
        ("from tools import cuda_extension", "cuda_extension('nms', sources=sources, define_macros=[])"),
        ("from tools import build", "build('nms', sources=sources, with_cuda=torch.cuda.is_available())"),
    ],
)
def test_a_file_that_builds_an_extension_asks_for_cuda_itself(line: str, builder: str, target: str) -> None:
    source = f"{line}\n{CHOOSES_SOURCES}\n\nextension = {builder}\n"
    ported = port_text(source, Settings(target, unsafe=True))
    assert ported.text == source
    assert "a build script" in reasons(ported)


@BOTH
@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils.ffi import _wrap_function",
        "from torch.utils.cpp_extension import load\n\nop = load('op', ['op.cpp'])",
        "from tools import plot\n\nplot(sources=['a', 'b'], title='c')",
    ],
)
def test_a_file_that_builds_nothing_is_ported_beside_such_imports(line: str, target: str) -> None:
    source = f"{line}\n\nimport torch\n\n\ndef f(x: torch.Tensor):\n    return x.cuda()\n"
    assert ".cuda()" not in port_text(source, Settings(target)).text


@BOTH
def test_a_condition_in_a_text_is_reported(target: str) -> None:
    source = (
        'import pytest\n\n\n@pytest.mark.skipif("not torch.cuda.is_available()")\ndef test():\n    pass\n'
    )
    assert reasons(port_text(source, Settings(target))) == "the condition is a text, which no rule converts"


def test_a_line_inside_a_block_of_tabs_is_indented_by_tabs_where_most_of_the_file_has_spaces() -> None:
    spaces = "def f(x):\n  if x:\n    return 1\n  return 2\n\n\n"
    tabs = "def g():\n\ttorch.cuda.synchronize()\n\n\ndef h():\n\tfor i in range(3):\n\t\ttorch.cuda.current_stream().synchronize()\n"
    ported = port_text(f"import torch\n\n\n{spaces}{tabs}", Settings("torch")).text
    assert ":\n\t\ttorch.accelerator.synchronize()\n" in ported
    assert ":\n\t\t\ttorch.get_device_module(" in ported
    assert not any(line.startswith("\t ") for line in ported.splitlines())
