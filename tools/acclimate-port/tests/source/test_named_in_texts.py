"""A module, class or script that a program names in a text, and imports or runs by it, is a part of the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from acclimate_port.source.named_in_texts import Names, Text
from acclimate_port.source.outline import outline
from porting import EACH_TARGET, ported_project, site

MADE = "torch.zeros(n).cuda()"
PART = f"import torch\n\n\nclass Part:\n    def make(self, n):\n        return {MADE}\n"
KEPT = "\n\ndef move(x):\n    return x.cuda()\n"
"""What stays in the file of a program, since nothing shows that it is a tensor."""
BUILD = "import importlib\n\n\ndef build(name):\n    return getattr(importlib.import_module({}), 'Part')()\n"
COMPUTED = {
    "an f-string": 'f"parts.{name}"',
    "a sum": '"parts." + name',
    "a format": '"parts.{}".format(name)',
    "an old format": '"parts.%s" % name',
    "a join": '".".join(["parts", name])',
    "a part of a name": 'f"parts.the_{name}"',
    "a file's name": '("parts/" + name).replace("/", ".")',
    "a keyword": '"." + name, package="parts"',
    "a name by its word": 'name="parts." + name',
}
IMPORTS = {
    **{kind: {"main.py": BUILD.format(text)} for kind, text in COMPUTED.items()},
    "a name": {
        "main.py": "from importlib import import_module\n\n\ndef build(name):\n    module = f'parts.{name}'\n"
        "    return import_module(module).Part()\n"
    },
    "a table of computed names": {
        "main.py": "import importlib\n\nPARTS = {}\nfolder = 'parts'\n\n\ndef enter(name):\n"
        "    PARTS[name] = f'{folder}.{name}'\n\n\ndef build(name):\n"
        "    return importlib.import_module(PARTS[name]).Part()\n"
    },
    "the function of Python": {"main.py": "def build(name):\n    return __import__(f'parts.{name}')\n"},
    "the modules in a folder": {
        "parts/__init__.py": "import os\nfrom importlib import import_module\n\n\ndef load():\n"
        "    return [import_module(f'{__name__}.{one[:-3]}') for one in os.listdir(__path__[0])]\n",
        "main.py": "from parts import load\n",
    },
    "a table of modules": {
        "main.py": "import importlib\n\nPARTS = {'one': 'parts.the_one'}\n\n\ndef build(name):\n"
        "    return importlib.import_module(PARTS[name]).Part()\n"
    },
    "a table of classes": {
        "main.py": "from build import construct\n\nPARTS = {'one': 'parts.the_one.Part'}\n\n\ndef build(name):\n"
        "    return construct(PARTS[name])\n",
        "build.py": "import importlib\n\n\ndef construct(name):\n    module, kind = name.rsplit('.', 1)\n"
        "    return getattr(importlib.import_module(module), kind)()\n",
    },
    "an entry point": {"main.py": "import gym\n\ngym.register(id='one', entry_point='parts.the_one:Part')\n"},
    "a command": {"main.py": "import os\n\nos.system('python parts/the_one.py')\n"},
    "a list of arguments": {
        "main.py": "import subprocess\nimport sys\n\nsubprocess.run([sys.executable, 'parts/the_one.py'])\n"
    },
    "a module to run": {
        "main.py": "import subprocess\n\nsubprocess.run('python -m parts.the_one', shell=True)\n"
    },
    "a factory in another file": {
        "main.py": "from build import build\n\nPART = build('one')\n",
        "build.py": BUILD.format("f'parts.the_{name}'"),
    },
}


ANY_NAME = "a table of classes"


def project(kind: str, kept: str) -> dict[str, str]:
    files = {"parts/the_one.py": PART, **IMPORTS[kind]}
    return {**files, "main.py": files["main.py"] + kept}


@EACH_TARGET
@pytest.mark.parametrize("kind", IMPORTS)
def test_what_a_text_imports_is_not_ported_without_the_program(
    kind: str, target: str, tmp_path: Path
) -> None:
    found = site(ported_project(tmp_path, project(kind, KEPT), target)["parts/the_one.py"], MADE)
    assert found.status is Status.UNSAFE
    assert "main.py:" in found.reason


@EACH_TARGET
@pytest.mark.parametrize("kind", [one for one in IMPORTS if one != ANY_NAME])
def test_what_a_text_imports_is_ported_with_the_program(kind: str, target: str, tmp_path: Path) -> None:
    files = project(kind, KEPT.replace("(x)", "(x: torch.Tensor)"))
    results = ported_project(tmp_path, {**files, "main.py": f"import torch\n{files['main.py']}"}, target)
    assert site(results["parts/the_one.py"], MADE).status is Status.CONVERTED


@EACH_TARGET
def test_a_name_from_another_file_may_be_of_a_package_that_no_table_has(target: str, tmp_path: Path) -> None:
    found = site(ported_project(tmp_path, project(ANY_NAME, ""), target)["parts/the_one.py"], MADE)
    assert (found.status, "build.py:6 runs code" in found.reason) == (Status.UNSAFE, True)


OTHERS = {
    "another package": BUILD.format('f"others.{name}"'),
    "a part of a name that is not this one": BUILD.format('f"parts.this_{name}"'),
    "a package in it": BUILD.format('f"parts.the_one.{name}"'),
    "an entry of a checkpoint": "def find(state, name):\n    return state[f'parts.{name}']\n",
    "a name that the module does not define": "NAME = 'parts.the_one.Other'\n",
    "the name of a module that nothing imports": "import logging\n\nlogging.getLogger('parts.the_one')\n",
    "a script that nothing runs": "print('see parts/the_one.py')\n",
    "a script of the same name elsewhere": "import os\n\nos.system('python the_one.py')\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", OTHERS)
def test_a_text_that_names_something_else_joins_no_files(kind: str, target: str, tmp_path: Path) -> None:
    files = {"parts/the_one.py": PART, "main.py": OTHERS[kind] + KEPT}
    assert site(ported_project(tmp_path, files, target)["parts/the_one.py"], MADE).status is Status.CONVERTED


def test_the_nearest_script_of_a_name_is_the_one_that_runs(tmp_path: Path) -> None:
    files = {
        "one/main.py": "import os\n\nos.system('python train.py')\n" + KEPT,
        "one/train.py": PART,
        "two/train.py": PART,
    }
    results = ported_project(tmp_path, files, "acclimate")
    assert site(results["one/train.py"], MADE).status is Status.UNSAFE
    assert site(results["two/train.py"], MADE).status is Status.CONVERTED


def test_a_table_of_classes_passes_what_stays_on_to_the_program_that_looks_it_up(tmp_path: Path) -> None:
    files = {
        "parts/the_one.py": "class Part:\n    def make(self, x):\n        return x.cuda()\n",
        "tables.py": "import importlib\n\nPARTS = {'one': 'parts.the_one'}\n\n\ndef build(name):\n"
        "    return importlib.import_module(PARTS[name]).Part()\n",
        "main.py": f"import torch\nfrom tables import build\n\n\ndef main(n):\n    build('one').make({MADE})\n",
    }
    found = site(ported_project(tmp_path, files, "acclimate")["main.py"], MADE)
    assert found.status is Status.UNSAFE
    assert "the_one.py:" in found.reason


def test_the_choices_of_a_text_are_all_named() -> None:
    source = "import importlib\n\nimportlib.import_module(f\"{'a' if new else 'b'}.net_{size}.main\")\n"
    assert outline(source).texts == {
        Text(Names.MODULE, "a.net_*.main"),
        Text(Names.MODULE, "b.net_*.main"),
    }


def test_two_scripts_that_one_file_starts_as_processes_are_not_joined_by_that(tmp_path: Path) -> None:
    files = {
        "main.py": "import os\n\nos.system('python one.py')\nos.system('python two.py')\n",
        "one.py": PART,
        "two.py": KEPT,
    }
    assert site(ported_project(tmp_path, files, "acclimate")["one.py"], MADE).status is Status.CONVERTED
    same = {**files, "main.py": "exec(open('one.py').read())\nexec(open('two.py').read())\n"}
    assert site(ported_project(tmp_path, same, "acclimate")["one.py"], MADE).status is Status.UNSAFE


def test_a_reason_says_whether_one_program_is_known_to_run_both_places(tmp_path: Path) -> None:
    one = "import torch\nfrom shared import Part\n\n\ndef f():\n    return torch.ones(2, device='cuda')\n"
    files = {"shared.py": PART, "two.py": f"from shared import Part\n{KEPT}", "one.py": one}
    results = ported_project(tmp_path, files, "acclimate")
    assert "a program that shares code with this one runs" in site(results["one.py"], "'cuda'").reason
    assert "which the same program runs" in site(results["shared.py"], MADE).reason
