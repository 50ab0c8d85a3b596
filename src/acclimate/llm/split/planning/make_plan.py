"""Decides how each module is split, from the user's mapping, the model's published plan or its structure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from acclimate.errors import BlockError, PlanError, TiedSplitsError
from acclimate.imports import ForkSafeLock
from acclimate.llm.split.layers.intact import split_of
from acclimate.llm.split.plan import Plan
from acclimate.llm.split.planning.mapping import Styles, read_mapping, read_published_plan
from acclimate.llm.split.planning.planner import (
    Planner,
    entries_of,
    inside,
    joined,
    kind_of,
    parents_of,
    unreached_models,
)
from acclimate.llm.split.tracing.trace import Trace, traced
from acclimate.llm.split.verify import verify_plan

_planning = ForkSafeLock()
"""Held while a plan is made: two at a time would leave the default dtype and random numbers of planning."""


def make_plan(
    model: nn.Module,
    size: int,
    user: Mapping[str, Any] | None = None,
    *,
    example: Callable[[nn.Module], Any] | None = None,
    verify: bool | Literal["auto"] = "auto",
) -> Plan:
    """Returns how a model is split over ``size`` ranks; the model may be on the meta device.

    Args:
        model: the whole model.
        size: the number of ranks.
        user: a mapping from patterns of module names to splits; see ``docs/autotp.md``.
        example: a function that calls the model once; needed if ``input_ids`` are not enough.
        verify: whether to run each kind of layer whole and split, and compare the results. ``"auto"`` does so
            unless all splits come from the model's published plan.

    Raises:
        PlanError: a module cannot be split as asked, or its split gives other results than the whole module.
    """
    if size < 1:
        raise PlanError(f"A model cannot be split over {size} ranks; at least 1 is needed.")
    if (split := split_of(model)) is not None:
        raise PlanError(
            f"{type(model).__name__} is already split over {split.size} ranks; load the whole model again to "
            "split it in another way."
        )
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    with _planning, _own_settings():
        mapping = read_mapping(user, names)
        try:
            styles = Styles(mapping, read_published_plan(model, names))
            return _plan(model, size, styles, example, verify)
        except Exception as error:  # a model's code may raise anything
            if adapters := _adapters(model):
                raise PlanError(
                    f"{type(model).__name__} cannot be split over {size} ranks with its adapter {adapters}. "
                    "Merge the adapter into the weights, as peft's merge_and_unload() does, and split the "
                    f"merged model; or use one rank. The reason: {type(error).__name__}: {error}"
                ) from error
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"{type(model).__name__} cannot be split over {size} ranks, because no copy of it can be "
                f"traced: {type(error).__name__}: {error}. Use one rank."
            ) from error


def _adapters(model: nn.Module) -> str:
    """Returns the names and kinds of a model's adapters, as peft records them."""
    found = getattr(model, "peft_config", None)
    if not isinstance(found, Mapping):
        return ""
    kinds = []
    for name, config in found.items():
        kind = getattr(config, "peft_type", "unknown")
        parts = [str(getattr(kind, "value", kind)), *(["DoRA"] if getattr(config, "use_dora", False) else [])]
        kinds.append(f"{name} ({', '.join(parts)})")
    return ", ".join(kinds)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Resets torch's gradient mode, default device and default dtype during planning.

    Planning traces the data flow through gradients, but callers often load a model under ``no_grad`` or with
    another default device or dtype.
    """
    dtype = torch.get_default_dtype()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _plan(
    model: nn.Module,
    size: int,
    styles: Styles,
    example: Callable[[nn.Module], Any] | None,
    verify: bool | Literal["auto"],
    is_inner: bool = False,
) -> Plan:
    """Plans a model, and separately the inner models that its traced run does not call."""
    trace = traced(model, example)
    inner: dict[str, Plan] = {}
    if size > 1:
        for name, part in unreached_models(model, trace).items():
            own = Styles(entries_of(styles.user, name), entries_of(styles.published, name))
            # An inner model that cannot run or be split by itself stays whole.
            with contextlib.suppress(Exception):
                inner[name] = _plan(part, size, own, None, verify, is_inner=True)
    user = {name: style for name, style in styles.user.items() if not inside(name, inner)}
    styles = Styles(user, styles.published)
    return joined(_verified_plan(model, trace, size, styles, verify, inner, is_inner), inner)


def _verified_plan(
    model: nn.Module,
    trace: Trace,
    size: int,
    styles: Styles,
    verify: bool | Literal["auto"],
    inner: Mapping[str, Plan],
    is_inner: bool,
) -> Plan:
    """Makes a plan; if a split block gives wrong results, splits its linear modules one by one instead.

    Modules that share a parameter and would split it in two ways stay whole.
    """
    alone: set[str] = set()
    refusal: PlanError | None = None
    while True:
        try:
            plan = Planner(model, trace, size, styles, alone, inner, is_inner).plan()
            if verify is True or (verify == "auto" and set(plan.source.values()) - {"published"}):
                verify_plan(trace, plan)
            return plan
        except BlockError as error:
            refusal = refusal or error
            kind = kind_of(error.block)
            members = {n for n in trace.linears if any(kind_of(parent) == kind for parent in parents_of(n))}
            more = members - alone - set(styles.user)
            if not more:
                raise refusal from None
            alone |= more
        except TiedSplitsError as error:
            refusal = refusal or error
            if not error.owners - alone - set(styles.user):
                raise refusal from None
            alone |= error.owners
        except PlanError as error:
            raise refusal or error from None
