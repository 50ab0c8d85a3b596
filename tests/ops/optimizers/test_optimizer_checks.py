"""What an optimizer cannot use is refused by name, and nothing is changed: not a weight, not a count."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, Case, give_gradients, parameters

from acclimate.errors import InvalidOptimizerArgumentError, UnsupportedParameterError
from acclimate.ops import CPUAdam, CPULion

SHAPES = [(8,), (3, 4)]

both = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def made(case: Case, **settings: Any) -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters that have been stepped once, so that there is state."""
    ours = parameters(SHAPES)
    optimizer = case.ours(ours, lr=1e-2, **settings)
    give_gradients(ours, seed=0)
    optimizer.step()
    return ours, optimizer


def content(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(([p.detach() for g in optimizer.param_groups for p in g["params"]],
                          optimizer.state_dict()))  # fmt: skip


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@contextmanager
def refused(optimizer: torch.optim.Optimizer, error: type[Exception], match: str) -> Iterator[None]:
    before = content(optimizer)
    with pytest.raises(error, match=match):
        yield
    assert equal(content(optimizer), before)


# -- saved state -------------------------------------------------------------------------------------


SAVED: tuple[tuple[Any, str], ...] = (
    (lambda good: torch.ones(1), r"in the saved state of parameter 1 has shape \(1,\), its .* \(3, 4\)"),
    (lambda good: torch.tensor(1.0), r"has shape \(\)"),
    (lambda good: good.reshape(4, 3), r"has shape \(4, 3\)"),
    (lambda good: good.reshape(1, 3, 4), r"has shape \(1, 3, 4\)"),
    (lambda good: good.to(torch.int64), "int64; it must be a dense floating-point"),
    (lambda good: good.to(torch.complex64), "complex64; it must be a dense"),
    (lambda good: good.to_sparse(), "sparse_coo"),
    (lambda good: good.to("meta"), "without data"),
    (lambda good: 0.5, "is a float, not a tensor"),
    (lambda good: None, "is a NoneType, not a tensor"),
)


@both
def test_a_saved_state_of_another_shape_or_kind_is_refused(case: Case) -> None:
    _, optimizer = made(case)
    for name, (value, match) in itertools.product(type(optimizer).state_names, SAVED):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1][name] = value(saved["state"][1][name])
        with refused(
            optimizer, InvalidOptimizerArgumentError, f"{name} in the saved state .*{match}|{match}"
        ):
            optimizer.load_state_dict(saved)


