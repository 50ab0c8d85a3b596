"""Every backend has the interface's signatures, and the interface has DeepSpeed's.

`data/deepspeed_interface.json` is what `benchmarks/record_deepspeed_interface.py` found in DeepSpeed.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from acclimate.accelerator import Accelerator
from acclimate.backends import BUILTIN
from acclimate.backends.cpu import CPUAccelerator

DEEPSPEED = json.loads((Path(__file__).parent / "data" / "deepspeed_interface.json").read_text("utf-8"))
ADDITIONS = {CPUAccelerator: {"get_rss"}}
"""What the specification gives to one backend alone."""


class InATest(Accelerator):
    """The least that a backend is."""

    device_type = "in_a_test"
    communication_backend = "gloo"
    visible_devices_variable = None

    def memory_allocated(self, device_index: typing.Union[int, str, torch.device, None] = None) -> int:  # noqa: UP007
        return 7


def load(target: str) -> type[Accelerator]:
    module, _, name = target.partition(":")
    found: type[Accelerator] = getattr(import_module(module), name)
    return found


TARGETS = dict.fromkeys(
    [record.target for record in BUILTIN] + ["acclimate.backends.generic:GenericAccelerator"]
)
BACKENDS = [*map(load, TARGETS), InATest]


def overrides(backend: type[Accelerator]) -> dict[str, Any]:
    """What a backend itself says of anything that the interface has, private helpers included."""
    own = [vars(cls) for cls in reversed(backend.__mro__) if cls not in Accelerator.__mro__]
    merged = {name: member for members in own for name, member in members.items()}
    return {
        name: member
        for name, member in merged.items()
        if not name.startswith("__") and inspect.getattr_static(Accelerator, name, None) is not None
    }


def members(cls: type) -> list[tuple[str, Any]]:
    """What a class and its bases have, without the descriptors being called (getmembers_static is 3.11's)."""
    return [(name, inspect.getattr_static(cls, name)) for name in dir(cls)]


def function_of(member: Any) -> Callable[..., Any]:
    return member.fget if isinstance(member, property) else member


def is_union(annotation: Any) -> bool:
    """Whether it is ``A | B``; Python 3.10 makes ``Optional`` of what it evaluates with ``Any``."""
    return typing.get_origin(annotation) in (types.UnionType, typing.Union)


def narrows(ours: Any, base: Any) -> bool:
    """Whether every value of one annotation is a value of the other."""
    if base is Any or ours == base:
        return True
    if is_union(ours):
        return all(narrows(part, base) for part in typing.get_args(ours))
    if is_union(base):
        return any(narrows(ours, part) for part in typing.get_args(base))
    return isinstance(ours, type) and isinstance(base, type) and issubclass(ours, base)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
def test_a_backend_has_the_bases_signatures(backend: type[Accelerator]) -> None:
    for name, member in overrides(backend).items():
        base = inspect.getattr_static(Accelerator, name)
        if not inspect.isfunction(base):
            continue
        assert inspect.isfunction(member), f"{name} is a method of the interface"
        wanted = list(inspect.signature(base).parameters.values())
        found = list(inspect.signature(member).parameters.values())
        hints, base_hints = typing.get_type_hints(member), typing.get_type_hints(base)
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours.name, ours.kind, ours.default) == (theirs.name, theirs.kind, theirs.default), name
            if ours.name != "self":
                assert hints[ours.name] == base_hints[ours.name], f"{name}({ours.name})"
        assert narrows(hints["return"], base_hints["return"]), f"{name} returns {hints['return']}"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
def test_a_backends_values_have_the_bases_types(backend: type[Accelerator]) -> None:
    for name, member in overrides(backend).items():
        base = inspect.getattr_static(Accelerator, name)
        if isinstance(base, property):
            wanted = typing.get_type_hints(function_of(base))["return"]
            found = (
                typing.get_type_hints(function_of(member))["return"]
                if isinstance(member, property)
                else type(member)
            )
            assert narrows(found, wanted), f"{name} is {found}, not {wanted}"
        elif not inspect.isfunction(base) and name != "_abc_impl":
            assert isinstance(member, type(base)) or isinstance(base, dict), name


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
def test_a_backend_adds_nothing_that_others_lack(backend: type[Accelerator]) -> None:
    own = [vars(cls) for cls in backend.__mro__ if cls not in Accelerator.__mro__]
    public = {name for members in own for name in members if not name.startswith("_")}
    assert {name for name in public if not hasattr(Accelerator, name)} == ADDITIONS.get(backend, set())


