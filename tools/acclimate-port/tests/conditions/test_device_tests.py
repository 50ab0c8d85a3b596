"""A device and the tests of its name that it reaches are ported together, or a person reviews the device."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET, check, program

REACHES_A_TEST = [
    "device = flag.get('device', 'cuda')\nif device.startswith('cuda') and not torch.cuda.is_available():\n"
    "    device = 'cpu'\n    return 1\nreturn device",
    "device = getattr(flag, 'device', 'cuda')\nif device == 'cpu':\n    return 1\nreturn 2",
    "device = getattr(flag, 'device', 'cuda')\nif device in ('cpu', 'mps'):\n    return 1\nreturn 2",
    "device_type = getattr(flag, 'device_type', 'cuda')\nif device_type != 'cuda':\n    raise ValueError",
    "device = 'cuda:0'\nwhere = torch.device(device)\nif where.type == 'cuda':\n    return 1\nreturn 2",
    "def g(device):\n    return 'large' if device.startswith('cuda') else 'small'\n"
    "return g(device=getattr(flag, 'device', 'cuda'))",
    "def g(device='cuda'):\n    return 1 if device == 'cpu' else 2\nreturn g()",
]


@EACH_TARGET
@pytest.mark.parametrize("body", REACHES_A_TEST)
def test_a_default_device_that_a_test_reads_is_unsafe(body: str, target: str) -> None:
    check(program(body), target, changed=False)


@EACH_TARGET
def test_the_default_of_an_option_that_a_test_reads_is_unsafe(target: str) -> None:
    source = (
        'import torch\nimport argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument("--device", default="cuda")\n'
        'args = parser.parse_args([])\nmodel = "large" if args.device.startswith("cuda") else "small"\n'
    )
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_a_device_that_a_helper_cuts_for_an_autocast_is_unsafe(target: str) -> None:
    body = (
        "def type_of(device):\n    return str(device).split(':', 1)[0]\nkind = type_of({}.get('device', 'cuda'))\n"
        "with torch.autocast(device_type=kind, enabled=True):\n    return x"
    )
    check(program(body), target, changed=False)


@EACH_TARGET
def test_a_device_goes_through_a_helper_of_another_file(target: str) -> None:
    source = (
        "import torch\nfrom pkg.device_utils import resolve_device_type\n\n\ndef f(x, **kwargs):\n"
        '    kind = resolve_device_type(kwargs.get("device", "cuda"))\n'
        "    with torch.autocast(device_type=kind, enabled=True):\n        return x\n"
    )
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_a_fallback_to_the_cpu_that_does_more_is_a_test(target: str) -> None:
    body = (
        "where = 'cuda'\nif where == 'cuda' and not torch.cuda.is_available():\n    where = 'cpu'\n    flag = 3\n"
        "return torch.ones(1, device=where), flag"
    )
    check(program(body), target, changed=False)


@EACH_TARGET
def test_a_default_device_that_no_test_reads_is_ported(target: str) -> None:
    body = "device = {}.get('device', 'cuda')\nreturn torch.ones(1, device=device)"
    check(program(body), target, changed=True)
