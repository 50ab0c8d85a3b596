"""What a program sets and asks before its first use of a device."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET

SETS = "    os.environ['CUDA_VISIBLE_DEVICES'] = args.gpu\n"
CHOICE = "'cuda' if torch.cuda.is_available() else 'cpu'"
ASKS = f"    args.x = torch.ones(1, device={CHOICE})\n"
HEAD = "import os\nimport torch\n\n\ndef main(args):\n"


@pytest.mark.parametrize(
    ("body", "target", "is_safe"),
    [
        (ASKS + SETS, "acclimate", False),
        (SETS + ASKS, "acclimate", True),
        (ASKS, "acclimate", True),
        (ASKS + SETS, "torch", True),
    ],
)
def test_a_choice_of_devices_that_had_no_effect_gets_none(body: str, target: str, is_safe: bool) -> None:
    found = next(one for one in port_text(HEAD + body, Settings(target)).sites if one.text == CHOICE)
    assert found.safe == is_safe, found
    assert is_safe or "which has no effect now" in found.reason


@EACH_TARGET
@pytest.mark.parametrize("number", [0, 1])
def test_a_second_device_is_not_taken_for_the_host(number: int, target: str) -> None:
    text = (
        "import torch\n\nlearner = actor = torch.device('cpu')\nif torch.cuda.is_available():\n"
        f"    learner, actor = torch.device('cuda:0'), torch.device('cuda:{number}')\n"
        "print(torch.ones(1, device=learner) + torch.ones(1).to(actor))\n"
    )
    sites = port_text(text, Settings(target)).sites
    assert {one.safe for one in sites if one.code == "ACC201"} == {number == 0}, sites
