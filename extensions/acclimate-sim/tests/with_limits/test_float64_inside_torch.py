"""torch's own Python code that uses float64 works on a device without float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from acclimate import get_accelerator

acc = get_accelerator()
x = torch.tensor([[1.5, -2.0], [1e-9, 3e9]])

SHOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda t: t,
    "one value": lambda t: t[0, 0],
    "no values": lambda t: t[:0],
    "float16": lambda t: t.half(),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "scales of float8": lambda t: t.to(torch.uint8).view(torch.float8_e8m0fnu),
    "packed float4": lambda t: t.to(torch.uint8).view(torch.float4_e2m1fn_x2),
    "int64": lambda t: t.long(),
    "bool": lambda t: t > 0,
    "complex64": lambda t: torch.complex(t, -t),
    "a lazy conjugate": lambda t: torch.complex(t, t).conj(),
    "a lazy negative": lambda t: torch.complex(t, t).conj().imag,
    "nan and inf": lambda t: t / 0 * torch.tensor([[1, 0], [1, 1]], device=t.device),
    "more than fits": lambda t: t.repeat(40, 40),
    "not contiguous": lambda t: t.T[:, 1:],
    "a Parameter": lambda t: torch.nn.Parameter(t),
    "a result with a gradient": lambda t: t.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("make", SHOWN.values(), ids=SHOWN)
def test_a_tensor_prints_as_on_the_host_with_its_device(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    on_sim = make(x.to("sim"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = repr(make(x))
    shown = repr(on_sim)
    assert "device='sim:0'" in shown
    values = shown.split(", device=")[0].rstrip(",\n ")
    assert expected.startswith(values.split(",\n       device=")[0])


def test_a_tensor_prints_inside_vmap_and_forward_derivatives() -> None:
    on_sim = x.to("sim")
    seen: list[str] = []
    torch.func.vmap(lambda row: (seen.append(repr(row)), row)[1])(on_sim)
    torch.func.jvp(lambda t: (seen.append(repr(t)), t)[1], (on_sim,), (on_sim,))
    assert all("1.5" in text for text in seen)
    assert len(seen) == 2


def test_the_users_own_float64_is_still_refused() -> None:
    with pytest.raises(TypeError, match="has no Double"):
        x.to("sim").double()


def test_torchs_own_gradient_scaler_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, device="sim"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]
