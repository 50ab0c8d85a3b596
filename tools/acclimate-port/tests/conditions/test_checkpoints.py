"""A checkpoint that a flag sends back to CUDA fits no other accelerator, so the flag keeps meaning CUDA."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET, check, program, reasons

MOVE = "if flag:\n    net = torch.ones(1).cuda()"
SPLIT = [
    "if flag:\n    state = torch.load('w')\nelse:\n    state = torch.load('w', map_location='cpu')",
    "if not flag:\n    state = torch.load('w', torch.device('cpu'))\nelse:\n    state = torch.load('w')",
    "state = torch.load('w') if flag else torch.load('w', map_location='cpu')",
    "state = torch.load('w', map_location=None if flag else 'cpu')",
    "state = torch.load('w', map_location=None if flag else lambda storage, loc: storage)",
    "where = None if flag else 'cpu'\nstate = torch.load('w', map_location=where)",
    "if flag:\n    where = None\nelse:\n    where = 'cpu'\nstate = torch.load('w', map_location=where)",
    "options = {} if flag else {'map_location': 'cpu'}\nstate = torch.load('w', **options)",
    "options = dict() if flag else dict(map_location='cpu')\nstate = torch.load('w', **options)",
    "options = {}\nif not flag:\n    options['map_location'] = 'cpu'\nstate = torch.load('w', **options)",
]


@EACH_TARGET
@pytest.mark.parametrize("load", SPLIT)
def test_a_flag_that_sends_a_checkpoint_back_to_cuda_is_not_ported(load: str, target: str) -> None:
    unsafe = check(program(f"{load}\n{MOVE}\nreturn state"), target, changed=False)
    assert "loads a checkpoint to CUDA" in reasons(unsafe)


@EACH_TARGET
@pytest.mark.parametrize(
    "load",
    [
        "state = torch.load('w', map_location='cpu')",
        "if flag:\n    state = torch.load('w', map_location='cpu')\nelse:\n    state = None",
        "state = torch.load('w', map_location='cuda' if flag else 'cpu')",
        "options = {} if flag else {'weights_only': True}\nstate = torch.load('w', map_location='cpu', **options)",
    ],
)
def test_a_checkpoint_that_is_loaded_to_a_named_device_hinders_nothing(load: str, target: str) -> None:
    assert ".cuda()" not in port_text(program(f"{load}\n{MOVE}\nreturn state"), Settings(target)).text


@EACH_TARGET
def test_a_question_whose_branches_name_where_a_checkpoint_goes_is_unsafe(target: str) -> None:
    choice = "if torch.cuda.is_available():\n    where = None\nelse:\n    where = 'cpu'\n"
    source = program(f"{choice}net.load_state_dict(torch.load('w', where)['net'])", "import torch")
    assert "loaded to CUDA" in reasons(check(source, target, changed=False))


@EACH_TARGET
def test_a_class_that_unpickles_on_the_host_is_such_a_choice(target: str) -> None:
    source = program(
        "if flag:\n    state = pickle.load(other)\nelse:\n    state = HostUnpickler(other).load()\n" + MOVE,
        "import pickle\nimport torch",
    )
    assert port_text(source, Settings(target)).text == source
