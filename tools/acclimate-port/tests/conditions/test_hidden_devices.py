"""A program that hides the devices of CUDA runs on the host, also where there is another accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import BOTH, EACH_TARGET, check, differing, ported_project, program, reasons, site, site_of

HEAD = "import os\nimport torch"
SEED = "if torch.cuda.is_available():\n    torch.cuda.manual_seed(42)\nelse:\n    torch.manual_seed(42)"
CHOICE = "return torch.ones(1, device='cuda' if torch.cuda.is_available() else 'cpu')"
COUNT = "return 8 * torch.cuda.device_count()"
HIDING = [
    'os.environ["CUDA_VISIBLE_DEVICES"] = "-1"',
    "os.environ['CUDA_VISIBLE_DEVICES'] = ''",
    'os.environ["CUDA_VISIBLE_DEVICES"] = "cpu"',
    'if flag:\n    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"',
    'os.environ["CUDA_VISIBLE_DEVICES"] = "0" if flag else ""',
    'os.environ["CUDA_VISIBLE_DEVICES"] = str(-1)',
    'hidden = "-1"\nos.environ["CUDA_VISIBLE_DEVICES"] = hidden',
    'os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")',
    'os.putenv("CUDA_VISIBLE_DEVICES", "")',
    'os.environ.update({"CUDA_VISIBLE_DEVICES": "-1"})',
    'os.environ.update(CUDA_VISIBLE_DEVICES="")',
    'def hide(gpu=-1):\n    os.environ["CUDA_VISIBLE_DEVICES"] = f"{gpu}"\nhide()',
    'def hide(gpu):\n    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)\nhide(-1 if flag else 0)',
]


@EACH_TARGET
@pytest.mark.parametrize("use", [SEED, CHOICE])
@pytest.mark.parametrize("hiding", HIDING)
def test_a_program_that_hides_cuda_still_runs_on_the_host(hiding: str, use: str, target: str) -> None:
    source = program(f"{hiding}\n{use}", HEAD)
    unsafe = check(source, target, changed=False)
    assert "hides the devices of CUDA" in reasons(unsafe)
    assert differing(source, unsafe.text), "the machines do not tell the difference"


@EACH_TARGET
@pytest.mark.parametrize(
    "setting",
    [
        'os.environ["CUDA_VISIBLE_DEVICES"] = "0"',
        'os.environ["CUDA_VISIBLE_DEVICES"] = "1,2"',
        'os.environ["CUDA_VISIBLE_DEVICES"] = "0" if flag else "1"',
        'visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")',
        'os.environ["TOKENIZERS_PARALLELISM"] = ""',
    ],
)
def test_a_program_that_names_the_devices_to_use_is_ported(setting: str, target: str) -> None:
    check(program(f"{setting}\n{CHOICE}", HEAD), target, changed=True)


@EACH_TARGET
def test_a_program_that_hides_cuda_may_wait_for_the_device(target: str) -> None:
    body = "if torch.cuda.is_available():\n    torch.cuda.synchronize()"
    source = program(f"def start():\n    os.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n{body}", HEAD)
    check(source, target, changed=True)


@EACH_TARGET
@pytest.mark.parametrize(
    ("option", "setting", "hides"),
    [
        ('"--gpu", default="-1"', 'os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu', True),
        ('"--gpu", type=int, default=-1', 'os.environ["CUDA_VISIBLE_DEVICES"] = str(args.gpu)', True),
        ('"--gpu", default="0", help="-1 for CPU"', 'os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu', True),
        ('"--gpu", default="0"', 'os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu', False),
        (
            '"--gpu", type=int, default=-1',
            'if args.gpu >= 0:\n    os.environ["CUDA_VISIBLE_DEVICES"] = str(args.gpu)',
            False,
        ),
    ],
)
def test_an_option_may_hide_the_devices(option: str, setting: str, hides: bool, target: str) -> None:
    source = (
        "import argparse\nimport os\n\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        f"parser.add_argument({option})\nargs = parser.parse_args()\n{setting}\n"
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nx = torch.ones(1, device=device)\n"
    )
    assert (port_text(source, Settings(target)).text == source) == hides


@EACH_TARGET
def test_a_program_that_answers_that_there_is_no_cuda_stays(target: str) -> None:
    source = f"import torch\n\ntorch.cuda.is_available = lambda: False\n\n\n{program(CHOICE).partition('import torch')[2].strip()}\n"
    assert port_text(source, Settings(target)).text == source


REPLACED = {
    "a move of tensors": "torch.Tensor.cuda = lambda self, *args: self",
    "a move of modules": "torch.nn.Module.cuda = lambda self, *args: self",
    "a move by an option": "if os.environ.get('CPU'):\n    torch.Tensor.cuda = lambda self, *args: self",
    "an answer": "setattr(torch.cuda, 'is_available', lambda: False)",
}
MOVE = "torch.zeros(3).cuda()"


@EACH_TARGET
@pytest.mark.parametrize("kind", REPLACED)
def test_a_move_or_an_answer_that_the_program_replaces_stays_in_all_its_files(
    kind: str, target: str, tmp_path: Path
) -> None:
    lib = f"import torch\n\n\ndef use():\n    return {MOVE}\n"
    main = f"import os\n\nimport torch\nfrom lib import use\n\n{REPLACED[kind]}\nuse()\n"
    found = ported_project(tmp_path, {"lib.py": lib, "main.py": main}, target)["lib.py"]
    assert site(found, MOVE).status is Status.UNSAFE


@BOTH
@pytest.mark.parametrize("test", ["", "if not torch.cuda.is_available():\n    "])
def test_a_move_that_its_own_file_replaces_stays_unless_there_is_no_device(test: str, target: str) -> None:
    text = f"import torch\n\n{test}torch.Tensor.cuda = lambda self: self\nx = {MOVE}\n"
    status = Status.CONVERTED if test else Status.UNSAFE
    assert site_of(port_text(text, Settings(target)), MOVE).status is status
