"""An edit does on CUDA and on a host what the old code did, and on another accelerator what CUDA did.

What the tool evaluates without running anything is compared with programs that run on three fake machines.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from acclimate_port.conditions.worlds import CUDA, HOST, OTHER, Difference, differences
from acclimate_port.engine import Ported, Settings, Status, port_text
from acclimate_port.rules import RULES, Rule
from machines import Machine, Outcome, Tensor, run
from porting import BOTH

NAMES = {"torch": "torch", "get_accelerator": "get_accelerator", "accelerator_type": "accelerator_type"}
PAIRS = [("CUDA", "CUDA"), ("HOST", "HOST"), ("CUDA", "OTHER")]
CONDITIONS = [
    'device == "cuda"', '"cuda" in device', 'device.startswith("cuda")', 'device != "cuda"', '"cuda" not in device',
    'device == "cuda" or flag', 'flag and not device == "cuda"', 'device in ("cuda", "cpu")', 'device == "cuda:1"',
    "torch.cuda.is_available()", "not torch.cuda.is_available()", "torch.cuda.is_available() and flag",
    "flag or torch.cuda.is_available()", "torch.cuda.device_count() > 1", "torch.cuda.device_count() == 0",
    "not torch.cuda.device_count()", "torch.cuda.is_available() and torch.cuda.device_count() >= 2",
    "torch.cuda.is_available() and torch.cuda.is_bf16_supported()", "torch.device(device).type == 'cuda'",
    'device == "cuda" and torch.cuda.is_available()', "x.is_cuda", "x.is_cuda and flag", "not x.is_cuda",
    'x.device.type == "cuda"', 'x.device.type != "cuda"', 'x.device == torch.device("cuda")',
    'torch.device("cuda").type == x.device.type and flag', 'device == "cuda" and not torch.cuda.is_available()',
    'x.device.type == torch.device("cuda").type and not torch.cuda.is_available()',
    'device != "cuda" or not torch.cuda.is_available()', 'impl == "cuda" and torch.cuda.is_available()',
]  # fmt: skip
VALUES = [
    '"cuda" if torch.cuda.is_available() else "cpu"', '"cuda:0" if torch.cuda.is_available() and flag else "cpu"',
    "torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32",
    'torch.device("cuda" if torch.cuda.is_available() else "cpu")', '"cuda" if device == "cuda" else "cpu"',
    '"nccl" if torch.distributed.is_nccl_available() else "gloo"', "torch.cuda.device_count()",
    '"fast" if x.is_cuda else "slow"', '"cpu" if not torch.cuda.is_available() else "cuda"',
]  # fmt: skip


def cases(machine: str, device: str, flag: bool) -> dict[str, object]:
    """Arguments for one case; ``device`` is a role: the accelerator, its second device, or the CPU."""
    kind = Machine(machine).type
    said = {"own": kind, "own:1": f"{kind}:1" if kind != "cpu" else "cpu", "cpu": "cpu"}[device]
    return {"device": said, "flag": flag, "impl": said, "x": lambda here: Tensor(here, said)}


def executed(before: str, after: str) -> set[str]:
    """The machines on which the new program does something else, over all cases."""
    found: set[str] = set()
    for first, second in PAIRS:
        for device, flag in itertools.product(("own", "own:1", "cpu"), (False, True)):
            call = "f(device, flag, impl, x)"
            old = run(before, first, call, cases(first, device, flag))
            new = run(after, second, call, cases(second, device, flag))
            if not old.error and old != new.renamed(second if second == "OTHER" else "CUDA"):
                found.add(second)
    return found


def titles(found: list[Difference]) -> set[str]:
    """The machines of differences."""
    return {{CUDA: "CUDA", HOST: "HOST", OTHER: "OTHER"}[difference.world] for difference in found}


@BOTH
@pytest.mark.parametrize("condition", CONDITIONS + VALUES)
def test_a_safe_edit_does_the_same_when_it_is_run(condition: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(device, flag, impl, x: torch.Tensor):\n    return {condition}\n"
    safe, unsafe = (port_text(source, Settings(target, unsafe=both)) for both in (False, True))
    assert executed(source, safe.text) <= untouched(safe)
    differs = executed(source, unsafe.text)
    assert differs <= {"HOST"} | untouched(unsafe), unsafe.text
    assert "HOST" not in differs or "host" in " ".join(site.reason for site in unsafe.sites), unsafe.text


def untouched(ported: Ported) -> set[str]:
    """The machine on which code that stays still asks for CUDA."""
    return {"OTHER"} if any(site.status is not Status.CONVERTED for site in ported.sites) else set()


@BOTH
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_branch_is_taken_where_it_was_taken_before(condition: str, target: str) -> None:
    source = (
        "import torch\n\n\ndef f(device, flag, impl, x: torch.Tensor):\n"
        f"    if {condition}:\n        return taken(1)\n    return passed(2)\n"
    )
    ported = port_text(source, Settings(target, unsafe=True))
    assert executed(source, ported.text) <= untouched(ported), ported.text


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("torch.cuda.is_available()", "get_accelerator().is_available()", {"HOST"}),
        ("torch.cuda.is_available()", 'get_accelerator().device_name() != "cpu"', set()),
        ('device == "cuda"', "device == get_accelerator().device_name()", {"HOST"}),
        ('device == "cuda"', "device == accelerator_type() and accelerator_type() != 'cpu'", set()),
        ('x.device.type == "cuda"', 'x.device.type == "cpu"', {"CUDA", "HOST", "OTHER"}),
        ("torch.cuda.device_count() > 1", "torch.accelerator.device_count() > 1", set()),
        ("torch.cuda.is_available() and flag", "flag", {"HOST"}),
        ("not torch.cuda.is_available()", "not torch.cuda.is_available()", {"OTHER"}),
        ("flag", "not flag", {"CUDA", "HOST", "OTHER"}),
    ],
)
def test_what_is_evaluated_is_what_a_run_gives(old: str, new: str, expected: set[str]) -> None:
    heads = "import torch\nfrom acclimate import get_accelerator\n\n\n"
    helper = "def accelerator_type():\n    d = torch.accelerator.current_accelerator(check_available=True)\n"
    helper += '    return "cpu" if d is None else d.type\n\n\n'
    texts = [
        f"{heads}{helper}def f(device, flag, impl, x):\n    return bool({text})\n" for text in (old, new)
    ]
    assert titles(differences(old, new, NAMES, as_test=True)) == expected
    assert executed(texts[0], texts[1]) == expected


def called(source: str, machine: str) -> list[Outcome]:
    """What an example does when it is imported, and when its functions are called with tensors and numbers."""
    tree = ast.parse(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and len(node.name) == 1]
    found = [run(source, machine)] if not functions else []
    for function in functions:
        values = []
        for argument in function.args.args:
            is_number = argument.arg in ("rank", "n", "i", "gpu", "enabled", "on", "no_cuda", "fast")
            is_tensor = argument.annotation is not None and "torch" in ast.unparse(argument.annotation)
            kind = f'"{Machine(machine).type}"'
            values.append(
                "1" if is_number else "torch.ones(1)" if is_tensor or argument.arg in "xm" else kind
            )
        if any(word in ast.unparse(function) for word in ("device.type", "device in")):
            values = [value if not value.startswith('"') else f"torch.device({value})" for value in values]
        found.append(run(f"{source}\nimport torch\n", machine, f"{function.name}({', '.join(values)})"))
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_examples_of_each_rule_do_the_same_when_they_are_run(rule: Rule) -> None:
    for example, target in itertools.product(rule.examples, rule.targets):
        source = example.before
        ported = port_text(source, Settings(target))
        after = ported.text
        for first, second in [pair for pair in PAIRS if pair[1] not in untouched(ported)]:
            for old, new in zip(called(source, first), called(after, second), strict=False):
                is_usable = first != "HOST" or "cuda" not in old.result
                if not old.error and is_usable:
                    assert new.error in ("", "AttributeError"), after  # a name that the fake machine lacks
                    if not new.error:
                        kind = "OTHER" if second == "OTHER" else "CUDA"
                        assert new.renamed(kind).result == old.result, after


def conditions_of(path: Path) -> list[str]:
    """The conditions of a file that name CUDA."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    tests = [
        node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert))
    ]
    texts = (ast.unparse(test) for test in tests)
    return [text for text in texts if re.search(r"cuda", text) and len(text) < 200]


@pytest.mark.slow
def test_conditions_of_installed_packages_keep_their_branches() -> None:
    """By hand: thousands of conditions, each ported and run on three machines."""
    roots = [Path(pytest.importorskip(name).__file__).parent for name in ("torch", "transformers")]
    found = {
        text
        for path in itertools.chain.from_iterable(root.rglob("*.py") for root in roots)
        if b"cuda" in path.read_bytes()
        for text in conditions_of(path)
    }
    wrong: list[str] = []
    looked_at = changed = 0
    for condition, target in itertools.product(sorted(found), ("acclimate", "torch")):
        source = f"import torch\n\n\ndef f(device, flag, impl, x):\n    return bool({condition})\n"
        looked_at += 1
        ported = port_text(source, Settings(target, unsafe=True))
        if ported.text == source:
            continue
        changed += 1
        hosts = {"HOST"} if any("host" in site.reason for site in ported.sites) else set()
        differs = executed(source, ported.text)
        if not differs <= hosts | untouched(ported):
            wrong.append(f"{target}: {condition}")
    counts = f"{looked_at} conditions, {changed} changed, {len(wrong)} wrong"
    assert looked_at > 1000, counts
    assert not wrong, counts
