"""A device's name that is also a word of the program's own is not replaced by a safe edit."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET

WORDS = [
    'device = "cuda" if flag else "cpu"\n    return f"python /entrypoint.py --device {device}"',
    'device = "cuda" if flag else "cpu"\n    return "run --device=" + device',
    'device = "cuda" if flag else "cpu"\n    return "run --device {} --all".format(device)',
    'device = "cuda" if flag else "cpu"\n    return "run --device %s" % device',
    'device = "cuda" if flag else "cpu"\n    return ["python", "run.py", "--device", device]',
    'kind_of_device = "cuda"\n    return flag[kind_of_device].size',
    'flag["cuda:0"] += 1\n    return torch.ones(1).to("cuda:0")',
    'free = {"cuda:0": 0}\n    return torch.ones(1, device="cuda:0"), free',
]


@EACH_TARGET
@pytest.mark.parametrize("body", WORDS)
@pytest.mark.parametrize("head", ["import torch\n\n\n", "import torch\nimport yaml\n\n\n"])
def test_a_device_that_is_a_key_or_a_part_of_a_command_stays(body: str, head: str, target: str) -> None:
    source = f"{head}def f(flag):\n    {body}\n"
    assert port_text(source, Settings(target)).text == source


EXPECTED = [
    'opened = flag(torch.ones(1).to("cuda:1"))\n    assert opened == [("shard", "cuda:1")]',
    'x = torch.ones(1, device="cuda")\n    assert flag(x).kwargs == {"where": "cuda"} and flag',
    'x = torch.ones(1, device="cuda")\n    assert flag["where"] == "cuda", x',
]


@EACH_TARGET
@pytest.mark.parametrize("body", EXPECTED)
def test_a_device_that_an_assertion_of_the_same_function_expects_stays(body: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(flag):\n    {body}\n"
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
def test_an_assertion_about_a_device_is_no_word(target: str) -> None:
    source = 'import torch\n\n\ndef f():\n    x = torch.ones(1, device="cuda")\n    assert x.device.type == "cuda"\n'
    assert 'device="cuda"' not in port_text(source, Settings(target, unsafe=True)).text


@EACH_TARGET
def test_a_device_in_a_command_of_a_file_without_torch_stays(target: str) -> None:
    source = 'def f(flag):\n    device = "cuda" if flag else "cpu"\n    return f"run --device {device}"\n'
    assert port_text(source, Settings(target)).text == source


@EACH_TARGET
@pytest.mark.parametrize(
    "body",
    [
        'device = "cuda"\n    print(f"device: {device}")\n    return torch.ones(1, device=device)',
        'device = "cuda"\n    path = f"model-{device}.pt"\n    return torch.ones(1, device=device), path',
        'return torch.load(flag, map_location={"cuda:0": "cpu"}), torch.ones(1, device="cuda:0")',
    ],
)
def test_a_device_in_a_message_a_file_name_or_a_map_location_is_ported(body: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(flag):\n    {body}\n"
    assert port_text(source, Settings(target)).text != source
