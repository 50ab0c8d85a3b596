"""Properties for any source: other bytes stay, a second run changes nothing, and the result parses."""

import ast
import random
import re
import sys
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
SHAPES = ["{}", "y = {}", "f({}, {})", "if {}:\n    {}", "for i in {}:\n    z = {}", "def g(x=None):\n    return {}", "with {}:\n    pass", "x = ({}\n     )  # why", "@{}\ndef h(): pass",
    "z = ({}) if ({}) else ({})", "torch.nn.DataParallel({})", "x.cuda({})", "torch.zeros(3, device={})", "x.to({})",
    "({}).pin_memory()", "if not ({}):\n    raise ValueError({})", "with torch.autocast('cuda', enabled={}):\n    {}",
    "def k(x):\n    if not ({}):\n        return x\n    return {}", "torch.cuda.manual_seed({})",
]  # fmt: skip


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


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(sources(), st.sampled_from(["acclimate", "torch"]), st.booleans())
def test_what_is_ported_still_parses_and_twice_is_once(source: str, target: str, unsafe: bool) -> None:
    chosen = Settings(target, unsafe=unsafe)
    once = port_text(source, chosen).text
    ast.parse(once)
    assert port_text(once, chosen).text == once
    assert (once.count("\r\n") == once.count("\n")) == (source.count("\r\n") == source.count("\n"))


TOUCHING = [
    "assert {0}", "assert {0}, {0}", "return {0}", "yield {0}", "yield from {0}", "raise {0} from {0}", "del {0}.a",
    "if {0} :\n        pass", "while {0} :\n        pass", "for i in {0} :\n        pass", "with {0} as i:\n        pass",
    "z = not {0}", "z = {0} if {0} else {0}", "z = lambda: {0}", "z = {0} in {0}", "z = {0} not in {0}", "z = {0} is not {0}",
    "z = {0} and {0} or {0}", "z = [ {0} for i in {0} if {0} ]", "print {0}", "z = 'é', {0} if {0} else {0}", "x = {0}",
    "try:\n        pass\n    except {0} as e:\n        pass", "if a:\n        pass\n    elif {0} :\n        pass",
]  # fmt: skip
IN_BRACKETS = [
    "({})",
    "(a if {} else b)",
    "(a if {} else b)[0]",
    "(lambda: {})",
    "(a, {})",
    "({} or a)",
    "[{}]",
    "(not {})",
]


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(
    st.sampled_from(TOUCHING),
    st.sampled_from(IN_BRACKETS),
    st.sampled_from(EXPRESSIONS),
    st.sampled_from(["acclimate", "torch"]),
)
def test_a_keyword_may_touch_a_bracket(shape: str, brackets: str, expression: str, target: str) -> None:
    spaced = f"import torch\n\n\ndef f(x, a, b):\n    {shape.format(brackets.format(expression))}\n"
    touching = re.sub(r" (?=[(\[])|(?<=[)\]]) ", "", spaced)
    try:
        ast.parse(touching)
    except SyntaxError:
        return
    trees = [ast.parse(port_text(one, Settings(target, unsafe=True)).text) for one in (spaced, touching)]
    assert ast.dump(trees[0]) == ast.dump(trees[1])


@settings(max_examples=20, deadline=None)
@given(sources(), st.sampled_from(["acclimate", "torch"]))
def test_lines_without_a_finding_stay_as_they_are(source: str, target: str) -> None:
    result = port_text(source, Settings(target, unsafe=True))
    touched = {line for site in result.sites for line in range(site.line, site.line + 3)}
    after = result.text.splitlines()
    for number, line in enumerate(source.splitlines(), 1):
        if number not in touched:
            assert line in after


