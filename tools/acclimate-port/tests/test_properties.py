"""Properties for any source: other bytes stay, a second run changes nothing, and the result parses."""

import ast
import random
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate_port.engine import Settings, port_text
from acclimate_port.source.tree import Tree

HEADS = [
    "import torch",
    "import torch as th\nimport torch",
    "from torch.cuda import amp\nimport torch",
    "import os",
]
EXPRESSIONS = [
    "torch.cuda.synchronize()", "torch.cuda.current_device()", 'x.to("cuda")', "x.cuda(rank, non_blocking=True)",
    'torch.device("cuda", rank)', 'f"cuda:{rank}"', "x.cuda().half().cuda()", "torch.cuda.max_memory_allocated(device=0)",
    'torch.device("cuda:1" if torch.cuda.is_available() else "cpu")', "x.is_cuda and y.is_cuda", "a.pin_memory()",
    'd.type == "cuda"', '"cuda" in device', '{"cuda": x.cuda()}', "torch.cuda.amp.autocast(True)", "'nccl'",
    "torch.cuda.FloatTensor([1.0])", "print('é', x.cuda())", "[t.cuda() for t in xs]", "torch.load(p, map_location='cuda')",
    "torch.cuda.cudart()", "getattr(torch.cuda, 'x')", "(lambda: torch.cuda.empty_cache())", "x.to(torch.cuda.current_device())",
]  # fmt: skip
SHAPES = ["{}", "y = {}", "f({}, {})", "if {}:\n    {}", "for i in {}:\n    z = {}", "def g(x=None):\n    return {}", "with {}:\n    pass", "x = ({}\n     )  # why", "@{}\ndef h(): pass"]  # fmt: skip


@st.composite
def sources(draw: st.DrawFn) -> str:
    lines = [draw(st.sampled_from(HEADS))]
    for shape in draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6)):
        filled = shape
        while "{}" in filled:
            filled = filled.replace("{}", draw(st.sampled_from(EXPRESSIONS)), 1)
        lines.append(filled)
        lines.append(draw(st.sampled_from(["", "# cuda", "\n\n", "class A:\n\tb = 'cuda'"])))
    ends = draw(st.sampled_from(["\n", "\r\n"]))
    return ends.join("\n".join(lines).split("\n")) + draw(st.sampled_from(["", ends]))


@settings(max_examples=40, deadline=None)
@given(sources(), st.sampled_from(["acclimate", "torch"]), st.booleans())
def test_what_is_ported_still_parses_and_twice_is_once(source: str, target: str, unsafe: bool) -> None:
    chosen = Settings(target, unsafe=unsafe)
    once = port_text(source, chosen).text
    ast.parse(once)
    assert port_text(once, chosen).text == once
    assert (once.count("\r\n") == once.count("\n")) == (source.count("\r\n") == source.count("\n"))


@settings(max_examples=20, deadline=None)
@given(sources(), st.sampled_from(["acclimate", "torch"]))
def test_lines_without_a_finding_stay_as_they_are(source: str, target: str) -> None:
    result = port_text(source, Settings(target, unsafe=True))
    touched = {line for site in result.sites for line in range(site.line, site.line + 3)}
    after = result.text.splitlines()
    for number, line in enumerate(source.splitlines(), 1):
        if number not in touched:
            assert line in after


def crash_test(path: Path) -> None:
    try:
        text = path.read_bytes().decode()
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return
    assert Tree(text).module.code == text, path
    for target in ("acclimate", "torch"):
        ast.parse(port_text(text, Settings(target, unsafe=True)).text)


def installed() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    return sorted((folder / "concurrent").rglob("*.py"))


def test_files_of_the_standard_library_are_read_whole() -> None:
    for path in random.Random(1).sample(installed(), 3):
        crash_test(path)


@pytest.mark.slow
def test_every_file_of_torch_is_ported_without_a_crash() -> None:
    torch = pytest.importorskip("torch")
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    hopeful = [path for path in files if b"cuda" in path.read_bytes()]
    for path in random.Random(2).sample(hopeful, min(150, len(hopeful))):
        crash_test(path)
