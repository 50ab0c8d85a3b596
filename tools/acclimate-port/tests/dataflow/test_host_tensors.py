"""``x.type(torch.cuda.FloatTensor)`` leaves a tensor on its GPU, and moves a tensor of the host to the current one."""

from __future__ import annotations

import pytest

from acclimate_port.engine import Settings, port_text
from porting import EACH_TARGET, program, reasons

HOSTS = [
    "return torch.zeros(3).type(torch.cuda.FloatTensor)",
    "made = torch.from_numpy(other)\nreturn made.float().type(torch.cuda.FloatTensor)",
    "return x.cpu().type(torch.cuda.FloatTensor)",
    "for one, _ in enumerate(torch.utils.data.DataLoader(flag)):\n    pass\n"
    "for images, _ in torch.utils.data.DataLoader(flag):\n    return images.type(torch.cuda.FloatTensor)",
]


@EACH_TARGET
@pytest.mark.parametrize("body", HOSTS)
def test_a_tensor_of_the_host_moves_to_the_accelerator(body: str, target: str) -> None:
    text = port_text(program(body), Settings(target)).text
    name = "get_accelerator().device_name()" if target == "acclimate" else "accelerator_type()"
    assert f".to({name}, torch.float32)" in text


GPUS = [
    "x",
    "self.index",
    "torch.zeros_like(y, dtype=torch.uint8)",
    "torch.ones(3, device=device)",
    "x.half()",
]


@EACH_TARGET
@pytest.mark.parametrize("tensor", GPUS)
def test_a_tensor_that_may_be_on_a_gpu_stays_on_it(tensor: str, target: str) -> None:
    source = program(f"made = {tensor}\nreturn made.type(torch.cuda.FloatTensor)")
    text = port_text(source, Settings(target)).text
    assert 'made.to(made.device if made.device.type != "cpu" else ' in text


@EACH_TARGET
@pytest.mark.parametrize("tensor", [*GPUS[2:], "f(x)"])
def test_a_tensor_without_a_name_that_may_be_on_a_gpu_is_unsafe(tensor: str, target: str) -> None:
    source = program(f"return {tensor}.type(torch.cuda.FloatTensor)")
    ported = port_text(source, Settings(target))
    assert ported.text == source
    assert "moves to the current one" in reasons(ported)


def test_a_class_in_a_name_moves_no_tensor_that_may_be_on_a_gpu() -> None:
    source = "import torch\n\nTensor = torch.cuda.FloatTensor if fast else torch.FloatTensor\nx = images.type(Tensor)\n"
    assert port_text(source, Settings("acclimate")).text == source
