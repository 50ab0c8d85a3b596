"""Names that code computes, or imports as a whole, lead to the code that they mean: it is one decision with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, BOTH, EACH_TARGET, ported_project, site

CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
STAYS = "class Net(torch.nn.Module):\n    def forward(self, x):\n        torch.cuda.cudart()\n        return x.cuda()\n"
PORTED = STAYS.replace("torch.cuda.cudart()", "print(name)").replace(".cuda()", "")
USES = f"def main(name):\n    device = torch.device({CHOICE})\n    return {{}}().to(device)\n"
NAMED = {
    "an attribute by its name": (
        "import models\n",
        "getattr(models, name)",
        {"models.py": "import torch\n\n\n" + STAYS},
    ),
    "the dictionary of a module": (
        "import models\n",
        "models.__dict__[name]",
        {"models.py": "import torch\n\n\n" + STAYS},
    ),
    "the variables of a module": (
        "import models\n",
        "vars(models)[name]",
        {"models.py": "import torch\n\n\n" + STAYS},
    ),
    "a function that looks through its module": (
        "from models import find\n",
        "find(name)",
        {"models.py": f"import torch\n\n\ndef find(name):\n    return globals()[name]\n\n\n{STAYS}"},
    ),
    "a module of a package": (
        "import models\n",
        "getattr(models, name)",
        {"models/__init__.py": "from models.net import Net\n", "models/net.py": "import torch\n\n\n" + STAYS},
    ),
    "all names of a package": (
        "from models import *\n",
        "Net",
        {"models/__init__.py": "from models.net import Net\n", "models/net.py": "import torch\n\n\n" + STAYS},
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", NAMED)
def test_code_that_a_computed_name_may_mean_is_one_decision_with_its_user(
    kind: str, target: str, tmp_path: Path
) -> None:
    head, call, models = NAMED[kind]
    source = f"import torch\n{head}\n\n{USES.format(call)}"
    ported = {name: text.replace(STAYS, PORTED) for name, text in models.items()}
    for folder, files, status in (("a", models, Status.UNSAFE), ("b", ported, Status.CONVERTED)):
        found = ported_project(tmp_path / folder, {"main.py": source, **files}, target)["main.py"]
        assert site(found, CHOICE).status is status


@EACH_TARGET
def test_a_device_that_a_star_imports_is_one_decision_with_the_tests_of_its_name(
    target: str, tmp_path: Path
) -> None:
    for test, status in (
        ("if DEVICE == 'cuda':\n        torch.cuda.cudart()", Status.UNSAFE),
        ("", Status.CONVERTED),
    ):
        files = {
            "settings.py": f"import torch\n\nDEVICE = {CHOICE}\n",
            "main.py": f"import torch\nfrom settings import *\n\n\ndef f(x):\n    {test}\n    return torch.ones(1, device=DEVICE)\n",
        }
        found = ported_project(tmp_path / status.value, files, target)["settings.py"]
        assert site(found, CHOICE).status is status


MARKS = {
    "a mark": "[pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no'))]",
    "a mark in a name": "[pytest.param('cuda', marks=needs)]",
    "marks in a list": "[pytest.param('cuda', marks=[needs])]",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", MARKS)
def test_a_parameter_of_a_test_and_the_mark_that_skips_it_are_one_decision(kind: str, target: str) -> None:
    source = (
        f"import pytest\nimport torch\n\nneeds = pytest.mark.skipif(not {AVAILABLE}, reason='no')\n\n\n"
        f"@pytest.mark.parametrize('device', {MARKS[kind]})\ndef test_f(device):\n    torch.ones(1, device=device)\n"
    )
    if kind == "a mark":
        source = source.replace(f"needs = pytest.mark.skipif(not {AVAILABLE}, reason='no')\n", "")
    assert port_text(source, Settings(target)).text == source
    ported = port_text(source, Settings(target, unsafe=True)).text
    assert "'cuda'" not in ported
    assert AVAILABLE not in ported


UNCALLED = {
    "a condition": "if torch.cuda.is_available:\n        x = x.cpu()",
    "a part of a flag": "x.flag = x.wanted and torch.cuda.is_available",
    "an assertion": "assert torch.cuda.is_available",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", UNCALLED)
def test_a_question_that_is_not_called_is_left(kind: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(x):\n    {UNCALLED[kind]}\n    return x\n"
    ported = port_text(source, Settings(target, unsafe=True))
    assert ported.text == source
    assert "not called" in ported.sites[0].reason


@BOTH
@pytest.mark.parametrize(("question", "answer"), [("is_available", False), ("device_count", 0)])
def test_a_question_that_is_passed_on_answers_for_a_host(question: str, answer: object, target: str) -> None:
    source = f"import torch\n\n\ndef f(ask):\n    return ask(torch.cuda.{question})\n"
    assert port_text(source, Settings(target)).text == source
    text = port_text(source, Settings(target, unsafe=True)).text
    torch = pytest.importorskip("torch", reason="runs ported code")
    acclimate = pytest.importorskip("acclimate", reason="runs ported code")
    space: dict[str, object] = {}
    exec(text, space)
    if torch.accelerator.is_available() and target == "torch":
        pytest.skip("this machine has an accelerator")
    with acclimate.use_accelerator("cpu"):
        assert space["f"](lambda asked: asked()) == answer  # type: ignore[operator]


FORKS = {
    "a name": "n = torch.cuda.device_count()\n    with torch.random.fork_rng(devices=range(n)):\n        pass",
    "two names": "n = torch.cuda.device_count()\n    all_of_them = [*range(n)]\n    with torch.random.fork_rng(all_of_them):\n        pass",
    "a choice in a name": f"held = [torch.cuda.current_device()] if {AVAILABLE} else []\n    with torch.random.fork_rng(devices=held):\n        pass",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", FORKS)
def test_states_are_kept_of_the_type_of_device_that_names_count(kind: str, target: str) -> None:
    source = f"import torch\n\n\ndef f():\n    {FORKS[kind]}\n"
    assert "device_type=" in port_text(source, Settings(target)).text


@EACH_TARGET
@pytest.mark.parametrize(
    "text",
    [
        "'models.' + name",
        "f'models.{name}'",
        "'models.{}'.format(name)",
        "'models.%s' % name",
        "'models.' + name + '.get'",
    ],
)
def test_a_module_in_a_text_that_code_evaluates_is_of_its_program(
    text: str, target: str, tmp_path: Path
) -> None:
    files = {
        "models/__init__.py": "from .own import build\n",
        "models/own.py": "def build():\n    return lambda x: x + make(x).cuda()\n",
        "main.py": f"import models\nimport torch\n\n\ndef main(name):\n    net = eval({text})()\n"
        "    return net(torch.zeros(3).cuda())\n",
    }
    found = site(ported_project(tmp_path, files, target)["main.py"], "torch.zeros(3).cuda()")
    assert found.status is Status.UNSAFE, found
    assert "own.py:2" in found.reason
