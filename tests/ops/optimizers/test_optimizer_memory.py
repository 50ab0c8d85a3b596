"""What the optimizers assume about memory: layouts, shared elements, moved parameters, and copies.

Runs on this process's accelerator; the tests of acclimate-sim run it on sim.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, Case, give_gradients, parameters
from torch import Tensor

from acclimate import get_accelerator
from acclimate.errors import UnsupportedParameterError
from acclimate.ops import FusedLamb
from quick_parameters import quick

DEVICE = get_accelerator().current_device_name()
USED = {case.name: case for case in CASES if DEVICE == "cpu" or not case.name.startswith("CPU")}
for_all_optimizers = pytest.mark.parametrize(
    "case", quick(USED, *(("CPUAdam", "FusedLamb") if DEVICE == "cpu" else USED))
)

SHAPE = (4, 6, 5, 3)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda value: value.contiguous(),
    "channels_last": lambda value: value.contiguous(memory_format=torch.channels_last),
    "reversed": lambda value: value.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every second": lambda value: value.repeat_interleave(2, 3)[..., ::2],
    "at an offset": lambda value: torch.cat([value, value])[len(value) :],
    "expanded": lambda value: value[:, :1].expand(SHAPE),
}


def values(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def on_the_device(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Any]:
    return [torch.nn.Parameter(parameter.detach().to(DEVICE)) for parameter in parameters(shapes, dtype)]


def close(ours: Any, theirs: Any) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), reference.detach().cpu(), rtol=3e-6, atol=3e-6)


# -- layouts -----------------------------------------------------------------------------------------


@for_all_optimizers
def test_every_layout_of_a_parameter_works_with_every_layout_of_its_gradient(case: Case) -> None:
    pairs = [(p, g) for p in LAYOUTS if p != "expanded" for g in LAYOUTS]
    start = values(0)
    ours = [torch.nn.Parameter(LAYOUTS[layout](start.clone())) for layout, _ in pairs]
    theirs = [torch.nn.Parameter(start.cpu().clone()) for _ in pairs]
    mine = case.ours(ours, lr=1e-2, weight_decay=0.1)
    reference = case.reference(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for a, b, (_, layout) in zip(ours, theirs, pairs, strict=True):
            gradient = LAYOUTS[layout](values(step + 1))
            a.grad, b.grad = gradient, gradient.cpu().contiguous()
        mine.step()
        reference.step()
    close(ours, theirs)


@for_all_optimizers
def test_a_model_may_change_its_memory_format_between_steps(case: Case) -> None:
    torch.manual_seed(0)
    host = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Conv2d(5, 3, 1))
    model = copy.deepcopy(host).to(DEVICE)
    mine = case.ours(model.parameters(), lr=1e-2)
    reference = case.reference(host.parameters(), lr=1e-2)
    for step in range(4):
        formats = torch.channels_last if step % 2 else torch.contiguous_format
        model.to(memory_format=formats)
        give_gradients(list(host.parameters()), seed=step)
        for a, b in zip(model.parameters(), host.parameters(), strict=True):
            assert b.grad is not None
            a.grad = b.grad.to(DEVICE)
        mine.step()
        reference.step()
    close(model.parameters(), host.parameters())


@for_all_optimizers
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_a_saved_state_may_have_another_layout_and_dtype(case: Case, layout: str) -> None:
    start = values(0)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine, reference = case.ours([ours], lr=1e-2), case.ours([theirs], lr=1e-2)
    saved = None
    for step in range(4):
        ours.grad, theirs.grad = values(step + 1), values(step + 1)
        if saved is not None:
            mine.load_state_dict(saved)
        mine.step()
        reference.step()
        saved = copy.deepcopy(mine.state_dict())
        state = saved["state"][0]
        for name in type(mine).state_names:
            state[name] = LAYOUTS[layout](state[name]).double()
        state["step"] = int(state["step"])
    close([ours], [theirs])


@for_all_optimizers
def test_a_zero_dimensional_and_an_empty_parameter_are_stepped_in_any_strides(case: Case) -> None:
    def made(device: str) -> list[torch.nn.Parameter]:
        memory = torch.arange(10.0).to(device)
        return [torch.nn.Parameter(memory[3]), torch.nn.Parameter(memory[4:4].reshape(0, 5).t()),
                torch.nn.Parameter(memory[5:].as_strided((1, 4, 1), (7, 1, 0)))]  # fmt: skip

    ours, theirs = made(DEVICE), made("cpu")
    mine, reference = case.ours(ours, lr=1e-2), case.reference(theirs, lr=1e-2)
    for step in range(3):
        give_gradients(theirs, seed=step)
        for a, b in zip(ours, theirs, strict=True):
            assert b.grad is not None
            a.grad = b.grad.to(DEVICE)
        mine.step()
        reference.step()
    close(ours, theirs)


# -- gradients ---------------------------------------------------------------------------------------


@for_all_optimizers
def test_a_gradient_may_be_the_parameter_itself_or_anothers_gradient(case: Case) -> None:
    ours, theirs = on_the_device([(65,)] * 3), parameters([(65,)] * 3)
    mine, reference = case.ours(ours, lr=1e-2), case.reference(theirs, lr=1e-2)
    for step in range(2):
        shared = values(step + 1, (65,))
        ours[0].grad, theirs[0].grad = ours[0].data, theirs[0].detach().clone()
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            a.grad, b.grad = shared, shared.cpu()
        mine.step()
        reference.step()
    close(ours, theirs)


@for_all_optimizers
def test_a_gradient_of_another_supported_dtype_is_used_and_float64_is_refused(case: Case) -> None:
    ours, theirs = on_the_device([(65,)]), parameters([(65,)])
    mine, reference = case.ours(ours, lr=1e-2), case.reference(theirs, lr=1e-2)
    gradient = values(1, (65,)).bfloat16()
    ours[0].grad_dtype = torch.bfloat16
    ours[0].grad, theirs[0].grad = gradient, gradient.cpu().float()
    mine.step()
    reference.step()
    close(ours, theirs)
    before = ours[0].detach().clone()
    ours[0].grad = None
    ours[0].grad_dtype = torch.float64
    ours[0].grad = torch.ones(65, dtype=torch.float64, device=DEVICE)
    with pytest.raises(UnsupportedParameterError, match=r"gradient is torch\.float64; convert it"):
        mine.step()
    assert torch.equal(ours[0], before)


@for_all_optimizers
def test_a_sparse_gradient_in_the_last_group_leaves_the_first_as_it_was(case: Case) -> None:
    if DEVICE != "cpu":
        pytest.skip(f"{DEVICE} has no sparse tensors")
    ours = on_the_device([(8,), (9,)])
    optimizer = case.ours([{"params": ours[:1]}, {"params": ours[1:]}], lr=1e-2)
    before = ours[0].detach().clone()
    ours[0].grad = torch.ones_like(ours[0])
    ours[1].grad = torch.ones(9).to_sparse().to(DEVICE)
    with pytest.raises(UnsupportedParameterError, match="sparse"):
        optimizer.step()
    assert torch.equal(ours[0], before)


# -- shared memory -----------------------------------------------------------------------------------

SHARED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a tensor and its transpose": lambda x: [x, x.t()],
    "every second element and all": lambda x: [x.flatten()[::2], x],
    "columns in common": lambda x: [x[:, :5], x[:, 4:]],
    "one element in common": lambda x: [x[::7, 0], x[7, :1]],
    "views of two dtypes": lambda x: [x[:4], x[3:].view(torch.bfloat16)],
    "half of an element": lambda x: [x.flatten()[::2], x.flatten().view(torch.bfloat16)[1::4]],
    "expanded": lambda x: [x[:1].expand(3, 8)],
    "windows that overlap": lambda x: [x.as_strided((3, 4), (2, 1))],
    "crossed strides": lambda x: [x.as_strided((3, 3), (2, 4))],
    "more elements than memory": lambda x: [x.as_strided((1 << 40, 1 << 10), (0, 0))],
}
APART: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "halves of the columns": lambda x: [x[:, :5], x[:, 5:]],
    "even and odd elements": lambda x: [x.flatten()[::2], x.flatten()[1::2]],
    "two dtypes": lambda x: [x[:4], x[4:].view(torch.bfloat16)],
    "crossed strides": lambda x: [x.as_strided((2, 3), (3, 2))],
    "a transposed half": lambda x: [x[:4].t(), x[4:]],
    "nothing": lambda x: [x, x[:0]],
}


@for_all_optimizers
@pytest.mark.parametrize("name", SHARED)
def test_parameters_that_share_an_element_are_refused_in_one_group_and_in_two(case: Case, name: str) -> None:
    tensors = [torch.nn.Parameter(tensor) for tensor in SHARED[name](torch.zeros(8, 8, device=DEVICE))]
    with pytest.raises(UnsupportedParameterError, match="share memory"):
        case.ours(tensors)
    with pytest.raises(UnsupportedParameterError, match="share memory"):
        case.ours([{"params": [tensor]} for tensor in tensors])


@for_all_optimizers
@pytest.mark.parametrize("name", APART)
def test_views_of_one_memory_without_a_common_element_are_stepped(case: Case, name: str) -> None:
    start = values(0, (8, 8))
    ours = [torch.nn.Parameter(tensor) for tensor in APART[name](start)]
    theirs = [torch.nn.Parameter(tensor.detach().cpu().float().contiguous()) for tensor in ours]
    mine, reference = case.ours(ours, lr=1e-2), case.reference(theirs, lr=1e-2)
    give_gradients(theirs, seed=1)
    for a, b in zip(ours, theirs, strict=True):
        assert b.grad is not None
        a.grad = b.grad.to(DEVICE, a.dtype)
        b.grad = a.grad.cpu().float()
    mine.step()
    reference.step()
    for a, b in zip(ours, theirs, strict=True):
        unit = 2.0**-7 if a.dtype == torch.bfloat16 else 3e-6
        torch.testing.assert_close(a.detach().cpu().float(), b.detach(), rtol=unit, atol=unit)


@for_all_optimizers
def test_outputs_that_share_memory_with_each_other_or_a_parameter_are_refused(case: Case) -> None:
    ours = on_the_device([(8,), (8,)])
    optimizer = case.ours(ours, lr=1e-2)
    before = ours[0].detach().clone()
    memory = torch.zeros(20, device=DEVICE)
    for outputs in ([memory[:8], memory[7:15]], [memory[:8], ours[0].data]):
        for parameter in ours:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(UnsupportedParameterError, match="parameters or outputs share memory"):
            optimizer.step(outputs=outputs)
    assert torch.equal(ours[0], before)
    optimizer.step(outputs=[memory[:8], memory[8:16]])
    assert torch.equal(memory[:8], ours[0].detach())


# -- parameters that move ----------------------------------------------------------------------------


def stepped(case: Case, **settings: Any) -> tuple[list[torch.nn.Parameter], Any]:
    ours = on_the_device([(8,), (8,)])
    optimizer = case.ours(ours, lr=1e-2, **settings)
    for parameter in ours:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return ours, optimizer


@for_all_optimizers
def test_weights_tied_through_data_between_steps_are_refused(case: Case) -> None:
    ours, optimizer = stepped(case)
    ours[1].data = ours[0].data
    before = ours[0].detach().clone()
    for _ in range(2):
        with pytest.raises(UnsupportedParameterError, match="share memory"):
            optimizer.step()
    assert torch.equal(ours[0], before)


@for_all_optimizers
def test_a_parameter_that_grows_at_its_address_into_another_one_is_refused(case: Case) -> None:
    memory = torch.zeros(16, device=DEVICE)
    ours = [torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[8:])]
    optimizer = case.ours(ours, lr=1e-2)
    for data in (memory, memory.as_strided((4,), (0,))):
        ours[0].data = data
        for parameter in ours:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(UnsupportedParameterError, match="share memory"):
            optimizer.step()
        ours[0].grad = None
    assert not memory.any()


@for_all_optimizers
def test_a_parameter_whose_data_gets_another_shape_than_its_state_is_refused_each_time(case: Case) -> None:
    ours = torch.nn.Parameter(torch.ones(3, 4, device=DEVICE))
    optimizer = case.ours([ours], lr=1e-2)
    ours.grad = torch.ones_like(ours)
    optimizer.step()
    before = ours.detach().clone()
    ours.grad = None
    ours.data = ours.data.t()
    ours.grad = torch.ones_like(ours)
    for _ in range(2):
        with pytest.raises(UnsupportedParameterError, match=r"shape \(3, 4\), the parameter now"):
            optimizer.step()
    assert torch.equal(ours.detach().t(), before)


@for_all_optimizers
def test_a_parameter_or_gradient_whose_storage_was_freed_is_an_error(case: Case) -> None:
    if DEVICE != "cpu" or case.name == "FusedLamb":
        pytest.skip("plain torch ends the process")
    for freed in ("data", "grad"):
        (ours, _), optimizer = stepped(case)
        getattr(ours, freed).untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="was freed"):
            optimizer.step()


@for_all_optimizers
def test_a_parameter_whose_sign_is_pending_is_refused(case: Case) -> None:
    imaginary = torch.view_as_complex(values(0, (4, 2))).conj().imag
    assert imaginary.is_neg()
    with pytest.raises(UnsupportedParameterError, match=r"Use a clone\(\)"):
        case.ours([torch.nn.Parameter(imaginary)])


@for_all_optimizers
def test_a_parameter_that_becomes_float64_is_refused_in_the_next_step(case: Case) -> None:
    ours, optimizer = stepped(case)
    ours[1].grad = None
    ours[1].data = ours[1].data.double()
    ours[1].grad = torch.ones_like(ours[1])
    before = ours[0].detach().clone()
    with pytest.raises(UnsupportedParameterError, match=r"one is torch\.float64"):
        optimizer.step()
    assert torch.equal(ours[0], before)


@for_all_optimizers
def test_a_parameter_that_becomes_bfloat16_goes_on_with_its_state(case: Case) -> None:
    (ours, mine), (theirs, reference) = stepped(case), stepped(case)
    ours[1].grad = None
    ours[1].data = ours[1].data.bfloat16()
    theirs[1].data = ours[1].data.float()
    ours[1].grad, theirs[1].grad = torch.ones_like(ours[1]), torch.ones_like(theirs[1])
    mine.step()
    reference.step()
    assert torch.equal(ours[1], theirs[1].bfloat16())
    assert torch.equal(ours[0], theirs[0])


@for_all_optimizers
def test_a_parameter_on_another_device_than_its_state_is_refused_and_loading_the_state_moves_it(
    case: Case,
) -> None:
    if DEVICE == "cpu":
        pytest.skip("the host's tensors have no other device here")
    ours, optimizer = stepped(case)
    if not torch._has_compatible_shallow_copy_type(ours[0], ours[0].cpu()):
        pytest.skip("a move replaces parameters of this device, so none can be moved beside its state")
    for parameter in ours:
        parameter.grad = None
        parameter.data = parameter.data.cpu()
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(UnsupportedParameterError, match="on sim:0 and its parameter on cpu"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    theirs, reference = stepped(case)
    reference.step()
    close(ours, theirs)


# -- copies ------------------------------------------------------------------------------------------


def through_torch_save(kept: Any) -> Any:
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda kept: pickle.loads(pickle.dumps(kept)),
    "torch.save": through_torch_save,
}


@for_all_optimizers
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("master_weights", [False, True])
def test_a_copy_of_an_optimizer_goes_on_by_itself(case: Case, how: str, master_weights: bool) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "state_dtype": torch.float32, "master_weights": master_weights}
    ours = on_the_device([(8,), (3, 4)], torch.bfloat16)
    optimizer = case.ours(ours, **settings)
    ours[0].grad = torch.ones_like(ours[0])
    optimizer.step()
    copied_parameters, copied = COPIES[how]((ours, optimizer))
    before = [parameter.detach().clone() for parameter in ours]
    for parameter in copied_parameters:  # the second one has no state yet
        parameter.grad = torch.full_like(parameter, 0.5)
    copied.step()
    assert all(map(torch.equal, ours, before))
    for parameter in ours:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    assert all(map(torch.equal, ours, copied_parameters))
    for parameter, twin in zip(ours, copied_parameters, strict=True):
        state, twins = optimizer.state[parameter], copied.state[twin]
        assert [(name, value.dtype) for name, value in state.items()] == [
            (name, value.dtype) for name, value in twins.items()
        ]
    copied.add_param_group({"params": on_the_device([(5,)])})
    copied.zero_grad()


def test_a_copy_of_lamb_keeps_its_options_and_trust_ratios() -> None:
    (ours,) = on_the_device([(8,)])
    optimizer = FusedLamb([ours], eps=0.1, eps_inside_sqrt=True)
    ours.grad = torch.ones_like(ours)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert copied.get_lamb_coeffs() == optimizer.get_lamb_coeffs() != []
    assert copied.eps_inside_sqrt
