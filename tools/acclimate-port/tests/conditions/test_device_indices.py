"""A device whose index only CUDA has is unsafe: elsewhere the index may be None."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, Status, port_text
from porting import EACH_TARGET, reasons

DEVICE = '"cuda" if torch.cuda.is_available() else "cpu"'
UNSAFE = [
    f'place = {DEVICE}\n    return torch.device(place + ":" + str(given.get("gpu_id")) if {{}} else place)',
    f"place = {DEVICE}\n    return torch.device(f\"{{{{place}}}}:{{{{given.get('gpu')}}}}\" if {{}} else place)",
    'index = given.get("cuda_device")\n    return torch.device(f"cuda:{{index}}") if {} else None',
    'return torch.device("cuda:" + str(given.get("gpu_id"))) if {} else torch.device("cpu")',
]


@EACH_TARGET
@pytest.mark.parametrize("lines", UNSAFE)
def test_a_number_of_a_gpu_that_may_be_missing_makes_a_device_unsafe(lines: str, target: str) -> None:
    source = f"import torch\n\n\ndef f(given):\n    {lines.format('torch.cuda.is_available()')}\n"
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert "may be None where there is no CUDA" in reasons(ported)


@pytest.mark.parametrize("index", ['given.get("gpu", 0)', 'given["gpu"]', 'given.get("rank")', "given.gpu"])
def test_an_index_that_each_machine_has_does_not(index: str) -> None:
    source = f'import torch\n\n\ndef f(given):\n    return torch.device(f"cuda:{{{index}}}")\n'
    assert [site.status for site in port_text(source, Settings()).sites] == [Status.CONVERTED]
