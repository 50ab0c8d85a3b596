"""Each optimizer gives the results of torch's optimizer, or of the paper if torch has none."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, FLOATS, ODD_SHAPES, RULES, Case, give_gradients, parameters

from acclimate.backends.cpu import CPUAccelerator
from acclimate.backends.cuda import CUDAAccelerator
from acclimate.errors import InvalidOptimizerArgumentError, UnsupportedParameterError
from acclimate.ops import CPUAdagrad, CPUAdam, CPULion, FusedAdam, FusedLamb, FusedLion
from acclimate.ops.optimizers.base import GroupOptimizer
from acclimate.ops.optimizers.builders import CPUAdamBuilder
from quick_parameters import quick

# Ten steps at this rate; each differs from exact arithmetic by at most 2 units in the last place of the
# parameter (its own rounding, and at most eight roundings of an update a hundred times smaller).
SETTINGS: dict[str, Any] = {"lr": 1e-2}
STEPS = 10
TOLERANCE = {"rtol": 3e-6, "atol": 3e-6}

both = pytest.mark.parametrize("case", quick({case.name: case for case in CASES}, *RULES))
"""For what an update rule computes itself."""
both_of_some = pytest.mark.parametrize(
    "case", quick({case.name: case for case in CASES}, "CPUAdam", "FusedLamb")
)
"""For what all optimizers have in common."""


def run(case: Case, ours: Any, theirs: Any, steps: int = STEPS, **settings: Any) -> tuple[Any, Any]:
    mine = case.ours(ours, **SETTINGS, **settings)
    reference = case.reference(theirs, **SETTINGS, **settings)
    for step in range(steps):
        give_gradients([p for g in mine.param_groups for p in g["params"]],
                       [p for g in reference.param_groups for p in g["params"]], seed=step)  # fmt: skip
        mine.step()
        reference.step()
    return mine, reference


def check(ours: Any, theirs: Any, **tolerance: float) -> None:
    assert [mine.shape for mine in ours] == [reference.shape for reference in theirs]
    torch.testing.assert_close(in_a_row(ours), in_a_row(theirs), **(tolerance or TOLERANCE))


def in_a_row(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


@both
def test_sizes_that_are_no_multiple_of_the_vector_width(case: Case) -> None:
    ours, theirs = parameters(), parameters()
    run(case, ours, theirs)
    check(ours, theirs)


@both
@pytest.mark.parametrize("weight_decay", [0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_weight_decay_and_maximize(case: Case, weight_decay: float, maximize: bool) -> None:
    ours, theirs = parameters(), parameters()
    run(case, ours, theirs, weight_decay=weight_decay, maximize=maximize)
    check(ours, theirs)


@both_of_some
def test_many_small_tensors(case: Case) -> None:
    ours, theirs = parameters([(10,)] * 500), parameters([(10,)] * 500)
    run(case, ours, theirs, steps=2)
    check(ours, theirs)


@pytest.mark.parametrize("optimizer", [FusedAdam, CPUAdam])
def test_the_library_is_looked_for_once(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, load = [], CPUAdamBuilder.load
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda self: (loaded.append(self), load(self))[1])
    made = optimizer([{"params": parameters([(10,)] * 5)}, {"params": parameters([(10,)] * 5)}])
    made.add_param_group({"params": parameters([(10,)] * 5)})
    assert len(loaded) == 1


@pytest.mark.parametrize("kind", [CPUAdagrad, CPUAdam, CPULion, FusedAdam, FusedLamb, FusedLion])
def test_an_optimizer_builds_what_its_device_s_accelerator_offers_under_its_name(
    kind: type[GroupOptimizer],
) -> None:
    accelerators = {"cpu": CPUAccelerator(), "cuda": CUDAAccelerator()}
    offered = {
        device: accelerators[device].get_op_builder(f"{kind.__name__}Builder") for device in kind.builders
    }
    assert offered == kind.builders


@both_of_some
def test_groups_have_settings_of_their_own(case: Case) -> None:
    ours, theirs = parameters(), parameters()

    def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:5]}, {"params": params[5:], "lr": 3e-3, "weight_decay": 0.2}]

    run(case, groups(ours), groups(theirs))
    check(ours, theirs)


@both_of_some
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_16_bit_parameters_move_like_float32_ones_that_are_rounded(case: Case, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    theirs = [torch.nn.Parameter(parameter.detach().float()) for parameter in theirs]
    mine = case.ours(ours, lr=1e-2, state_dtype=torch.float32)
    reference = case.reference(theirs, lr=1e-2)
    for step in range(3):
        give_gradients(ours, theirs, seed=step)
        for a, b in zip(ours, theirs, strict=True):
            b.grad = a.grad.float()
        mine.step()
        reference.step()
        for parameter in theirs:
            parameter.data.copy_(parameter.data.to(dtype))
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    check(ours, theirs, rtol=2 * unit, atol=1e-5)


@both_of_some
def test_layouts_of_parameter_and_gradient_may_differ(case: Case) -> None:
    base = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(1))

    def variants() -> list[torch.nn.Parameter]:
        strided = torch.nn.Parameter(base.repeat(1, 2, 1, 1)[:, ::2])
        strided.data.copy_(base)
        return [
            torch.nn.Parameter(base.to(memory_format=torch.channels_last)),
            torch.nn.Parameter(base.clone()),
            strided,
        ]

    ours, theirs = variants(), [torch.nn.Parameter(base.clone()) for _ in range(3)]
    mine, reference = case.ours(ours, lr=1e-2), case.reference(theirs, lr=1e-2)
    for _ in range(2):
        ours[0].grad = gradient.to(memory_format=torch.channels_last)
        ours[1].grad = gradient.transpose(1, 2).contiguous().transpose(1, 2)
        ours[2].grad = gradient.clone()
        for parameter in theirs:
            parameter.grad = gradient.clone()
        mine.step()
        reference.step()
    check(ours, theirs)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_do_what_they_do_in_torch(case: Case, bad: float) -> None:
    ours, theirs = parameters([(70,)]), parameters([(70,)])
    mine, reference = case.ours(ours, lr=1e-2), case.reference(theirs, lr=1e-2)
    for step in range(3):
        give_gradients(ours, theirs, seed=step)
        if step == 1:
            ours[0].grad[3] = theirs[0].grad[3] = bad
        mine.step()
        reference.step()
    torch.testing.assert_close(ours[0], theirs[0], equal_nan=True, **TOLERANCE)


@both
def test_a_state_dict_round_trip_changes_no_bit(case: Case) -> None:
    ours, copied = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    mine = case.ours(ours, lr=1e-2, state_dtype=torch.float32)
    for step in range(2):
        give_gradients(ours, seed=step)
        mine.step()
    again = case.ours(copied, lr=0.5, state_dtype=torch.float32)
    for a, b in zip(copied, ours, strict=True):
        a.data.copy_(b.data)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert again.param_groups[0]["lr"] == 1e-2
    for step in range(2, 4):
        give_gradients(ours, copied, seed=step)
        mine.step()
        again.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, copied, strict=True))


@both
def test_a_parameter_without_gradient_stays(case: Case) -> None:
    ours = parameters([(8,), (8,)])
    before = ours[1].detach().clone()
    ours[0].grad = torch.ones(8)
    mine = case.ours(ours, lr=1e-2, weight_decay=0.5)
    mine.step()
    assert torch.equal(ours[1], before)
    assert ours[1] not in mine.state or not mine.state[ours[1]]


@both
def test_the_closure_runs_with_gradients_on_and_its_loss_is_returned(case: Case) -> None:
    ours = parameters([(8,)])
    mine = case.ours(ours, lr=1e-2)

    def closure() -> torch.Tensor:
        mine.zero_grad()
        loss = (ours[0] ** 2).sum()
        loss.backward()
        return loss

    first = mine.step(closure)
    assert mine.step(closure) < first


@both
def test_autograd_learns_that_parameters_changed(case: Case) -> None:
    ours = parameters([(8,)])
    mine = case.ours(ours, lr=1e-2)
    loss = (ours[0] * ours[0]).sum()  # keeps the parameter for its backward
    ours[0].grad = torch.ones(8)
    mine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("decoupled", [True, False])
def test_state_goes_to_and_from_torch_adam(decoupled: bool) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    reference_type = torch.optim.AdamW if decoupled else torch.optim.Adam
    one, two, three = parameters(), parameters(), parameters()
    theirs = reference_type(one, **settings)
    for step in range(3):
        give_gradients(one, seed=step)
        theirs.step()
    for a, b in zip(two, one, strict=True):
        a.data.copy_(b.data)
    ours = CPUAdam(two, adamw_mode=decoupled)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(3, 6):
        give_gradients(one, two, seed=step)
        theirs.step()
        ours.step()
    check(two, one)
    for a, b in zip(three, two, strict=True):
        a.data.copy_(b.data)
    back = reference_type(three)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    for step in range(6, 9):
        give_gradients(one, three, seed=step)
        theirs.step()
        back.step()
    check(three, one)


def test_state_goes_to_and_from_torch_adagrad() -> None:
    one, two = parameters(), parameters()
    theirs = torch.optim.Adagrad(one, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.5)
    ours = CPUAdagrad(two)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(3):
        give_gradients(one, two, seed=step)
        theirs.step()
        ours.step()
    check(two, one)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))


def test_lamb_coeffs_are_the_last_step_s_trust_ratios_of_parameters_with_a_gradient() -> None:
    ordinary, zero, without, bounded, bounded_by_its_group = (
        torch.nn.Parameter(torch.full((4,), value)) for value in (2.0, 0.0, 2.0, 1000.0, 1000.0)
    )
    groups = [
        {"params": [ordinary, zero, without, bounded]},
        {"params": [bounded_by_its_group], "max_coeff": 3.0},
    ]
    optimizer = FusedLamb(groups)
    assert optimizer.get_lamb_coeffs() == []
    for parameter in (ordinary, zero, bounded, bounded_by_its_group):
        parameter.grad = torch.full((4,), 0.5)
    optimizer.step()
    # In the first step an update is the sign of the gradient.
    assert optimizer.get_lamb_coeffs() == pytest.approx([2.0, 1.0, 10.0, 3.0], rel=1e-6)
    optimizer.zero_grad()
    bounded.grad = torch.full((4,), 0.5)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [10.0]


def test_bias_correction_can_be_left_out() -> None:
    ours, theirs = parameters(), parameters()
    mine = CPUAdam(ours, lr=1e-2, bias_correction=False)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in theirs]
    for step in range(5):
        give_gradients(ours, theirs, seed=step)
        mine.step()
        with torch.no_grad():
            for p, (m, v) in zip(theirs, moments, strict=True):
                m.mul_(0.9).add_(p.grad * 0.1)
                v.mul_(0.999).add_(p.grad * p.grad * 0.001)
                p.sub_(1e-2 * m / (v.sqrt() + 1e-8))
    check(ours, theirs)


@pytest.mark.parametrize("beta1", [0.0, 0.3])
def test_a_small_beta1_keeps_the_digits_of_the_gradient(beta1: float) -> None:
    ours, theirs = parameters([(100,)]), parameters([(100,)])
    mine = CPUAdam(ours, lr=1e-2, betas=(beta1, 0.999))
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(beta1, 0.999), weight_decay=0.0)
    for step, size in enumerate((1e6, 1.0, 1e-3)):
        give_gradients(ours, theirs, seed=step)
        for parameter in (*ours, *theirs):
            parameter.grad.mul_(size)
        mine.step()
        reference.step()
    check(ours, theirs)


def test_one_step_of_adam_is_within_two_units_in_the_last_place_of_exact_arithmetic() -> None:
    generator = torch.Generator().manual_seed(3)
    p, g, m = (torch.randn(5000, generator=generator) for _ in range(3))
    v = torch.rand(5000, generator=generator)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = g
    ours = CPUAdam([parameter], lr=1e-2, weight_decay=0.1)
    state = {"step": torch.tensor(6.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    ours.state[parameter].update(state)
    ours.step()
    p, g, m, v = (tensor.double() for tensor in (p, g, m, v))
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    update = 1e-2 * (m / (1 - 0.9**7)) / ((v / (1 - 0.999**7)).sqrt() + 1e-8)
    exact = p * (1 - 1e-2 * 0.1) - update
    unit = 2.0**-23
    found = ours.state[parameter]
    assert ((parameter.detach() - exact).abs() <= unit * (exact.abs() + p.abs() + 8 * update.abs())).all()
    assert ((found["exp_avg"] - m).abs() <= 2 * unit * (m.abs() + g.abs())).all()
    assert ((found["exp_avg_sq"] - v).abs() <= 2 * unit * v).all()


# -- master weights and outputs: one pass in place of three ------------------------------------------


@both_of_some
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_master_weights_are_a_float32_optimizer_whose_result_is_rounded(
    case: Case, dtype: torch.dtype
) -> None:
    ours = parameters(dtype=dtype)
    wide = [torch.nn.Parameter(parameter.detach().float()) for parameter in ours]
    mine = case.ours(ours, lr=1e-3, master_weights=True, state_dtype=torch.float32)
    reference = case.ours(wide, lr=1e-3, state_dtype=torch.float32)
    for step in range(4):
        give_gradients(ours, seed=step)
        for a, b in zip(ours, wide, strict=True):
            b.grad = a.grad.float()
        mine.step()
        reference.step()
    for a, b in zip(ours, wide, strict=True):
        assert torch.equal(a, b.to(dtype))
        assert torch.equal(mine.state[a]["master"], b)


@both
def test_float32_parameters_may_stand_among_those_with_masters(case: Case) -> None:
    mixed = [parameters([(100,)])[0], parameters([(100,)], torch.bfloat16)[0]]
    alone = parameters([(100,)])
    mine = case.ours(mixed, lr=1e-2, master_weights=True)
    reference = case.ours(alone, lr=1e-2)
    give_gradients(mixed[:1], alone, seed=0)
    mixed[1].grad = mixed[0].grad.bfloat16()
    mine.step()
    reference.step()
    assert torch.equal(mixed[0], alone[0])
    assert "master" not in mine.state[mixed[0]]


@pytest.mark.parametrize("kind", [CPUAdam, CPUAdagrad, CPULion])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_and_outputs_of_another_dtype_in_one_step(kind: Any, dtype: torch.dtype) -> None:
    ours, wide = parameters(), parameters()
    mine, reference = kind(ours, lr=1e-2), kind(wide, lr=1e-2)
    grads = [torch.randn(shape).to(dtype) for shape in ODD_SHAPES]
    outputs = [torch.full(shape, 7.0, dtype=dtype) for shape in ODD_SHAPES]
    mine.step(grads=[grad * 4 for grad in grads], outputs=outputs, grad_scale=0.25)
    for parameter, grad in zip(wide, grads, strict=True):
        parameter.grad = grad.float()
    reference.step()
    for a, b, output in zip(ours, wide, outputs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(output, b.to(dtype))


def test_an_output_large_enough_to_go_past_the_cache_is_complete() -> None:
    size = (3 << 20) + 77
    parameter = torch.nn.Parameter(torch.randn(size))
    for dtype in FLOATS[1:]:
        output = torch.zeros(size, dtype=dtype)
        CPUAdam([parameter]).step(grads=[torch.randn(size).to(dtype)], outputs=[output])
        assert torch.equal(output, parameter.detach().to(dtype))


def test_state_can_be_16_bits_and_is_kept_through_a_round_trip() -> None:
    ours = parameters()
    mine = CPUAdam(ours, state_dtype=torch.bfloat16)
    give_gradients(ours, seed=0)
    mine.step()
    again = CPUAdam(parameters(), state_dtype=torch.bfloat16)
    again.load_state_dict(mine.state_dict())
    for optimizer in (mine, again):
        for state in optimizer.state.values():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16


def test_fused_adam_keeps_state_in_the_dtype_of_the_parameter_as_torch_does() -> None:
    ours, theirs = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    mine = FusedAdam(ours, lr=1e-2)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(3):
        give_gradients(ours, theirs, seed=step)
        mine.step()
        reference.step()
    assert mine.state[ours[0]]["exp_avg"].dtype == torch.bfloat16
    check(ours, theirs, rtol=2.0**-7, atol=1e-6)


# -- what is refused ---------------------------------------------------------------------------------


@both
def test_float64_is_refused_with_what_to_do(case: Case) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"float64.*torch\.optim"):
        case.ours([torch.zeros(3, dtype=torch.float64)])


@both
@pytest.mark.parametrize("setting", [{"lr": -1.0}, {"weight_decay": math.nan}], ids=str)
def test_settings_that_cannot_be_are_refused(case: Case, setting: dict[str, float]) -> None:
    with pytest.raises(InvalidOptimizerArgumentError, match=next(iter(setting))):
        case.ours(parameters(), **setting)
