"""Features that torch offers only to devices on its lists: flex attention, compiled checkpoints, DLPack."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import CrossRefFakeMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import DLDeviceType


def test_flex_attention_computes_and_trains() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 128, 8, device="sim", requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda batch, head, q, k: q >= k, 1, 1, 128, 128, device="sim")
    found = flex_attention(query, key, value, block_mask=mask)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), query) for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_flex_attention_still_refuses_other_devices() -> None:
    query = torch.randn(1, 1, 16, 16, device="meta")
    with pytest.raises(ValueError, match="only supported on"):
        flex_attention(query, query, query)


@pytest.mark.parametrize(
    "backend",
    [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor")), "sim"],
)
def test_a_checkpoint_drops_the_same_elements_in_backward(backend: str | None) -> None:
    torch._dynamo.reset()

    def block(value: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(value.sin(), 0.5) * value

    def run(value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(block, value, use_reentrant=False)
        return result

    step = torch.compile(run, backend=backend) if backend else run
    value = torch.linspace(0.1, 1, 64, device="sim").requires_grad_()
    results = []
    for compute in (block, step):
        torch.manual_seed(3)
        output = compute(value)
        torch.rand(5, device="sim")  # backward has to draw what forward drew all the same
        results.append((output, torch.autograd.grad(output.sum(), value)[0]))
    torch.testing.assert_close(results[0], results[1])


def test_tensors_go_through_dlpack_without_a_copy() -> None:
    value = torch.arange(6.0, device="sim:1").view(2, 3).t()
    assert value.__dlpack_device__() == (DLDeviceType.kDLExtDev, 1)
    assert torch.ones(1).__dlpack_device__()[0] == DLDeviceType.kDLCPU
    taken = torch.from_dlpack(value)
    assert taken.device == value.device
    taken.zero_()
    assert value.sum() == 0


def test_a_gradient_that_is_not_needed_is_not_computed() -> None:
    query = torch.randn(1, 1, 3, 4, dtype=torch.float64, device="sim", requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda query: nn.functional.scaled_dot_product_attention(query, query * 2, query + 1), query
    )


@pytest.mark.parametrize("weight_shape", [(4, 3, 3, 3), (6, 1, 3, 3)])
def test_torch_predicts_the_strides_of_convolutions(weight_shape: tuple[int, ...]) -> None:
    groups = 3 // weight_shape[1]
    value = torch.randn(2, 3, 8, 8, device="sim", requires_grad=True)
    weight = torch.randn(weight_shape, device="sim", requires_grad=True)
    with CrossRefFakeMode():
        for shaped in (value, value.to(memory_format=torch.channels_last)):
            nn.functional.conv2d(shaped, weight, groups=groups).sum().backward()


def test_a_convolution_over_channels_last_compiles_into_a_view() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)).to("sim")
    value = torch.randn(2, 3, 8, 8, device="sim").to(memory_format=torch.channels_last)
    found, expected = torch.compile(net, backend="aot_eager")(value), net(value)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), list(net.parameters())) for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_torch_predicts_the_results_of_embedding_bags() -> None:
    weight = torch.randn(3, 4, device="sim", requires_grad=True)
    indices = torch.zeros(2, 2, dtype=torch.long, device="sim")
    for mode in ("sum", "mean", "max"):
        with CrossRefFakeMode():
            nn.functional.embedding_bag(indices, weight, mode=mode).sum().backward()
