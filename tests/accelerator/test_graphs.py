"""A replay gives the results of the same code on the same inputs, or raises; results are never stale."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate.backends.cpu import CPUAccelerator
from acclimate.errors import GraphCaptureError, UnsupportedError
from fresh_process import FreshProcesses
from quick_parameters import quick

ACC = CPUAccelerator()


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def capture(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Any]:
    graph = ACC.create_graph()
    with ACC.capture_to_graph(graph):
        outputs = function(*inputs)
    return graph, outputs


def fresh_inputs(count: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def assert_replays(function: Callable[..., Any], inputs: list[Tensor] | None = None) -> None:
    """Captures, then gives the inputs new values twice; each replay has to give what `function` gives."""
    inputs = fresh_inputs() if inputs is None else inputs
    places = [tensor.detach() for tensor in inputs]  # the code may give an input another shape
    shapes = [tensor.clone() for tensor in inputs]
    graph, outputs = capture(function, *inputs)
    for seed in (1, 2):
        values = [
            value if shape.is_floating_point() else shape
            for value, shape in zip(fresh_inputs(len(inputs), seed), shapes, strict=True)
        ]
        expected_inputs = [value.to(shape.dtype).clone() for value, shape in zip(values, shapes, strict=True)]
        expected = tensors(function(*expected_inputs))
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        ACC.replay_graph(graph)
        assert len(tensors(outputs)) == len(expected) > 0
        for ours, theirs in zip([*tensors(outputs), *inputs], [*expected, *expected_inputs], strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


# -- on every accelerator ------------------------------------------------------------------------------


def test_a_replay_computes_on_what_the_inputs_hold_now(acc: Accelerator) -> None:
    x = torch.ones(2, 2, device=acc.device_name())
    graph = acc.create_graph()
    with acc.capture_to_graph(graph):
        y = (x @ x + 1) * 2
    x.fill_(3.0)
    acc.replay_graph(graph)
    assert y.cpu().tolist() == [[38.0, 38.0], [38.0, 38.0]]


def test_capturing_is_told_inside_and_nowhere_else(acc: Accelerator) -> None:
    assert acc.is_current_stream_capturing() is False
    with acc.capture_to_graph(acc.create_graph()):
        assert acc.is_current_stream_capturing() is True
        seen = []
        thread = threading.Thread(target=lambda: seen.append(acc.is_current_stream_capturing()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert acc.is_current_stream_capturing() is False


def test_what_is_no_graph_is_refused(acc: Accelerator) -> None:
    with pytest.raises(GraphCaptureError, match=r"str is not a graph .* create_graph\(\)"):
        acc.capture_to_graph("graph")


# -- what replays right ----------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@torch.library.custom_op("acclimate_tests::add_and_count", mutates_args=("counts",))
def add_and_count(x: Tensor, counts: Tensor) -> Tensor:
    counts += 1
    return x + counts


@torch.library.custom_op("acclimate_tests::two_scales", mutates_args=())
def two_scales(xs: list[Tensor], scale: float) -> list[Tensor]:
    return [x * scale for x in xs]


def slices_written(a: Tensor, b: Tensor) -> Any:
    target = torch.zeros(4, 4)
    target[1:3] = a[:2]
    target[:, 0] += b[0]
    target[a > 0] = 3.0
    target[0, torch.tensor([1, 2])] = b[0, :2]
    return target, target[1], target.t()


def in_place_chain(a: Tensor, b: Tensor) -> Any:
    c = a.clone()
    c.mul_(2).add_(b).clamp_(-1, 1)
    c += b
    a.sub_(1)
    return c, a


def shape_changed_in_place(a: Tensor, b: Tensor) -> Any:
    c = a * 2
    before = c + b
    c.t_()
    between = c + b
    c.unsqueeze_(0).squeeze_(0)
    c.transpose_(0, 1)
    return before, between, c, c + b


def input_shape_changed_in_place(a: Tensor, b: Tensor) -> Any:
    first = a + b
    a.t_()
    return first, a + b


def memory_exchanged(a: Tensor, b: Tensor) -> Any:
    c = torch.zeros(4, 4)
    first = c + a
    c.set_(a * 3)
    second = c + b
    c.data = b * 2
    return first, second, c + 1


def memory_resized(a: Tensor, b: Tensor) -> Any:
    c = torch.empty(0)
    c.resize_(4, 4)
    c.copy_(a)
    d = torch.empty(0)
    torch.mul(a, b, out=d)
    return c, d + c


def constants_worked_on(a: Tensor, b: Tensor) -> Any:
    total = torch.tensor(0.0)
    total += a.sum()
    legacy = torch.FloatTensor([0.0])
    legacy += b.sum()
    made = a.new_tensor([1.0, 2.0])
    made *= a[0, 0]
    listed = torch.as_tensor([1.0])
    listed.add_(a.max())
    return total, legacy, made, listed, total * 2


def outputs_given(a: Tensor, b: Tensor) -> Any:
    out, values, indices = torch.empty(4, 4), torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.add(a, b, alpha=2, out=out)
    torch.max(a, 1, out=(values, indices))
    return out, values, indices, torch.cumsum(a, 0, out=torch.empty(0))


def many_outputs(a: Tensor, b: Tensor) -> Any:
    u, s, v = torch.linalg.svd(a @ b)
    values, indices = torch.topk(a, 2)
    return (u @ torch.diag(s) @ v, [torch.var_mean(a, 0), {"top": (values, [indices])}], torch.sort(b, 1))


def lists_of_tensors(a: Tensor, b: Tensor) -> Any:
    parts = torch.split(a, [1, 3])
    joined = torch.cat([b, *parts])
    added = torch._foreach_add([a, b], 1.0)
    torch._foreach_mul_(added, [b, a])
    pieces = [a.clone(), b.clone()]
    torch._foreach_add_(pieces, added)
    listed = [a, b]
    stacked = torch.stack(listed)
    listed.clear()  # the list is the caller's
    return joined, added, pieces, stacked, torch.unbind(b), torch.chunk(a, 2)


def aliases(a: Tensor, b: Tensor) -> Any:
    return a, a.view(16), a.detach(), a[1:].t(), b.expand(2, 4, 4), b.as_strided((2, 2), (4, 1))


def factories(a: Tensor, b: Tensor) -> Any:
    grid = torch.arange(4.0) + torch.linspace(0, 1, 4)
    return (
        a + grid,
        torch.full_like(b, 2.0) * b,
        torch.zeros(2).add_(a[0, 0]),
        torch.eye(4) @ a,
        b.new_ones(2),
    )


def conjugates(a: Tensor, b: Tensor) -> Any:
    c = torch.complex(a, b)
    return torch.view_as_real(c.conj() * 1j), c.conj(), c.imag, torch.fft.fft(c).abs()


def custom_operators(a: Tensor, b: Tensor) -> Any:
    counts = b.clone()
    return add_and_count(a, counts), counts, two_scales([a, b], 2.0), Square.apply(a)


def transforms(a: Tensor, b: Tensor) -> Any:
    return torch.vmap(torch.dot)(a, b), torch.func.grad(lambda x: (x**3).sum())(a)


def deep_copies(a: Tensor, b: Tensor) -> Any:
    return copy.deepcopy(a) * 2, copy.copy(b) + 1


def sparse(a: Tensor, b: Tensor) -> Any:
    ones = torch.ones(4, 4).to_sparse()
    return torch.sparse.mm(ones, a), (ones * 2).to_dense() + b


def autocast(a: Tensor, b: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return a @ b, (a @ b).float()


def in_inference_mode(a: Tensor, b: Tensor) -> Any:
    with torch.inference_mode():
        c = nn.functional.linear(a, b).relu_()
        c[0] = 1.0
        return c, nn.functional.scaled_dot_product_attention(a[None], b[None], a[None])


def marked(a: Tensor, b: Tensor) -> Any:
    with torch.profiler.record_function("mark"), ACC.nvtx.range("other"):
        return a + b


RIGHT = (
    slices_written,
    in_place_chain,
    shape_changed_in_place,
    input_shape_changed_in_place,
    memory_exchanged,
    memory_resized,
    constants_worked_on,
    outputs_given,
    many_outputs,
    lists_of_tensors,
    aliases,
    factories,
    conjugates,
    custom_operators,
    transforms,
    deep_copies,
    sparse,
    autocast,
    in_inference_mode,
    marked,
)


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_a_replay_gives_what_the_code_gives(function: Callable[..., Any]) -> None:
    assert_replays(function)


FORBIDDEN_IN_INFERENCE = {memory_exchanged, transforms}  # by torch


@pytest.mark.parametrize(
    "function",
    [function for function in RIGHT if function not in FORBIDDEN_IN_INFERENCE],
    ids=lambda function: function.__name__,
)
def test_a_replay_gives_what_the_code_gives_in_inference_mode(function: Callable[..., Any]) -> None:
    with torch.inference_mode():
        assert_replays(function)


@given(data=st.data())
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_any_program_replays_to_what_it_gives(data: st.DataObject) -> None:
    program = data.draw(
        st.lists(st.tuples(st.sampled_from(sorted(STEPS)), *[st.integers(0, 9)] * 2), max_size=14)
    )

    def run(a: Tensor, b: Tensor) -> list[Tensor]:
        pool = [a, b, a @ b]
        for step, first, second in program:
            pool += STEPS[step](pool[first % len(pool)], pool[second % len(pool)])
        return pool

    assert_replays(run)


def _written(x: Tensor, y: Tensor) -> list[Tensor]:
    with torch.no_grad():
        x[1:3, 0] = y[0, 1:3].clone()
    return []


def _joined(x: Tensor, y: Tensor) -> list[Tensor]:
    return [part.contiguous() for part in torch.split(torch.cat([x, y]), 4)]


def _given(x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.mul(x, y, out=torch.empty(4, 4)).tanh_()]


def _counted(x: Tensor, y: Tensor) -> list[Tensor]:
    count = torch.tensor([[1.0]] * 4)
    count += x.mean()
    return [count.expand(4, 4) * y]


def _exchanged(x: Tensor, y: Tensor) -> list[Tensor]:
    made = torch.zeros(4, 4)
    before = made + x
    made.set_(y)
    return [before, made]


STEPS: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "add": lambda x, y: [x + y],
    "bounded": lambda x, y: [torch.tanh(x @ y)],
    "compare": lambda x, y: [torch.where(x > y, x, -y)],
    "count": _counted,
    "detach": lambda x, y: [x.detach()],
    "exchange": _exchanged,
    "in place": lambda x, y: [x.mul_(0.5).add_(y.clone(), alpha=0.5)][:0],
    "into given": _given,
    "join": _joined,
    "normalise": lambda x, y: [torch.softmax(x, -1), torch.var_mean(y, 0)[0].expand(4, 4).contiguous()],
    "sort": lambda x, y: [torch.sort(x, 1)[0], torch.topk(y, 4)[0]],
    "transpose": lambda x, y: [x.t()],
    "transpose in place": lambda x, y: [x.t_()][:0],
    "view": lambda x, y: [x.flatten().view(4, 4)],
    "write": _written,
    "write where": lambda x, y: [x.masked_fill_((y > 0.5).clone(), 0.25)][:0],
}


# -- training ------------------------------------------------------------------------------------------


def model_and_optimizer(
    make: Callable[..., torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    return model, make(model.parameters())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, a: Tensor, b: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    return loss.detach()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", quick(tuple(OPTIMIZERS), "SGD momentum", "Adam fused"))
def test_a_training_step_replays_as_the_next_step(name: str) -> None:
    model, optimizer = model_and_optimizer(OPTIMIZERS[name])
    twin, twins_optimizer = model_and_optimizer(OPTIMIZERS[name])
    a, b = fresh_inputs()
    for _ in range(2):  # the first step makes the optimizer's state
        train_step(model, optimizer, a, b)
        train_step(twin, twins_optimizer, a, b)
    graph, loss = capture(lambda x, y: train_step(model, optimizer, x, y), a, b)
    train_step(twin, twins_optimizer, a, b)
    for seed in range(1, 5):
        for place, value in zip((a, b), fresh_inputs(2, seed), strict=True):
            place.copy_(value)
        expected = train_step(twin, twins_optimizer, a, b)
        ACC.replay_graph(graph)
        torch.testing.assert_close(loss, expected)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (torch.optim.AdamW, torch.optim.RAdam, torch.optim.NAdam)
        ),
    ],
)
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_counts_steps_in_python_is_refused(
    make: Callable[..., torch.optim.Optimizer], foreach: bool
) -> None:
    model, optimizer = model_and_optimizer(lambda p: make(p, foreach=foreach))
    a, b = fresh_inputs()
    train_step(model, optimizer, a, b)
    with pytest.raises(GraphCaptureError, match="reads a value back"):
        capture(lambda x, y: train_step(model, optimizer, x, y), a, b)


def test_gradients_accumulate_over_replays() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    weight.grad = torch.zeros(4, 4)
    (a,) = fresh_inputs(1)
    graph, _ = capture(lambda x: (weight * x).sum().backward(), a)
    a.fill_(2.0)
    weight.grad.zero_()
    for _ in range(3):
        ACC.replay_graph(graph)
    assert weight.grad.tolist() == torch.full((4, 4), 6.0).tolist()


def test_higher_derivatives_and_double_backward_replay() -> None:
    def second_derivative(a: Tensor, b: Tensor) -> Tensor:
        x = a.detach().requires_grad_()
        (first,) = torch.autograd.grad((x**3 * b).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert_replays(second_derivative)


def test_a_custom_function_is_differentiated_in_a_replay() -> None:
    def gradient(a: Tensor) -> Tensor | None:
        x = a.detach().requires_grad_()
        Square.apply(x).sum().backward()
        return x.grad

    assert_replays(gradient, fresh_inputs(1))


def test_checkpointed_activations_replay() -> None:
    def gradient(a: Tensor, b: Tensor) -> Tensor | None:
        x = a.detach().requires_grad_()
        checkpoint(lambda t: torch.tanh(t @ b), x, use_reentrant=False).sum().backward()
        return x.grad

    assert_replays(gradient)


def test_a_backward_pass_after_a_replay_is_not_stale() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    (a,) = fresh_inputs(1)
    graph, loss = capture(lambda x: (weight * torch.exp(x)).sum(), a)
    a.fill_(0.0)
    ACC.replay_graph(graph)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- random numbers ------------------------------------------------------------------------------------


def draws(a: Tensor, b: Tensor) -> Any:
    return (
        torch.randn(4, 4),
        nn.functional.dropout(torch.ones(64), 0.5),
        torch.empty(8).uniform_(),
        torch.randperm(16),
        torch.bernoulli(torch.full((32,), 0.5)),
        torch.multinomial(torch.ones(16), 8),
    )


def test_each_replay_draws_fresh_numbers() -> None:
    graph, outputs = capture(draws, *fresh_inputs())
    seen = [[tensor.clone() for tensor in outputs]]
    for _ in range(2):
        ACC.replay_graph(graph)
        seen.append([tensor.clone() for tensor in outputs])
    for position in range(len(outputs)):
        first, second, third = (numbers[position] for numbers in seen)
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)


def test_a_replay_draws_what_the_code_would_draw() -> None:
    graph, outputs = capture(draws, *fresh_inputs())
    torch.manual_seed(7)
    expected = draws(*fresh_inputs())
    torch.manual_seed(7)
    ACC.replay_graph(graph)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


def test_a_replays_dropout_drops_in_the_backward_pass_what_it_dropped_before() -> None:
    x = torch.ones(256, requires_grad=True)

    def step() -> Tensor:
        x.grad = None
        y = nn.functional.dropout(x * 1, 0.5)
        y.sum().backward()
        return y

    graph, y = capture(step)
    for _ in range(2):
        ACC.replay_graph(graph)
        assert x.grad is not None
        assert torch.equal(y, x.grad)
        assert 0 < (y == 0).sum() < 256


def seeded_inside(a: Tensor) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(4, 4) * a


def state_set_inside(a: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.randn(4, 4)
    torch.set_rng_state(state)
    return first + torch.randn(4, 4)


def state_restored_after(a: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return torch.randn(4, 4) * a


def generator_of_ones_own(a: Tensor) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) * a


def checkpointed_dropout(a: Tensor) -> Tensor | None:
    x = a.detach().requires_grad_()
    checkpoint(lambda t: nn.functional.dropout(t, 0.5), x, use_reentrant=False).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    "function",
    [seeded_inside, state_set_inside, state_restored_after, generator_of_ones_own, checkpointed_dropout],
    ids=lambda function: function.__name__,
)
def test_a_generator_set_inside_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(GraphCaptureError, match=r"generator"):
        capture(function, *fresh_inputs(1))


def test_seeding_in_a_capture_that_draws_nothing_is_fine() -> None:
    def function(a: Tensor) -> Tensor:
        torch.manual_seed(3)
        return a * 2

    assert_replays(function, fresh_inputs(1))


def test_the_default_generator_may_be_named() -> None:
    graph, y = capture(lambda: torch.rand(8, generator=torch.default_generator))
    before = y.clone()
    ACC.replay_graph(graph)
    assert not torch.equal(y, before)


# -- what depends on data ------------------------------------------------------------------------------

DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: torch.nonzero(x > 0),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "masked_select out": lambda x: torch.masked_select(x, x > 0, out=torch.empty(0)),
    "index by mask": lambda x: x[x > 0].sum(),
    "unique": lambda x: torch.unique((x > 0).int() * torch.arange(1, 17).view(4, 4)),
    "bincount": lambda x: torch.bincount(x.sum().long().view(1)),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0], (x[0] > 0).long() + 1),
}
POSITIVE, MIXED = torch.ones(4, 4), torch.tensor([[1.0, 1.0, 1.0, -1.0]] * 4)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_shape_that_depends_on_data_is_never_stale(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = MIXED.clone()
        graph, output = capture(DEPENDENT[name], x)
        x.copy_(POSITIVE)
        with pytest.raises(GraphCaptureError, match="fixed shapes"):
            ACC.replay_graph(graph)
        x.copy_(MIXED.flip(1))  # as many elements as in the capture
        ACC.replay_graph(graph)
        assert torch.equal(output, DEPENDENT[name](x))


@pytest.mark.parametrize("inference", [False, True])
def test_a_view_whose_place_depends_on_data_is_never_stale(inference: bool) -> None:
    with torch.inference_mode(inference):
        x, start = torch.arange(8.0), torch.tensor(2)
        try:
            graph, _ = capture(lambda: x.narrow(0, start, 3))
        except GraphCaptureError:
            return
        start.fill_(4)
        with pytest.raises(GraphCaptureError, match="strides and offset"):
            ACC.replay_graph(graph)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x * x[0, 0].item(),
    "tolist": lambda x: x * x.tolist()[0][0],
    "bool": lambda x: x * 2 if x.sum() > 0 else x,
    "any": lambda x: x * 2 if torch.any(x > 0) else x,
    "int": lambda x: x[: int(x[0, 0] > 0)],
    "float": lambda x: x * float(x[0, 0]),
    "index": lambda x: x[(x[0, 0] > 0).long()],
    "range": lambda x: [x * i for i in range((x[0, 0] > 0).long())],
    "contains": lambda x: x * (1.0 in x),
    "numpy": lambda x: x * float(x.numpy()[0, 0]),
    "array": lambda x: x * float(np.asarray(x)[0, 0]),
    "dlpack": lambda x: np.from_dlpack(x),
    "print": lambda x: print(x),  # noqa: T201 - what is refused
    "format": lambda x: f"{x[0, 0]}",
    "equal": lambda x: x * torch.equal(x, x),
    "allclose": lambda x: x * torch.allclose(x, x),
    "arange": lambda x: torch.arange((x[0, 0] > 0).long() + 1),
    "alpha": lambda x: torch.add(x, x, alpha=x[0, 0]),
    "one_hot": lambda x: nn.functional.one_hot((x > 0).long()),
    "tensor_split": lambda x: x.tensor_split((x[0] > 0).long()[:1]),
    "tensor_split function": lambda x: torch.tensor_split(x, (x[0] > 0).long()[:1]),
    "packed sequence": lambda x: nn.utils.rnn.pack_padded_sequence(x, (x[0] > 0).long() + 1, True, False),
    "ctc_loss": lambda x: nn.functional.ctc_loss(
        x.log_softmax(1)[:, None], torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1])
    ),
}
# In inference mode torch records these as one operator each, which a replay runs anew.
WHOLE_IN_INFERENCE = {"one_hot"}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_value_read_back_to_the_host_is_refused(name: str, inference: bool) -> None:
    with torch.inference_mode(inference and name not in WHOLE_IN_INFERENCE):
        x = torch.ones(4, 4)
        with pytest.raises(GraphCaptureError, match="reads a value back to the host"):
            capture(READS[name], x)
        assert not ACC.is_current_stream_capturing()
        assert x.sum().item() == 16, "the refusal outlives the capture"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_that_branches_on_a_value_is_refused() -> None:
    def branch(x: Tensor) -> Tensor:
        return x * 2 if bool(x.sum() > 0) else x

    with pytest.raises(RuntimeError, match="TorchScript"):
        capture(torch.jit.script(branch), torch.ones(2))


def test_a_refusal_says_what_to_keep_out() -> None:
    with pytest.raises(GraphCaptureError, match=r"move \.item\(\), \.tolist\(\), \.numpy\(\), print"):
        capture(lambda x: x.tolist(), torch.ones(2))


def test_a_custom_operator_that_gives_numbers_is_refused() -> None:
    @torch.library.custom_op("acclimate_tests::total", mutates_args=())
    def total(x: Tensor) -> float:
        return float(x.sum())

    with pytest.raises(GraphCaptureError, match="total"):
        capture(total, torch.ones(2))


def test_what_a_tensor_looks_like_may_be_asked() -> None:
    def function(x: Tensor) -> Tensor:
        assert x.shape == (4, 4)
        assert x.is_contiguous()
        assert not x.is_pinned()
        assert x.numel() == len(x) ** 2
        assert x.is_floating_point()
        assert x.stride(0) * x.element_size() == 16
        return x * x.dim()

    assert_replays(function, fresh_inputs(1))


# -- memory shared with others -----------------------------------------------------------------------------


def test_numpy_arrays_over_inputs_and_outputs_see_the_replay() -> None:
    x = torch.zeros(4)
    graph, y = capture(lambda: x * 2)
    source, result = x.numpy(), y.numpy()
    source[:] = [1, 2, 3, 4]
    ACC.replay_graph(graph)
    assert result.tolist() == [2, 4, 6, 8]


def test_an_array_taken_in_during_a_capture_is_an_input() -> None:
    array = np.zeros(4, dtype=np.float32)
    graph, y = capture(lambda: torch.from_numpy(array) * 2)
    array[:] = 5
    ACC.replay_graph(graph)
    assert y.tolist() == [10, 10, 10, 10]
    assert array.tolist() == [5, 5, 5, 5]


def test_a_parameter_replaced_after_the_capture_does_not_reach_the_graph() -> None:
    weight = nn.Parameter(torch.ones(2))
    graph, y = capture(lambda: weight * 2)
    weight.data = torch.full((2,), 9.0)
    ACC.replay_graph(graph)
    assert y.tolist() == [2, 2]


def test_a_shape_changed_after_the_capture_does_not_reach_the_graph() -> None:
    x = torch.arange(6.0).view(2, 3)
    graph, y = capture(lambda: x * 2)
    x.t_()
    y.t_()
    x.add_(1)
    ACC.replay_graph(graph)
    assert torch.equal(y, x * 2)


# -- compiled code ---------------------------------------------------------------------------------------


def compiled_function(x: Tensor) -> Tensor:
    return torch.relu(x * 2 + 1).sin() * x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", [False, True])
def test_a_compiled_function_replays_right(backend: str, before: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(compiled_function, backend=backend)
    if before:
        compiled(torch.randn(4, 4))
    assert_replays(compiled, fresh_inputs(1))
    torch.testing.assert_close(compiled(POSITIVE), compiled_function(POSITIVE))


@pytest.mark.slow
def test_a_function_compiled_by_inductor_before_replays_right(fresh: FreshProcesses) -> None:
    fresh.check(
        """
