"""``torch.compile``, ``torch.export`` and fake tensors, with the parts of transformer models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import list_backends, lookup_backend
from torch._dynamo.device_interface import get_interface_for_device
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.compile_fx import compile_fx_aot, compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode

from acclimate_sim.errors import CodeGenerationError

attention = nn.functional.scaled_dot_product_attention


class Block(nn.Module):
    """Attention in the three forms that torch offers."""

    def __init__(self) -> None:
        super().__init__()
        self.multihead = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self.multihead(value, value, value, need_weights=False)[0]
        heads = self.layer(value).view(value.shape[0], value.shape[1], 2, 4).transpose(1, 2)
        result: torch.Tensor = attention(heads, heads, heads, is_causal=True)
        return result.transpose(1, 2).reshape(value.shape)


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()


WAYS: dict[str, Callable[[], Any]] = {
    "eager": lambda: "eager",
    "aot_eager": lambda: "aot_eager",
    "inductor": lambda: "inductor",
    "sim": lambda: "sim",
    "looked_up_inductor": lambda: lookup_backend("inductor"),
    "own_backend_of_inductors_compiler": lambda: aot_autograd(fw_compiler=compile_fx_inner),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("train", [True, False])
def test_a_transformer_compiles_and_recompiles_for_other_shapes(way: str, train: bool) -> None:
    torch.manual_seed(0)
    net = Block().to("sim").train(train)
    compiled = torch.compile(net, backend=WAYS[way]())
    for length in (3, 5, 6):
        value = torch.randn(2, length, 8, device="sim")
        with torch.set_grad_enabled(train):
            found, expected = compiled(value), net(value)
        torch.testing.assert_close(found, expected)
        if train:
            parameters = list(net.parameters())
            grads = [torch.autograd.grad(out.square().sum(), parameters) for out in (found, expected)]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "way", [way if way in ("inductor", "sim") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_attention_compiles_and_recompiles_for_other_shapes(way: str) -> None:
    def loss(query: torch.Tensor) -> torch.Tensor:
        return attention(query, query, query, is_causal=True).square().sum()

    compiled = torch.compile(loss, backend=WAYS[way](), fullgraph=True)
    for length in (3, 5):
        query = torch.randn(1, 2, length, 4, device="sim", requires_grad=True)
        found, expected = (torch.autograd.grad(run(query), query) for run in (compiled, loss))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "reduce-overhead"},
        {"dynamic": True},
        pytest.param({"options": {"max_autotune": True}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mode_of_torch_compile_runs(options: dict[str, Any]) -> None:
    compiled = torch.compile(lambda value: (value * 2).relu(), **options)
    for size in (4, 8):
        value = torch.randn(size, device="sim", requires_grad=True)
        compiled(value).sum().backward()
        assert value.grad is not None


def test_inductor_called_directly_runs_the_graph() -> None:
    graph = torch.fx.symbolic_trace(lambda value: value * 2)
    value = torch.ones(3, device="sim")
    assert torch._inductor.compile(graph, [value])(value).equal(value * 2)


def test_compiling_ahead_of_time_is_refused_with_the_reason() -> None:
    graph = torch.fx.symbolic_trace(lambda value: value * 2)
    with pytest.raises(CodeGenerationError, match="no code generator"):
        compile_fx_aot(graph, [torch.ones(3, device="sim")])


def test_a_graph_on_the_host_still_reaches_inductor() -> None:
    graph = torch.fx.symbolic_trace(lambda value: value * 2)
    reached = []
    compiled = torch._inductor.compile_fx.compile_fx(
        graph, [torch.ones(3)], inner_compile=lambda made, *_, **__: reached.append(made) or made.forward
    )
    assert compiled is not None
    assert reached


def test_a_changed_shape_compiles_once_more() -> None:
    counter = CompileCounterWithBackend("sim")
    compiled = torch.compile(lambda value: value + 1, backend=counter)
    for size, expected in ((4, 1), (4, 1), (8, 2)):
        compiled(torch.randn(size, device="sim"))
        assert counter.frame_count == expected
    assert "sim" in list_backends(exclude_tags=())


def test_dynamo_knows_the_device() -> None:
    interface = get_interface_for_device("sim:1")
    assert interface.device_count() == torch.accelerator.device_count()
    with interface.device("sim:1"):
        assert interface.current_device() == interface.Worker.current_device() == 1
    assert interface.exchange_device(1) == 0
    assert interface.maybe_exchange_device(0) == 1
    assert interface.maybe_exchange_device(-1) == 0
    assert interface.get_device_properties("sim:1").total_memory > 0
    assert interface.is_dtype_supported(torch.bfloat16)
    stream = torch.Stream("sim")
    before = interface.current_stream()
    interface._set_stream_by_id(stream.stream_id, stream.device_index, stream.device_type)
    assert interface.current_stream() == stream
    assert interface.get_raw_stream(0) == stream.stream_id
    interface.set_stream(before)


def test_streams_and_devices_may_be_used_in_a_compiled_function() -> None:
    def step(value: torch.Tensor) -> torch.Tensor:
        with torch.sim.stream(torch.sim.current_stream()):  # type: ignore[attr-defined]
            value = value + 1
        torch.sim.synchronize()  # type: ignore[attr-defined]
        return value * 2

    value = torch.randn(3, device="sim")
    assert torch.compile(step)(value).equal(step(value))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_transformer_is_exported(dynamic: bool) -> None:
    net, value = Block().to("sim"), torch.randn(2, 5, 8, device="sim")
    shapes = {"value": {1: torch.export.Dim("length", min=2)}} if dynamic else None
    exported = torch.export.export(net, (value,), dynamic_shapes=shapes)
    torch.testing.assert_close(exported.module()(value), net(value))
    torch.testing.assert_close(exported.run_decompositions().module()(value), net(value))
    if dynamic:
        torch.testing.assert_close(exported.module()(value[:, :3]), net(value[:, :3]))


def test_multihead_attention_is_exported() -> None:
    net, value = nn.MultiheadAttention(8, 2, batch_first=True).to("sim"), torch.randn(2, 5, 8, device="sim")
    exported = torch.export.export(net, (value,) * 3)
    torch.testing.assert_close(exported.module()(value, value, value), net(value, value, value))


def test_fake_tensors_go_through_attention() -> None:
    with FakeTensorMode():
        query = torch.randn(2, 4, 8, 16, device="sim", requires_grad=True)
        output = attention(query, query, query, is_causal=True)
        output.sum().backward()
        layer = nn.TransformerEncoderLayer(16, 4, 32, device="sim")
        assert layer(query[0]).device == output.device == torch.device("sim:0")
        assert layer.eval()(query[0]).shape == (4, 8, 16)


def test_what_is_compiled_draws_the_numbers_of_eager() -> None:
    def drop(value: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(value, 0.5)

    value = torch.ones(64, device="sim")
    torch.manual_seed(1)
    expected = drop(value)
    torch.manual_seed(1)
    assert torch.compile(drop)(value).equal(expected)
