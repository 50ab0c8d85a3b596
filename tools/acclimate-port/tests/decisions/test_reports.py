"""What a program tells of its device, and the device that it chooses, are ported together or not at all."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, BOTH, check

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


@BOTH
@pytest.mark.parametrize("kind", HALVES)
def test_half_of_a_report_is_not_ported(kind: str, target: str) -> None:
    source = f"import torch\n\n{HALVES[kind]}"
    assert port_text(source, Settings(target)).text == source


@BOTH
def test_a_report_is_ported_with_the_device_that_it_tells_of(target: str) -> None:
    body = HALVES["a name, beside a device that stays"].replace("if device.type == 'cuda'", "if device.index")
    ported = port_text(f"import torch\n\n\n{body}", Settings(target))
    assert {site.status for site in ported.sites} == {Status.CONVERTED}


@BOTH
def test_a_text_is_ported_with_its_figure(target: str) -> None:
    body = HALVES["a text, and the figure in it"].replace(UNKNOWN, "")
    ported = check(f"import torch\n\n\n{body}", target, changed=True)
    assert {site.status for site in ported.sites} == {Status.CONVERTED}
    assert AVAILABLE not in ported.text


@BOTH
def test_a_report_about_cuda_keeps_no_choice_of_a_device(target: str) -> None:
    source = (
        "import torch\n\nprint('CUDA available:', torch.cuda.is_available())\ndevice = 'cpu'\nif torch.cuda.is_available():\n"
        "    device = torch.device('cuda')\n    print('GPU:', torch.cuda.get_device_name(0))\n"
    )
    ported = port_text(source, Settings(target))
    assert [site.status for site in ported.sites[1:]] == [Status.CONVERTED] * 3
