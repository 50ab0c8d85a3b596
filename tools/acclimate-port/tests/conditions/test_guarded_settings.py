"""A test that keeps a device of the settings from machines without CUDA still does on other accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate_port.engine import Status
from porting import EACH_TARGET, ported_project, site

QUESTION = "torch.cuda.is_available()"
HEAD = "import os\nimport torch\nfrom omegaconf import OmegaConf\n\n\ndef main(path, cfg_cli):\n    cfg = OmegaConf.load(path)\n"
USE = "    return torch.zeros(3).to(device)\n"
FROM_SETTINGS = {
    "a choice": f"    device = torch.device(cfg.device if {QUESTION} else 'cpu')\n",
    "two devices": f"    device = torch.device(cfg.device) if {QUESTION} else torch.device('cpu')\n",
    "a negated choice": f"    device = 'cpu' if not {QUESTION} else cfg.model.device\n",
    "an entry": f"    device = cfg['device'] if {QUESTION} else 'cpu'\n",
    "an entry with a default": f"    device = cfg.get('device', None) if {QUESTION} else 'cpu'\n",
    "two branches": f"    if {QUESTION}:\n        device = cfg.device\n    else:\n        device = 'cpu'\n",
    "a device for CUDA alone": f"    device = 'cpu'\n    if {QUESTION}:\n        device = torch.device(cfg.device)\n",
    "a setting that is replaced": f"    if not {QUESTION}:\n        cfg.device = 'cpu'\n    device = cfg.device\n",
    "the environment": f"    device = os.environ['DEVICE'] if {QUESTION} else 'cpu'\n",
    "a fallback": f"    device = cfg.device\n    if not {QUESTION}:\n        device = 'cpu'\n",
}
OTHERS = {
    "the program's own": f"    device = 'cuda' if {QUESTION} else 'cpu'\n",
    "an object's own": f"    device = path.batch_size if {QUESTION} else 1\n    device = 'cpu'\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", FROM_SETTINGS)
def test_a_device_of_the_settings_keeps_its_guard(kind: str, target: str, tmp_path: Path) -> None:
    result = ported_project(tmp_path, {"main.py": HEAD + FROM_SETTINGS[kind] + USE}, target)["main.py"]
    assert site(result, QUESTION).status is Status.UNSAFE


@pytest.mark.parametrize("kind", OTHERS)
def test_a_device_of_the_program_is_ported_with_its_guard(kind: str, tmp_path: Path) -> None:
    result = ported_project(tmp_path, {"main.py": HEAD + OTHERS[kind] + USE}, "acclimate")["main.py"]
    assert {one.status for one in result.sites} <= {Status.CONVERTED}


@EACH_TARGET
@pytest.mark.parametrize(
    ("options", "status"),
    [
        ("parser.add_argument('-d', '--device', type=str, default='cuda')", Status.CONVERTED),
        ("parser.add_argument('--device', type=str)", Status.UNSAFE),
        ("_C.MODEL.device = 'cuda:0'", Status.CONVERTED),
        ("class Settings:\n    device: str = 'cuda'", Status.CONVERTED),
    ],
)
def test_a_device_with_a_default_in_python_is_ported_with_it(
    options: str, status: Status, target: str, tmp_path: Path
) -> None:
    files = {
        "main.py": HEAD + FROM_SETTINGS["a choice"] + USE,
        "options.py": f"import argparse\n\nparser = argparse.ArgumentParser()\n{options}\n",
    }
    assert site(ported_project(tmp_path, files, target)["main.py"], QUESTION).status is status


@pytest.mark.parametrize(
    ("line", "status"), [("--device cuda:0", Status.UNSAFE), ("--device cpu", Status.CONVERTED)]
)
def test_a_script_of_the_project_may_name_the_device(line: str, status: Status, tmp_path: Path) -> None:
    files = {
        "main.py": HEAD + FROM_SETTINGS["a choice"] + USE,
        "options.py": "import argparse\n\nargparse.ArgumentParser().add_argument('--device', default='cuda')\n",
    }
    (tmp_path / "run.sh").write_text(f"python main.py {line}\n")
    assert site(ported_project(tmp_path, files, "acclimate")["main.py"], QUESTION).status is status
