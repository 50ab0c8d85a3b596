"""The device's fused attention, and torch's transforms over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch._subclasses import CrossRefFakeMode
from torch.nn.attention import SDPBackend, sdpa_kernel

attention = nn.functional.scaled_dot_product_attention
fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable


def inputs(*shape: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, device="sim", **options) for _ in range(3)]


def composed(*arguments: Any, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        result: torch.Tensor = attention(*arguments, **options)
    return result


def test_the_device_has_an_attention_of_its_own() -> None:
    query, key, value = inputs(1, 2, 4, 8)
    assert torch._fused_sdp_choice(query, key, value) == SDPBackend.OVERRIDEABLE.value
    assert torch._fused_sdp_choice(query, key, value, dropout_p=0.5) == SDPBackend.MATH.value


@pytest.mark.parametrize("allowed", [SDPBackend.OVERRIDEABLE, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_the_user_chooses_the_algorithm(allowed: SDPBackend) -> None:
    query, key, value = inputs(1, 2, 4, 8)
    with sdpa_kernel(allowed):
        chosen = torch._fused_sdp_choice(query, key, value)
    expected = SDPBackend.MATH if allowed == SDPBackend.MATH else SDPBackend.OVERRIDEABLE
    assert chosen == expected.value
    assert torch.backends.cuda.flash_sdp_enabled()


def layouts() -> dict[str, list[torch.Tensor]]:
    packed = torch.randn(2, 6, 3 * 8, device="sim", requires_grad=True)
    return {
        "dense": inputs(2, 2, 6, 4, requires_grad=True),
        "transposed": [tensor.transpose(1, 2) for tensor in inputs(2, 6, 2, 4, requires_grad=True)],
        "packed": [part.view(2, 6, 2, 4).transpose(1, 2) for part in packed.split(8, 2)],
    }


@pytest.mark.parametrize("layout", ["dense", "transposed", "packed"])
def test_results_have_the_strides_that_torch_predicts(layout: str) -> None:
    with CrossRefFakeMode():
        attention(*layouts()[layout], is_causal=True).sum().backward()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [2, 4])
def test_a_bias_gets_the_gradient_of_the_composed_attention(causal: bool, heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, device="sim")
    key, value = (torch.randn(2, heads, 5, 8, device="sim") for _ in range(2))
    shapes = ((5, 5), (1, 4, 1, 5))
    for shape in shapes:
        bias = torch.randn(shape, device="sim", requires_grad=True)
        whole = bias.expand(2, 4, 5, 5)
        seen = torch.ones(5, 5, dtype=torch.bool, device="sim").tril() if causal else None
        masked = whole if seen is None else whole.masked_fill(seen.logical_not(), float("-inf"))
        repeated = [part.repeat_interleave(4 // heads, 1) for part in (key, value)]
        expected = composed(query, *repeated, attn_mask=masked)
        found = fused(query, key, value, bias, is_causal=causal)[0]
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (found, expected)]
        torch.testing.assert_close(*grads)


def test_dropout_in_the_fused_attention_is_refused() -> None:
    query, key, value = inputs(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="has no dropout"):
        fused(query, key, value, dropout_p=0.5)
    assert attention(query, key, value, dropout_p=0.5).device.type == "sim"


def test_vmap_equals_a_loop() -> None:
    queries, keys, values = inputs(3, 2, 2, 4, 8)
    expected = torch.stack([attention(*qkv) for qkv in zip(queries, keys, values, strict=True)])
    torch.testing.assert_close(torch.vmap(attention)(queries, keys, values), expected)


def test_gradients_by_transforms_equal_autograds() -> None:
    query, key, value = inputs(3, 2, 4, 8)
    leaf = query.clone().requires_grad_()
    attention(leaf, key, value).square().sum().backward()

    def loss(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(query, key, value).square().sum()

    for found in (
        torch.func.grad(loss)(query, key, value),
        torch.vmap(torch.func.grad(loss))(query, key, value),
        torch.func.jacrev(loss)(query, key, value),
        torch.func.jacfwd(loss)(query, key, value),
    ):
        torch.testing.assert_close(found, leaf.grad)
    assert torch.func.hessian(loss)(query[:1], key[:1], value[:1]).shape == (1, 2, 4, 8) * 2


def test_a_forward_derivative_is_the_difference_quotient() -> None:
    query, key, value = inputs(1, 1, 3, 4, dtype=torch.float64)
    step = torch.randn_like(query)
    _, found = torch.func.jvp(lambda query: attention(query, key, value), (query,), (step,))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(attention(forward_ad.make_dual(query, step), key, value))
    h = 1e-6
    quotient = (attention(query + h * step, key, value) - attention(query - h * step, key, value)) / (2 * h)
    torch.testing.assert_close(found, quotient, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dual.tangent, found)


@pytest.mark.parametrize(
    "net", [nn.MultiheadAttention(8, 2, batch_first=True), nn.TransformerEncoderLayer(8, 2, 8)]
)
def test_transforms_go_through_layers(net: nn.Module) -> None:
    net = net.to("sim").eval()
    parameters = dict(net.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        arguments = (value,) * 3 if isinstance(net, nn.MultiheadAttention) else (value,)
        output = torch.func.functional_call(net, parameters, arguments)
        return (output[0] if isinstance(output, tuple) else output).sum()

    value = torch.randn(2, 3, 4, 8, device="sim")
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, value)
    assert all(grads[name].shape == (2, *parameter.shape) for name, parameter in parameters.items())


def test_jagged_tensors_go_through_attention_and_back() -> None:
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    expected = []
    for part in parts:
        heads = part.view(1, -1, 2, 4).transpose(1, 2)
        expected.append(attention(heads, heads, heads).transpose(1, 2).reshape(-1, 8))
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, device="sim", requires_grad=True)
    heads = nested.unflatten(-1, (2, 4)).transpose(1, 2)
    output = attention(heads, heads, heads).transpose(1, 2).flatten(-2)
    for found, wanted in zip(output.unbind(), expected, strict=True):
        torch.testing.assert_close(found.cpu(), wanted)
    output.values().sum().backward()
    assert nested.grad is not None


def test_nested_tensors_train_and_move() -> None:
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    results = []
    layer = nn.Linear(8, 8)
    for device in ("cpu", "sim"):
        nested = torch.nested.nested_tensor(parts, device=device, requires_grad=True)
        output = layer.to(device)(nested * 2).to_padded_tensor(0.0)
        grads = torch.autograd.grad(output.square().sum(), [nested, *layer.parameters()])
        assert nested.to("cpu").device.type == "cpu"
        assert nested.to("sim:1").device == torch.device("sim:1")
        results.append([output.cpu(), *grads[0].cpu().unbind(), *(grad.cpu() for grad in grads[1:])])
    torch.testing.assert_close(results[0], results[1])


def test_an_encoder_with_padding_takes_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0).eval()
    net, value = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 4, 8)
    padding = torch.tensor([[False, False, True, True], [False] * 4])
    with torch.no_grad():
        expected = net(value, src_key_padding_mask=padding)
        found = net.to("sim")(value.to("sim"), src_key_padding_mask=padding.to("sim"))
    torch.testing.assert_close(found.cpu(), expected)
