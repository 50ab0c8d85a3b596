"""A device that is there to raise an error stays as it is."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, EACH_TARGET

HEAD = "import pytest\nimport torch\n\n\ndef test_it(self, make):\n"
FAILS = {
    "an index that no machine has": ("    make(device='cuda:99')\n", "'cuda:99'"),
    "in a block that expects an error": (
        "    with pytest.raises((RuntimeError, ValueError)):\n        make(device='cuda:1')\n",
        "'cuda:1'",
    ),
    "in a call that expects an error": (
        "    self.assertRaises(AssertionError, torch.zeros, 1, device='cuda:3')\n",
        "'cuda:3'",
    ),
    "a device object": (
        "    with self.assertRaisesRegex(RuntimeError, 'invalid'):\n        make(torch.device('cuda', 2))\n",
        "torch.device('cuda', 2)",
    ),
    "a number of a method": (
        "    with pytest.raises(Exception):\n        torch.ones(1).cuda(7)\n",
        "torch.ones(1).cuda(7)",
    ),
}


@EACH_TARGET
@pytest.mark.parametrize("kind", FAILS)
def test_a_device_that_is_meant_to_fail_is_left(kind: str, target: str) -> None:
    body, text = FAILS[kind]
    found = port_text(HEAD + body, Settings(target, unsafe=True))
    assert found.text == HEAD + body
    assert [one.status for one in found.sites if one.text == text] == [Status.LEFT]


@EACH_TARGET
def test_other_indices_and_other_errors_are_ported(target: str) -> None:
    for body in (
        "    make(device='cuda:1')\n",
        "    with pytest.raises(ValueError):\n        make(torch.ones(1, device='cuda:1'))\n",
    ):
        assert "cuda:1" not in port_text(HEAD + body, Settings(target)).text


@EACH_TARGET
def test_a_device_under_the_question_how_torch_is_built_is_unsafe(target: str) -> None:
    text = "import torch\n\nif torch.has_cuda:\n    device = 'cuda'\nelse:\n    device = 'cpu'\nx = torch.ones(1, device=device)\n"
    assert port_text(text, Settings(target)).text == text
    assert "'cuda'" not in port_text(text.replace("torch.has_cuda", AVAILABLE), Settings(target)).text
