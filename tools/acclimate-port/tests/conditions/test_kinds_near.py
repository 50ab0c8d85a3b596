"""A device that a file has code for is left out of a test only where that code stands beside the test's."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET, check

OTHER = """
def {name}(x):
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(1)
    elif torch.xpu.is_available():
        torch.xpu.manual_seed_all(1)
"""
SERVE = {
    "a wait": "torch.cuda.synchronize()",
    "memory": "torch.cuda.empty_cache()",
    "a seed": "torch.cuda.manual_seed_all(3)",
    "a wait and memory": "torch.cuda.synchronize(); torch.cuda.empty_cache()",
}
EXCLUDED = '("cpu", "xpu")'


def source(body: str, other: str = OTHER) -> str:
    return f"import torch\n\n\ndef f(x, y, model, flag, other, device):\n{body}\n\n{other.format(name='g')}"


@EACH_TARGET
@pytest.mark.parametrize("kind", SERVE)
def test_a_wait_is_made_on_a_device_that_another_function_has_a_branch_for(kind: str, target: str) -> None:
    text = source(f"    if torch.cuda.is_available():\n        {SERVE[kind]}\n    return 1\n")
    ported = check(text, target, changed=True).text
    assert EXCLUDED not in ported.partition("def g")[0]
    assert EXCLUDED in ported.partition("def g")[2]


BESIDE = {
    "a later branch": "    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n"
    "    elif torch.xpu.is_available():\n        torch.xpu.synchronize()\n",
    "a branch of the same function": "    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n"
    "    if torch.xpu.is_available():\n        torch.xpu.synchronize()\n",
    "other work": "    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n        model.half()\n",
    "a part of a condition": "    if torch.cuda.is_available() and flag:\n        model.half()\n",
    "a value": "    return torch.cuda.is_available()\n",
}


@EACH_TARGET
@pytest.mark.parametrize("kind", BESIDE)
def test_other_code_for_a_device_keeps_it_out_of_a_test(kind: str, target: str) -> None:
    ported = port_text(source(BESIDE[kind]), Settings(target, unsafe=True)).text
    assert EXCLUDED in ported.partition("def g")[0]


@EACH_TARGET
def test_the_same_machine_takes_the_same_branch_of_code_of_its_own(target: str) -> None:
    ported = port_text(source(BESIDE["a later branch"]), Settings(target)).text
    assert ported.count(EXCLUDED) == 2