@both
def test_a_saved_state_that_lacks_a_tensor_is_refused(case: Case) -> None:
    _, optimizer = made(case)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0][type(optimizer).state_names[-1]]
    with refused(optimizer, InvalidOptimizerArgumentError, "parameter 0 has .* but no .* another optimizer"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("step", [None, -1, math.nan, math.inf, "3", True, torch.ones(2)], ids=str)
def test_a_saved_count_of_steps_that_is_none_is_refused(step: Any) -> None:
    _, optimizer = made(CASES[0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = step
    with refused(optimizer, InvalidOptimizerArgumentError, "step in the saved state of parameter 0"):
        optimizer.load_state_dict(saved)


def test_only_lion_needs_no_saved_count_of_steps() -> None:
    for kind, counts in ((CPUAdam, True), (CPULion, False)):
        ours = parameters(SHAPES)
        optimizer = kind(ours)
        give_gradients(ours, seed=0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][0]["step"]
        if counts:
            with refused(optimizer, InvalidOptimizerArgumentError, "must be the number of updates"):
                optimizer.load_state_dict(saved)
        else:
            optimizer.load_state_dict(saved)


@both
def test_a_masters_shape_is_checked_and_a_state_with_masters_is_not_taken_without(case: Case) -> None:
    def stepped(master_weights: bool) -> Any:
        ours = parameters(SHAPES, torch.bfloat16)
        optimizer = case.ours(ours, master_weights=master_weights)
        give_gradients(ours, seed=0)
        optimizer.step()
        return optimizer

    with_masters, without = stepped(True), stepped(False)
    with refused(without, InvalidOptimizerArgumentError, "has master, .* saved with master_weights=True"):
        without.load_state_dict(copy.deepcopy(with_masters.state_dict()))
    saved = copy.deepcopy(with_masters.state_dict())
    saved["state"][0]["master"] = torch.zeros(1)
    with refused(with_masters, InvalidOptimizerArgumentError, r"master .* has shape \(1,\)"):
        with_masters.load_state_dict(saved)


@both
def test_groups_of_other_numbers_or_lengths_are_refused_by_torchs_error(case: Case) -> None:
    ours, optimizer = made(case)
    several = case.ours([{"params": ours[:1]}, {"params": ours[1:]}])
    longer = case.ours(parameters([*SHAPES, (5,)]))
    for other in (several, longer):
        with refused(optimizer, ValueError, "loaded state dict"):
            optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


# -- AMSGrad -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if "Adam" in case.name], ids=lambda case: case.name)
def test_amsgrad_is_refused_as_an_option_of_a_group_and_in_a_saved_state(case: Case) -> None:
    with pytest.raises(InvalidOptimizerArgumentError, match="no AMSGrad variant"):
        case.ours(parameters(), amsgrad=True)
    with pytest.raises(InvalidOptimizerArgumentError, match="no AMSGrad variant"):
        case.ours([{"params": parameters(), "amsgrad": True}])
    ours, optimizer = made(case)
    reference = torch.optim.AdamW(ours, amsgrad=True)
    reference.step()
    saved = copy.deepcopy(reference.state_dict())
    with refused(optimizer, InvalidOptimizerArgumentError, "no AMSGrad variant"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["amsgrad"] = False
    with refused(optimizer, InvalidOptimizerArgumentError, "max_exp_avg_sq, .* saved with amsgrad=True"):
        optimizer.load_state_dict(saved)


# -- a step's gradients and outputs ------------------------------------------------------------------

_GOOD = torch.ones(3, 4)


UNFIT: tuple[tuple[Any, type[Exception], str], ...] = (
    (torch.ones(4, 3), InvalidOptimizerArgumentError, r"shape \(4, 3\), its parameter \(3, 4\)"),
    (torch.ones(12), InvalidOptimizerArgumentError, r"shape \(12,\)"),
    (torch.ones(()), InvalidOptimizerArgumentError, r"shape \(\)"),
    (_GOOD.to(torch.float64), UnsupportedParameterError, "is torch.float64; convert it"),
    (_GOOD.to(torch.int32), UnsupportedParameterError, "is torch.int32"),
    (_GOOD.to(torch.complex64), UnsupportedParameterError, "is torch.complex64"),
    (_GOOD.to_sparse(), UnsupportedParameterError, "is torch.sparse_coo"),
    (_GOOD.to("meta"), UnsupportedParameterError, "is on meta and its parameter on cpu"),
    ([1.0], InvalidOptimizerArgumentError, "is a list, not a tensor"),
)


@both
@pytest.mark.parametrize("name", ["grads", "outputs"])
def test_a_tensor_given_to_a_step_that_does_not_fit_is_refused(case: Case, name: str) -> None:
    _, optimizer = made(case)
    for bad, error, match in UNFIT:
        with refused(optimizer, error, rf"{name}\[1\].*{match}"):
            optimizer.step(**{name: [torch.ones(8), bad]})


@both
def test_tensors_given_to_a_step_have_to_be_one_for_each_parameter(case: Case) -> None:
    _, optimizer = made(case)
    for name in ("grads", "outputs"):
        with refused(optimizer, InvalidOptimizerArgumentError, f"{name} has 1 tensors for 2 parameters"):
            optimizer.step(**{name: [torch.ones(8)]})


@both
def test_a_sparse_gradient_is_refused_in_the_first_step_and_later(case: Case) -> None:
    first = torch.nn.Parameter(torch.zeros(4))
    later, optimizer = made(case)
    for parameter, stepper in ((first, case.ours([first])), (later[0], optimizer)):
        parameter.grad = torch.ones_like(parameter).to_sparse()
        with pytest.raises(UnsupportedParameterError, match="sparse"):
            stepper.step()


@both
def test_a_parameter_that_was_resized_between_steps_is_refused(case: Case) -> None:
    ours, optimizer = made(case)
    ours[1].data = torch.ones(5)
    ours[1].grad = torch.ones(5)
    with refused(optimizer, UnsupportedParameterError, r"shape \(3, 4\), the parameter now has \(5,\)"):
        optimizer.step()


# -- settings and parameters -------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "setting", [{"lr": -1.0}, {"lr": math.nan}, {"weight_decay": -0.1}, {"lr": torch.tensor(-1.0)}], ids=str
)
def test_a_groups_setting_is_checked_when_it_is_added_and_when_it_is_loaded(
    case: Case, setting: dict[str, Any]
) -> None:
    name = next(iter(setting))
    with pytest.raises(InvalidOptimizerArgumentError, match=f"{name} must be 0 or more"):
        case.ours([{"params": parameters(SHAPES), **setting}])
    _, optimizer = made(case)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(setting)
    with refused(optimizer, InvalidOptimizerArgumentError, f"{name} must be 0 or more"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    "betas", [(1.0, 0.9), (0.9, -0.1), (0.9, math.nan), (0.9,), (0.9, 0.9, 0.9)], ids=str
)
def test_betas_are_two_numbers_from_0_to_below_1(betas: Any) -> None:
    for make in (lambda: CPUAdam(parameters(), betas=betas),
                 lambda: CPUAdam([{"params": parameters(), "betas": betas}])):  # fmt: skip
        with pytest.raises(InvalidOptimizerArgumentError, match="beta"):
            make()


@both
def test_a_group_with_memory_of_another_group_is_refused_and_not_added(case: Case) -> None:
    memory = torch.zeros(100)
    optimizer = case.ours([torch.nn.Parameter(memory[:60])])
    with pytest.raises(UnsupportedParameterError, match="share memory"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(memory[50:])]})
    assert len(optimizer.param_groups) == 1


@both
def test_tensors_without_elements_and_not_contiguous_ones_are_stepped(case: Case) -> None:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    ours = [torch.nn.Parameter(base.clone()[:, ::2]), torch.nn.Parameter(torch.zeros(0, 3))]
    theirs = [torch.nn.Parameter(base[:, ::2].clone()), torch.nn.Parameter(torch.zeros(0, 3))]
    mine, reference = case.ours(ours, lr=1e-2), case.reference(theirs, lr=1e-2)
    for seed in range(2):
        give_gradients(ours, theirs, seed=seed)
        mine.step()
        reference.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=3e-6, atol=3e-6)
