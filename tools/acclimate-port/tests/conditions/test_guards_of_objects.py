"""A device is a string or an object, and a call may come later: the machines show what each guard is worth."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, check, program, reasons

OBJECTS = [
    "where = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
    "return torch.cuda.amp.GradScaler(enabled=where != 'cpu')",
    "where = x.device\nif where != 'cpu':\n    return torch.cuda.amp.GradScaler()",
    "where = x.device\nif where not in ('cpu', 'mps'):\n    torch.cuda.manual_seed(1)",
    "where = str(device)\nreturn torch.cuda.amp.GradScaler(enabled=where != 'cpu')",
    "return torch.cuda.amp.GradScaler(enabled=x.device.type != 'cpu')",
    "with torch.cuda.amp.autocast(enabled='cpu' != x.device):\n    pass",
]


@EACH_TARGET
@pytest.mark.parametrize("body", OBJECTS)
def test_a_device_object_differs_from_every_string_so_its_test_holds_no_host_out(
    body: str, target: str
) -> None:
    check(program(body), target, changed=True)


@EACH_TARGET
def test_a_device_of_another_function_may_be_an_object(target: str) -> None:
    head = "import torch\nfrom torch.cuda import amp\nfrom .devices import select"
    body = "self.device = select(device)\nself.scaler = amp.GradScaler(enabled=self.device != 'cpu')"
    text = port_text(program(body, head), Settings(target)).text
    guard = (
        'get_accelerator().device_name() != "cpu"'
        if target == "acclimate"
        else "torch.accelerator.is_available()"
    )
    assert f"enabled=self.device != 'cpu' and {guard}" in text


LATER = [
    "made = partial(torch.amp.autocast, 'cuda', enabled=flag)\nwith made():\n    pass",
    "made = partial(torch.autocast, device_type='cuda')\nwith made():\n    pass",
    "made = partial(torch.amp.GradScaler, 'cuda')\nreturn made()",
    "made = torch.autocast if flag else other\nwith made(device_type='cuda'):\n    pass",
    "given = dict(device_type='cuda', dtype=torch.float16)\nwith torch.autocast(**given):\n    pass",
    "device_type = 'cuda'\nmade = partial(torch.amp.autocast, device_type)\nwith made():\n    pass",
]


@EACH_TARGET
@pytest.mark.parametrize("body", LATER)
def test_an_autocast_that_is_called_later_is_not_turned_on_on_a_host(body: str, target: str) -> None:
    source = program(body, "import torch\nfrom functools import partial")
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert [site.status for site in ported.sites] == [Status.UNSAFE]
    assert "on a host" in reasons(ported)


@EACH_TARGET
def test_an_autocast_that_is_called_later_is_ported_where_there_is_a_device(target: str) -> None:
    body = "if torch.cuda.is_available():\n    made = partial(torch.amp.autocast, 'cuda')\n    with made():\n        pass"
    check(program(body, "import torch\nfrom functools import partial"), target, changed=True)


@EACH_TARGET
def test_an_autocast_that_is_kept_to_be_off_is_not_on_elsewhere(target: str) -> None:
    body = "made = partial(torch.amp.autocast, 'cuda', enabled=False)\nwith made():\n    pass"
    check(program(body, "import torch\nfrom functools import partial"), target, changed=True)