def test_a_wrong_signature_is_found() -> None:
    class Wrong(InATest):
        def synchronize(self, device: int | None = None) -> None: ...

    with pytest.raises(AssertionError, match="synchronize"):
        test_a_backend_has_the_bases_signatures(Wrong)


def test_at_most_eight_members_are_abstract() -> None:
    assert len(Accelerator.__abstractmethods__) <= 8


def test_a_backend_is_three_lines() -> None:
    assert InATest().memory_allocated() == 7
    assert InATest().device_name(1) == "in_a_test:1"


def test_every_public_method_is_annotated() -> None:
    for name, member in members(Accelerator):
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        hints = typing.get_type_hints(function_of(member))
        parameters = set(inspect.signature(function_of(member)).parameters) - {"self"}
        assert parameters | {"return"} <= set(hints), name


# -- DeepSpeed's interface ---------------------------------------------------------------------------


def test_the_record_is_of_the_deepspeed_that_the_project_names() -> None:
    assert DEEPSPEED["deepspeed"] == "0.19.8"
    assert len(DEEPSPEED["members"]) > 70


def test_deepspeeds_interface_is_here() -> None:
    for name, theirs in DEEPSPEED["members"].items():
        ours = inspect.getattr_static(Accelerator, name, None)
        assert ours is not None, f"DeepSpeed's accelerators have {name}"
        if theirs["kind"] == "property":
            assert isinstance(ours, property), name
        if theirs["kind"] != "method":
            continue
        parameters = list(inspect.signature(ours).parameters.values())[1:]
        counterparts = parameters[: len(theirs["parameters"])]
        for counterpart, parameter in zip(counterparts, theirs["parameters"], strict=True):
            assert (counterpart.name, counterpart.kind.name) == (parameter["name"], parameter["kind"]), name
            if "default" in parameter:
                assert repr(counterpart.default) == parameter["default"], name
        for addition in parameters[len(counterparts) :]:
            assert addition.default is not addition.empty, f"{name}: {addition.name} has to have a default"


# -- types on the CPU --------------------------------------------------------------------------------

TENSOR = torch.ones(2)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "build_extension": (),
    "capture_to_graph": (CPUAccelerator().create_graph(),),
    "create_op_builder": ("NoSuchBuilder",),
    "get_op_builder": ("NoSuchBuilder",),
    "is_out_of_memory": (MemoryError(),),
    "is_pinned": (TENSOR,),
    "lazy_call": (lambda: None,),
    "manual_seed": (1,),
    "manual_seed_all": (1,),
    "on_accelerator": (TENSOR,),
    "pin_empty_like": (TENSOR,),
    "pin_memory": (TENSOR,),
    "range_push": ("mark",),
    "register_host_memory": (TENSOR.data_ptr(), TENSOR.nbytes),
    "set_compile_backend": ("inductor",),
    "set_device": (0,),
    "set_rng_state": (torch.get_rng_state(),),
    "set_rng_state_all": ([torch.get_rng_state()],),
    "set_stream": (None,),
    "set_visible_devices_envs": ({}, [0]),
    "stream": (None,),
    "unpin_memory": (TENSOR,),
    "unregister_host_memory": (TENSOR.data_ptr(),),
}
SPECIAL = {"pin_empty", "replay_graph"}
"""Need a keyword, or a graph that holds something; test_pinning.py and test_graphs.py call them."""
PLAIN = (bool, int, str, float, list, tuple, dict, type(None))


def methods() -> list[str]:
    found = members(CPUAccelerator)
    return [n for n, m in found if inspect.isfunction(m) and not n.startswith("_") and n not in SPECIAL]


@pytest.mark.parametrize("local_rank", [None, "0"])
def test_a_method_of_the_cpu_returns_exactly_what_it_says(
    local_rank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    for name in methods():
        require_the_type_that_it_says(name)


def require_the_type_that_it_says(name: str) -> None:
    method = getattr(CPUAccelerator(), name)
    said = typing.get_type_hints(method)["return"]
    required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    assert name in ARGUMENTS or not required, f"ARGUMENTS has to say how to call {name}()"
    value = method(*ARGUMENTS.get(name, ()))
    choices = typing.get_args(said) if is_union(said) else (said,)
    kinds = [object if choice is Any else typing.get_origin(choice) or choice for choice in choices]
    exact = type(value) in kinds
    loose = any(isinstance(value, kind) for kind in kinds if kind not in PLAIN)
    assert exact or loose, f"{name}() gave {type(value).__name__}, and says {said}"
    if type(value) in (list, tuple) and typing.get_args(said):
        part = typing.get_args(said)[0]
        assert all(type(item) is part for item in value), f"{name}() has to hold {part.__name__}"