def snippets(path: Path) -> list[str]:
    """The functions of a file that name CUDA, each as a program."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return []
    found = [ast.get_source_segment(text, node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f"import torch\n\n\n{part}\n" for part in found if part and "cuda" in part and len(part) < 4000]


def of_installed_packages() -> list[Path]:
    roots = [Path(pytest.importorskip(name).__file__).parent for name in ("torch", "transformers")]
    return [path for root in roots for path in sorted(root.rglob("*.py")) if b"cuda" in path.read_bytes()]


def second_run_changes(source: str) -> bool:
    for target, unsafe in (("acclimate", False), ("acclimate", True), ("torch", False), ("torch", True)):
        chosen = Settings(target, unsafe=unsafe)
        once = port_text(source, chosen).text
        ast.parse(once)
        if port_text(once, chosen).text != once:
            return True
    return False


@pytest.mark.slow
def test_a_second_run_over_functions_of_installed_packages_changes_nothing() -> None:
    folder = Path(pytest.importorskip("accelerate").__file__).parent
    found = [source for path in sorted(folder.rglob("*.py")) for source in snippets(path)]
    chosen = random.Random(3).sample([source for source in found if len(source) < 1200], 6)
    assert [source for source in chosen if second_run_changes(source)] == []


@pytest.mark.slow
def test_a_second_run_over_all_functions_of_installed_packages_changes_nothing() -> None:
    """By hand: thousands of functions."""
    chosen = [source for path in of_installed_packages() for source in snippets(path)]
    assert [source for source in chosen if second_run_changes(source)] == []


def calls_to_port(source: str) -> int:
    """How many Python functions run while a text is ported."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    port_text(source, Settings(unsafe=True))  # caches that later runs share
    sys.setprofile(counted)
    try:
        port_text(source, Settings(unsafe=True))
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "line",
    [
        "a{i} = f(g(h(x{i}.cuda())))\n",
        pytest.param("y = " + "f(" * 15 + "x{i}.cuda()" + ")" * 15 + "\n", marks=pytest.mark.slow),
        "if torch.cuda.is_available():\n    a{i} = x{i}.cuda()\n",
        pytest.param(
            "def f{i}(x):\n    if not torch.cuda.is_available():\n        return x\n    return x.cuda()\n",
            marks=pytest.mark.slow,
        ),
        pytest.param('if device.type == "cuda":\n    a{i} = x{i}.cuda()\n', marks=pytest.mark.slow),
    ],
)
def test_twice_the_lines_take_about_twice_the_work(line: str) -> None:
    def program(count: int) -> str:
        return "import torch\n" + "".join(line.replace("{i}", str(i)) for i in range(count))

    assert calls_to_port(program(50)) < 2.4 * calls_to_port(program(25))


GUARDED = """
def f{i}(x, flag):
    device = "cuda" if flag else "cpu"
    if flag and not torch.cuda.is_available():
        flag = False
    kind = x.device.type
    if kind == "cuda":
        x = f{i}(x.cuda(), device)
    return device
"""
CLASS = """
class C{i}(torch.nn.Module):
    def __init__(self, device="cuda"):
        self.device = device
        self.use_cuda = torch.cuda.is_available()

    def go(self, x):
        if self.use_cuda and self.device == "cuda":
            x = x.cuda()
        return x.to(self.device)
"""
PROGRAMS = {
    "functions with guards and flags": ("import torch\n", GUARDED, ""),
    "one name bound many times": (
        "import torch\n",
        'x = "cuda"\nx = torch.ones(1)\nx = x.cuda()\ng(x)\n',
        "",
    ),
    "one device used at many places": (
        'import torch\nd = "cuda" if torch.cuda.is_available() else "cpu"\n',
        'y{i} = g(x{i}.to(d))\nif d == "cuda":\n    h({i})\n',
        "",
    ),
    "a long chain of elif": (
        "import torch\ndef f(device, x):\n    if not x:\n        return x\n",
        '    elif device == "cuda:{i}" and torch.cuda.is_available():\n        x = x.cuda({i})\n',
        "",
    ),
    "a long list": (
        "import torch\nL = [\n",
        '    "cuda:{i}", "cuda", torch.device("cuda"),\n',
        ']\nfor d in L:\n    if d == "cuda":\n        f(d)\n',
    ),
    "classes with attributes of one name": ("import torch\n", CLASS, ""),
    "a method that classes call": (
        "import torch\nclass A:\n    def f(self, x, use=False):\n        return x.cuda() if use else x\n",
        "    def g{i}(self):\n        return self.f({i}, torch.cuda.is_available())\n",
        "",
    ),
    "one variable of many loops": (
        "import torch\n",
        'for d in ["cpu", "cuda"]:\n    if d == "cuda" and not torch.cuda.is_available():\n        continue\n    go(d)\n',
        "",
    ),
}

LONGEST = {
    "a long chain of elif", "classes with attributes of one name", "a method that classes call",
    "functions with guards and flags", "one variable of many loops", "one name bound many times", "a long list",
}  # fmt: skip
GROW_MORE = {"one name bound many times", "a long chain of elif"}
"""Each read of a name is resolved to each binding, and a branch of a chain is as deep as it is late."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in LONGEST else ()) for kind in PROGRAMS]
)
def test_a_program_of_twice_the_size_takes_about_twice_the_work(kind: str) -> None:
    head, part, end = PROGRAMS[kind]

    def program(count: int) -> str:
        return head + "".join(part.replace("{i}", str(i)) for i in range(count)) + end

    most = 2.7 if kind in GROW_MORE else 2.2
    assert calls_to_port(program(80)) < most * calls_to_port(program(40))


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
