"""A test that decides about pinned memory is unsafe: some Macs refuse to pin, where they pinned nothing before."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import AVAILABLE, EACH_TARGET, reasons, site_of

REFUSED = "pins memory if it is true, which torch refuses on some Macs"
FUNCTION = "import torch\n\n\ndef f(x: torch.Tensor, n, loader):\n    {}\n    return x\n"
BRANCHES = {
    "a branch": f"if {AVAILABLE}:\n        x = x.pin_memory()",
    "a name": f"use_gpu = {AVAILABLE}\n    if use_gpu:\n        x = x.pin_memory()",
    "a choice": f"x = x.pin_memory() if {AVAILABLE} else x",
    "a new tensor": f"if {AVAILABLE}:\n        x = torch.empty(n, pin_memory=True)",
    "the code after a return": f"if not {AVAILABLE}:\n        return x\n    x = x.pin_memory()",
}
OTHERS = {
    "a loader": f"if {AVAILABLE}:\n        x = torch.utils.data.DataLoader(x, pin_memory=True)",
    "an argument of a loader": f"x = torch.utils.data.DataLoader(x, pin_memory={AVAILABLE})",
    "a pin beside it": f"if {AVAILABLE}:\n        x = x.to('cuda')\n    x.pin_memory()",
}


@EACH_TARGET
@pytest.mark.parametrize("name", BRANCHES)
def test_a_question_by_which_memory_is_pinned_is_unsafe(name: str, target: str) -> None:
    source = FUNCTION.format(BRANCHES[name])
    ported = port_text(source, Settings(target))
    assert site_of(ported, AVAILABLE).status is Status.UNSAFE
    assert REFUSED in reasons(ported)


@EACH_TARGET
@pytest.mark.parametrize("name", OTHERS)
def test_a_question_beside_pinned_memory_is_not_held_back_by_it(name: str, target: str) -> None:
    assert REFUSED not in reasons(port_text(FUNCTION.format(OTHERS[name]), Settings(target)))


@EACH_TARGET
def test_a_question_whose_answer_an_object_keeps_is_unsafe_if_another_method_pins(target: str) -> None:
    source = (
        "import torch\n\n\ndef pin(batch: torch.Tensor):\n    return batch.pin_memory()\n\n\nclass Batches:\n"
        f"    def __init__(self):\n        self.pins = {AVAILABLE}\n\n"
        "    def __next__(self):\n        return pin(self.batch) if self.pins else self.batch\n"
    )
    ported = port_text(source, Settings(target))
    assert site_of(ported, AVAILABLE).status is Status.UNSAFE


@EACH_TARGET
def test_a_test_that_only_pins_leaves_the_device_of_the_program_free(target: str) -> None:
    source = (
        FUNCTION.format(BRANCHES["a name"]) + '\n\ndevice = "cuda" if torch.cuda.is_available() else "cpu"\n'
    )
    ported = port_text(source, Settings(target))
    choice = site_of(ported, '"cuda" if torch.cuda.is_available() else "cpu"')
    assert choice.status is Status.CONVERTED