import torch
from acclimate.backends.cpu import CPUAccelerator
acc = CPUAccelerator()
compiled = torch.compile(lambda x: torch.relu(x * 2 + 1).sin() * x)
x = torch.randn(64)
compiled(x)
graph = acc.create_graph()
with acc.capture_to_graph(graph):
    y = compiled(x)
x.copy_(torch.randn(64))
acc.replay_graph(graph)
torch.testing.assert_close(y, compiled(x))
""",
    )


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss, x: loss.backward(),
        pytest.param(
            lambda loss, x: torch.autograd.backward([loss * 2]),
            marks=pytest.mark.skipif(
                "has_torch_function" not in torch.autograd.backward.__code__.co_names,
                reason="torch 2.10 shows a capture no direct call of torch.autograd.backward",
            ),
        ),
        lambda loss, x: torch.autograd.grad(loss, x),
        lambda loss, x: torch.autograd.grad(outputs=[loss + x.sum()], inputs=[x]),
    ],
)
def test_a_backward_pass_compiled_before_is_refused(backward: Callable[[Tensor, Tensor], Any]) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, requires_grad=True)
    loss = torch.compile(compiled_function, backend="aot_eager")(x).sum()
    with pytest.raises(GraphCaptureError, match=r"torch\.compile"):
        capture(lambda: backward(loss, x))


def test_a_backward_pass_not_compiled_is_captured_by_itself() -> None:
    x = torch.ones(4, requires_grad=True)
    loss = (x * x).sum()
    graph, _ = capture(loss.backward)
    assert x.grad is not None
    x.grad.zero_()
    ACC.replay_graph(graph)
    assert x.grad.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("operator", ["cond", "fullgraph"])
def test_what_torch_may_not_show_operator_by_operator_is_an_error_or_replays_right(operator: str) -> None:
    torch._dynamo.reset()
    functions: dict[str, Callable[[Tensor], Any]] = {
        "cond": lambda x: torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)),
        "fullgraph": torch.compile(compiled_function, backend="eager", fullgraph=True),
    }
    x = torch.ones(4)
    with contextlib.suppress(RuntimeError, NotImplementedError):
        graph, y = capture(functions[operator], x)
        x.copy_(torch.tensor([0.5, 1.0, 2.0, 3.0]))
        ACC.replay_graph(graph)
        torch.testing.assert_close(y, functions[operator](x))
    assert not ACC.is_current_stream_capturing()


# -- the life of a graph ---------------------------------------------------------------------------------


def test_a_replay_under_autocast_computes_as_the_capture_did() -> None:
    a, b = fresh_inputs()
    graph, y = capture(torch.mm, a, b)
    a.fill_(1.0)
    with torch.autocast("cpu", torch.bfloat16):
        ACC.replay_graph(graph)
    torch.testing.assert_close(y, a @ b, rtol=0, atol=0)


@pytest.mark.parametrize("inference", [True, False])
def test_a_graph_can_be_replayed_in_the_other_grad_mode(inference: bool) -> None:
    x = torch.zeros(2)
    with torch.inference_mode(inference):
        graph, y = capture(lambda: x + 1)
    x.fill_(4.0)
    with torch.inference_mode(not inference):
        ACC.replay_graph(graph)
    assert y.tolist() == [5, 5]


def test_a_replay_leaves_no_trace_for_autograd() -> None:
    weight = torch.ones(2, requires_grad=True)
    x = torch.ones(2)
    graph, y = capture(lambda: (x * 2).detach())
    ACC.replay_graph(graph)
    assert not y.requires_grad
    (weight * y).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]


def test_a_graph_that_holds_nothing_is_not_replayed(cpu: CPUAccelerator) -> None:
    with pytest.raises(GraphCaptureError, match="holds no capture"):
        cpu.replay_graph(cpu.create_graph())


def test_a_graph_reset_holds_nothing() -> None:
    graph, _ = capture(lambda x: x * 2, torch.ones(2))
    graph.reset()
    with pytest.raises(GraphCaptureError, match="holds no capture"):
        ACC.replay_graph(graph)


def test_an_empty_capture_replays() -> None:
    graph, _ = capture(lambda: None)
    ACC.replay_graph(graph)


def test_a_second_capture_replaces_the_first() -> None:
    x = torch.ones(2)
    graph = ACC.create_graph()
    with ACC.capture_to_graph(graph):
        first = x * 2
    with ACC.capture_to_graph(graph):
        second = x * 3
    x.fill_(2.0)
    ACC.replay_graph(graph)
    assert first.tolist() == [2, 2]
    assert second.tolist() == [6, 6]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_in_a_capture_leaves_the_graph_as_it_was(error: type[BaseException]) -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: x * 2)

    def fail() -> None:
        x.mul_(100)
        raise error

    with pytest.raises(error), ACC.capture_to_graph(graph):
        fail()
    assert not ACC.is_current_stream_capturing()
    x.fill_(5.0)
    ACC.replay_graph(graph)
    assert y.tolist() == [10, 10]
    assert (x * 1).tolist() == [5, 5]


def test_a_capture_within_a_capture_is_refused() -> None:
    x = torch.ones(2)
    outer = ACC.create_graph()
    with ACC.capture_to_graph(outer):
        y = x * 2
        with (
            pytest.raises(GraphCaptureError, match="already in progress"),
            ACC.capture_to_graph(ACC.create_graph()),
        ):
            pass
        z = y + 1
    x.fill_(3.0)
    ACC.replay_graph(outer)
    assert z.tolist() == [7, 7]


def test_a_replay_within_a_capture_becomes_part_of_it() -> None:
    x = torch.ones(2)
    inner, y = capture(lambda: x * 2)
    outer = ACC.create_graph()
    with ACC.capture_to_graph(outer):
        ACC.replay_graph(inner)
        z = y + 1
    x.fill_(3.0)
    ACC.replay_graph(outer)
    assert (y.tolist(), z.tolist()) == ([6, 6], [7, 7])


def test_the_order_of_graphs_is_the_callers() -> None:
    x = torch.ones(2)
    double, _ = capture(lambda: x.mul_(2))
    increment, _ = capture(lambda: x.add_(1))
    x.fill_(1.0)
    for graph in (increment, double, double, increment):
        ACC.replay_graph(graph)
    assert x.tolist() == [9, 9]


def test_captures_in_two_threads_do_not_mix() -> None:
    barrier = threading.Barrier(2)
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        x = torch.ones(2)
        graph = ACC.create_graph()
        with ACC.capture_to_graph(graph):
            y = x
            for _ in range(50):
                barrier.wait(60)
                y = y * 1.0 + number
        x.fill_(100.0)
        ACC.replay_graph(graph)
        results[number] = [y[0].item(), len(graph._calls)]

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [150.0, 100], 2: [200.0, 100]}


def test_one_graph_replayed_by_another_thread_works() -> None:
    x = torch.ones(2)
    graph, y = capture(lambda: x * 2)
    x.fill_(4.0)
    thread = threading.Thread(target=ACC.replay_graph, args=(graph,))
    thread.start()
    thread.join()
    assert y.tolist() == [8, 8]


def test_work_of_other_threads_is_not_captured() -> None:
    x, done = torch.ones(2), torch.zeros(2)

    def work() -> None:
        thread = threading.Thread(target=lambda: done.add_(1))
        thread.start()
        thread.join()
        x.mul_(2)

    graph, _ = capture(work)
    ACC.replay_graph(graph)
    assert (x.tolist(), done.tolist()) == ([4, 4], [1, 1])


def test_a_graph_keeps_what_it_needs_and_lets_go_of_it(cpu: CPUAccelerator) -> None:
    x = torch.ones(2)
    graph = cpu.create_graph()
    assert type(graph) is RecordedGraph

    def chain() -> Tensor:
        return ((x + 1) * 2).exp().log()  # what is in between has no name

    with cpu.capture_to_graph(graph, pool=None, stream=cpu.Stream()):
        y = chain()
    x.fill_(4.0)
    cpu.replay_graph(graph)
    torch.testing.assert_close(y, torch.full((2,), 10.0))


def test_collectives_are_replayed_and_waited_for(fresh: FreshProcesses, tmp_path: Path) -> None:
    fresh.check(
        f"""
import os, torch, torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from acclimate.backends.cpu import CPUAccelerator
child = os.fork()
rank = int(child == 0)
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 2), rank=rank, world_size=2)
acc, x = CPUAccelerator(), torch.ones(1 << 16)
graph = acc.create_graph()
def work():
    total, gathered = x * 2, torch.empty(2 << 16)
    dist.all_reduce(total)
    dist.all_gather_into_tensor(gathered, x)
    dist.barrier()
    return total, gathered, functional.all_reduce(x, "sum", dist.group.WORLD) + 1
with acc.capture_to_graph(graph):
    outputs = work()
for value in range(2, 6):
    x.fill_(value * (rank + 1))
    acc.replay_graph(graph)
    for ours, theirs in zip(outputs, work()):
        assert torch.equal(ours, theirs), (rank, value, ours, theirs)
    assert outputs[0][0].item() == 6 * value
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )


class WithoutGraphs(CPUAccelerator):
    """A backend that says that work cannot be captured."""

    supports_graphs = False


def test_a_device_that_says_it_has_no_graphs_refuses_to_make_one() -> None:
    with pytest.raises(UnsupportedError, match="has no graphs"):
        WithoutGraphs().create_graph()
