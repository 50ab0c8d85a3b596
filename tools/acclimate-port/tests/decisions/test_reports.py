"""What a program tells of its device, and the device that it chooses, are ported together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, EACH_TARGET, check, ported_project

UNKNOWN = "\n\ndef move(weight):\n    return weight.cuda()\n"
"""Code that stays, and with it the rest of the file that chooses a device."""
HALVES = {
    "a name, beside a device that stays": (
        "def sync(device):\n    if device.type == 'cuda':\n        torch.cuda.synchronize(device)\n\n\n"
        "def train(model, log):\n    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "    model.to(device)\n    log(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'CPU')\n    sync(device)\n"
    ),
    "one of four printed lines": (
        "import os\n\nprint(torch.cuda.is_available())\nprint(torch.cuda.device_count())\n"
        "print(torch.cuda.get_device_name())\nprint(torch.cuda.current_device())\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"
    ),
    "a name below a version of CUDA": (
        "def main():\n    ok = model = 'N/A'\n    ok = torch.cuda.is_available()\n    if ok:\n"
        "        version = str(torch.version.cuda)\n        model = torch.cuda.get_device_name(0)\n        print(version)\n"
        "    print('CUDA available?', ok, model)\n"
    ),
    "a name below a report about CUDA": (
        "print(f'CUDA available: {torch.cuda.is_available()}')\nif torch.cuda.is_available():\n"
        "    print(f'CUDA device: {torch.cuda.get_device_name(0)}')\n"
    ),
    "a text, and the figure in it": (
        "def log(items):\n    text = ['[{0}]']\n    if torch.cuda.is_available():\n        text.append('memory: {memory:.0f}')\n"
        "    text = ' '.join(text)\n    for i, item in enumerate(items):\n        yield item\n"
        "        if torch.cuda.is_available():\n"
        "            print(text.format(i, memory=torch.cuda.max_memory_allocated() / 1e6))\n"
        f"        else:\n            print(text.format(i))\n{UNKNOWN}"
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", HALVES)
def test_half_of_a_report_is_not_ported(kind: str, target: str) -> None:
    source = f"import torch\n\n{HALVES[kind]}"
    assert port_text(source, Settings(target)).text == source


ABOUT_CUDA = {
    "a text of a name": "TEXT = 'CUDA available: {{}}'\n\n\ndef tell():\n    return TEXT.format({answer})\n",
    "an old text of a name": "TEXT = 'CUDA available: %s'\n\n\ndef tell():\n    print(TEXT % {answer})\n",
    "a field": "from env import Env\n\n\ndef tell():\n    return Env(is_cuda_available={answer}, gpu=None)\n",
    "a key": "def tell():\n    return {{'cuda': {answer}}}\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", ABOUT_CUDA)
def test_a_report_about_cuda_stays_wherever_its_text_is(kind: str, target: str) -> None:
    source = f"import torch\n\n{ABOUT_CUDA[kind].format(answer=AVAILABLE)}"
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_a_report_is_ported_with_the_device_that_it_tells_of(target: str) -> None:
    body = HALVES["a name, beside a device that stays"].replace("if device.type == 'cuda'", "if device.index")
    ported = port_text(f"import torch\n\n\n{body}", Settings(target))
    assert {site.status for site in ported.sites} == {Status.CONVERTED}


@EACH_TARGET
def test_a_text_is_ported_with_its_figure(target: str) -> None:
    body = HALVES["a text, and the figure in it"].replace(UNKNOWN, "")
    ported = check(f"import torch\n\n\n{body}", target, changed=True)
    assert {site.status for site in ported.sites} == {Status.CONVERTED}
    assert AVAILABLE not in ported.text


@EACH_TARGET
def test_a_report_about_cuda_keeps_no_choice_of_a_device(target: str) -> None:
    source = (
        "import torch\n\nprint('CUDA available:', torch.cuda.is_available())\ndevice = 'cpu'\nif torch.cuda.is_available():\n"
        "    device = torch.device('cuda')\n    print('GPU:', torch.cuda.get_device_name(0))\n"
    )
    ported = port_text(source, Settings(target))
    assert [site.status for site in ported.sites[1:]] == [Status.CONVERTED] * 3


CHOOSER = (
    "import torch\n{}\n\nclass Sampler:\n    def __init__(self):\n        if torch.cuda.is_available():\n"
    "            self.device = torch.device('cuda')\n        else:\n            self.device = torch.device('cpu')\n\n"
    "    def step(self, graph: torch.Tensor):\n        return graph.to(self.device)\n"
)
BETWEEN = {
    "a function": {"between.py": "from chooser import Sampler\n\n\ndef pick():\n    return Sampler()\n"},
    "a function of a module": {
        "between.py": "import chooser\n\n\ndef pick():\n    return chooser.Sampler()\n"
    },
    "two functions": {
        "between.py": "from further import make\n\n\ndef pick():\n    return make()\n",
        "further.py": "def make():\n    from chooser import Sampler\n\n    return Sampler()\n",
    },
}
REPORT_OF_OTHERS = {
    "a log line": "    if torch.cuda.is_available():\n        log(f'on {torch.cuda.get_device_name(torch.cuda.current_device())}')\n"
    "    else:\n        log('no GPU, falling back to the CPU')\n    return pick()\n",
    "a message": "    print('on', 'cuda' if torch.cuda.is_available() else 'cpu')\n    return pick()\n",
    "an assertion": "    assert torch.cuda.is_available(), 'needs a GPU'\n    return pick()\n",
    "a check": "    if not torch.cuda.is_available():\n        raise RuntimeError('needs a GPU')\n    return pick()\n",
    "a dictionary of results": "    name = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'\n"
    "    return {'device': name, 'result': pick()}\n",
}
GRAPHS = "import dgl\n"
"""A library whose objects not every accelerator has, so that the device stays."""


@EACH_TARGET
@pytest.mark.parametrize("way", BETWEEN)
@pytest.mark.parametrize("kind", REPORT_OF_OTHERS)
def test_a_report_stays_with_the_device_that_its_file_reaches_through_others(
    kind: str, way: str, target: str, tmp_path: Path
) -> None:
    main = f"import torch\nfrom between import pick\n\n\ndef main(log):\n{REPORT_OF_OTHERS[kind]}"
    for name, library in (("stays", GRAPHS), ("ported", "")):
        files = {"main.py": main, "chooser.py": CHOOSER.format(library), **BETWEEN[way]}
        if library:
            files["chooser.py"] = files["chooser.py"].replace(": torch.Tensor", "")
        results = ported_project(tmp_path / name, files, target)
        statuses = {one.status for one in results["main.py"].sites}
        assert statuses == {Status.UNSAFE if library else Status.CONVERTED}, results["main.py"].sites
        assert not library or any("chooser.py:" in one.reason for one in results["main.py"].sites)


@EACH_TARGET
def test_a_report_is_ported_beside_a_device_that_its_file_does_not_use(target: str, tmp_path: Path) -> None:
    files = {
        "main.py": f"import torch\nfrom between import other as pick\n\n\ndef main(log):\n{REPORT_OF_OTHERS['a message']}",
        "between.py": BETWEEN["a function"]["between.py"] + "\n\ndef other():\n    return 1\n",
        "chooser.py": CHOOSER.format(GRAPHS).replace(": torch.Tensor", ""),
    }
    results = ported_project(tmp_path, files, target)
    assert {one.status for one in results["main.py"].sites} == {Status.CONVERTED}


@EACH_TARGET
@pytest.mark.parametrize("way", BETWEEN)
def test_a_device_stays_with_the_report_of_a_file_that_reaches_it_through_others(
    way: str, target: str, tmp_path: Path
) -> None:
    for name, moved in (("stays", "x"), ("ported", "torch.ones(1)")):
        main = (
            "import torch\nfrom between import pick\n\n\ndef main(log, x):\n    "
            f"{moved}.cuda()\n{REPORT_OF_OTHERS['a message']}"
        )
        files = {"main.py": main, "chooser.py": CHOOSER.format(""), **BETWEEN[way]}
        results = ported_project(tmp_path / name, files, target)
        statuses = {one.status for one in results["chooser.py"].sites}
        assert statuses == {Status.UNSAFE if moved == "x" else Status.CONVERTED}


@EACH_TARGET
def test_a_relative_import_names_nothing_outside_its_package(target: str, tmp_path: Path) -> None:
    files = {
        "root/tool/state.py": "class State:\n    pass\n\n\nstate = State()\n",
        "root/tool/report.py": (
            "import torch\n\nfrom .state import state\n\n\ndef report(log, x):\n    state.handle = log\n"
            "    x.cuda()\n    print('on', 'cuda' if torch.cuda.is_available() else 'cpu')\n    return state.handle\n"
        ),
        "root/demo/chooser.py": "import torch\n\nhandle = 0\nx = torch.ones(1).cuda()\n",
    }
    results = ported_project(tmp_path, files, target)
    assert {one.status for one in results["root/demo/chooser.py"].sites} == {Status.CONVERTED}
