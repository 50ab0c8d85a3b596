"""Edits that are half of a decision are not safe: a guard with its code, a call with its argument.

Each program is ported without unsafe edits, and must stay whole or change whole.
"""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import BOTH, program

GUARDED = [
    "if x.is_cuda:\n    return y.to('cuda')\nreturn y",
    "return torch.device('cuda:%d' % other) if x.is_cuda else 1",
    "if torch.cuda.is_available() and torch.cuda.is_initialized():\n    return torch.cuda.get_rng_state()",
]


@BOTH
@pytest.mark.parametrize("body", GUARDED)
def test_code_behind_a_guard_that_stays_is_not_edited_alone(body: str, target: str) -> None:
    source = program(body)
    assert port_text(source, Settings(target)).text == source


@BOTH
def test_a_choice_stays_with_the_guard_of_the_constructor_that_it_chooses(target: str) -> None:
    source = (
        "import torch\n\n\nclass Gpu:\n    def __init__(self):\n        if not torch.cuda.is_available():\n"
        "            raise ValueError('no GPU')\n\n\ndef f():\n    return Gpu() if torch.cuda.is_available() else 1\n"
    )
    assert port_text(source, Settings(target)).text == source
