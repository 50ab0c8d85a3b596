"""Decides which modules of a model are split, from its data flow, and why others stay whole.

Code between split modules that reads tensor values into Python keeps them whole, as it may branch on values
that a rank does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from acclimate.accelerator.recorded_graph import READS_IN_PLACE, reads_data
from acclimate.llm.split.layers.changes import formula_of
from acclimate.llm.split.planning.experts import ExpertLayout, lay_out_experts
from acclimate.llm.split.planning.layouts import holds_for, lay_out
from acclimate.llm.split.planning.regions import Layout, Region, Unit, find_units
from acclimate.llm.split.tracing.trace import Trace

_UNREACHED = "the traced run does not call it"


@dataclass
class Structure:
    """A model's regions and experts with their layouts, and for each module that stays whole the reason."""

    regions: list[tuple[Region, Layout]] = field(default_factory=list)
    experts: dict[str, ExpertLayout] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def find_structure(trace: Trace, size: int, kept_whole: Container[str] = ()) -> Structure:
    """Returns the splits of a model over ``size`` ranks; modules in ``kept_whole`` stay whole."""
    found = Structure()
    split = _split_regions(found, trace, size, kept_whole)
    for name in trace.experts:
        if name in kept_whole or name not in trace.calls:
            continue
        experts = lay_out_experts(trace, name, size)
        if experts is None:
            found.whole[name] = "no split of its experts reproduced their whole output"
        else:
            found.experts[name] = experts
    for name in trace.linears:
        if name in split:
            found.whole.pop(name, None)
        elif name != trace.head:
            is_called = name in trace.calls or name in trace.called_linears
            reason = "the modules that it feeds need its whole output" if is_called else _UNREACHED
            found.whole.setdefault(name, reason)
    return found


def _split_regions(found: Structure, trace: Trace, size: int, kept_whole: Container[str]) -> set[str]:
    """Adds the regions of a model that can be split; returns their sinks and sources."""
    known: dict[object, _Known] = {}
    split: set[str] = set()
    same_input = _same_inputs(trace)

    def is_free(name: str) -> bool:
        return name not in split and name not in kept_whole

    for sink in reversed(trace.order):
        is_inner = sink in trace.linears and sink != trace.head and sink not in trace.flows.from_entry
        region = _region_of(trace, sink, same_input, is_free) if is_inner and is_free(sink) else None
        if region is None:
            continue
        if not region.block:
            found.whole[sink] = "no module calls it together with the modules that feed it"
            continue
        members = (sink, *region.twins, *region.sources)
        try:
            layout, reason = _lay_out(trace, region, size, known)
        except Exception as error:  # noqa: BLE001 - any code may stand in a model, and call a module twice
            name = type(trace.modules[region.block]).__name__
            layout, reason = None, f"{name} cannot run again with other inputs: {error}"
        if layout is None:
            for name in members:
                found.whole.setdefault(name, reason)
        else:
            found.regions.append((region, layout))
            split.update(members)
    return split


def _region_of(
    trace: Trace, sink: str, same_input: Mapping[str, list[str]], is_free: Callable[[str], bool]
) -> Region | None:
    """Returns the region that ends in a sink; ``None`` if no free module feeds only this one.

    Its block is empty if no module calls all of them.
    """
    flows = trace.flows
    twins = [twin for twin in same_input[sink] if is_free(twin)]
    ends = {sink, *twins}
    feeding = [s for s in sorted(flows.sources[sink]) if s in trace.linears and flows.sinks[s] <= ends]
    feeding = [s for s in feeding if is_free(s) and s not in ends]
    members = [*ends, *feeding]
    sources = [s for s in feeding if not _is_more_as_rows(trace, s, same_input[s], members)]
    if not sources:
        return None
    whole, parameters = sorted(flows.sources[sink] - set(sources)), sorted(flows.uses[sink])
    block = trace.called_by([sink, *twins, *sources])
    return Region(block, sink, sources, whole, twins=twins, parameters=parameters)


def _same_inputs(trace: Trace) -> dict[str, list[str]]:
    """Returns for each linear module the others that get the same input, such as a LoRA adapter."""
    groups: dict[object, list[str]] = {}
    for name in trace.order:
        if name in trace.linears and name != trace.head:
            inputs = [call.input.detach() for call in trace.calls[name]]
            begin = tuple((linear.shape, tuple(linear.reshape(-1)[:8].tolist())) for linear in inputs)
            groups.setdefault((begin, frozenset(trace.flows.sources[name])), []).append(name)

    def is_same(one: str, other: str) -> bool:
        pairs = zip(trace.calls[one], trace.calls[other], strict=True)
        return one != other and all(torch.equal(a.input, b.input) for a, b in pairs)

    return {
        name: [member for member in group if is_same(name, member)]
        for group in groups.values()
        for name in group
    }


def _is_more_as_rows(trace: Trace, source: str, twins: list[str], region: list[str]) -> bool:
    """Whether a region that ends in this source and its twins has more weights than this one."""

    def weights(names: list[str]) -> int:
        return sum(prod(trace.modules[name].weight.shape) for name in set(names))

    feeding = [
        s
        for s in trace.flows.sources[source]
        if s in trace.linears and trace.flows.sinks[s] <= {source, *twins}
    ]
    return bool(twins and feeding) and weights([source, *twins, *feeding]) > weights(region)


@dataclass(frozen=True)
class _Known:
    """What was found for a region; its names go on from that of the block."""

    units: list[Unit]
    norms: dict[str, str]
    through: list[str]
    layout: Layout | None

    @classmethod
    def of(cls, region: Region, layout: Layout | None) -> _Known:
        strip = len(region.block)
        return cls(
            [Unit(u.sink, {s[strip:]: c for s, c in u.sources.items()}) for u in region.units],
            {n[strip:]: s[strip:] for n, s in region.norms.items()},
            [module[strip:] for module in region.through],
            None if layout is None else _moved(layout, lambda name: name[strip:]),
        )

    def put_into(self, region: Region) -> Layout | None:
        """Notes in a region of an equal block what was found; returns the layout."""
        block = region.block
        region.units = [Unit(u.sink, {block + s: c for s, c in u.sources.items()}) for u in self.units]
        region.norms = {block + n: block + s for n, s in self.norms.items()}
        region.through = [block + module for module in self.through]
        return None if self.layout is None else _moved(self.layout, lambda name: block + name)


def _lay_out(
    trace: Trace,
    region: Region,
    size: int,
    known: dict[object, _Known],
) -> tuple[Layout | None, str]:
    """Finds a region's units and layout; computes them once for all equal blocks."""
    signature = _signature(trace, region, size)
    is_known = signature in known
    layout = known[signature].put_into(region) if is_known else None
    # Modules may differ in more than their settings, for example in a hook or a function's constant.
    if not is_known or (layout is not None and not holds_for(trace, region, layout)):
        _find_units(trace, region)
        layout = lay_out(trace, region, size) if len(region.units) > 1 else None
        if layout is not None and region.through and len(set(layout.expands)) > 1:
            layout = None  # no rank would have the weights that another rank's columns need
        known[signature] = _Known.of(region, layout)
    kind = type(trace.modules[region.block]).__name__
    if layout is not None and _reads_numbers(trace, region):
        return None, f"{kind} reads values of its split columns into Python, and may branch on them"
    if len(region.units) < 2:
        return None, f"all columns between {', '.join(region.sources)} and it depend on each other in {kind}"
    return layout, f"{kind} gave another result with only a part of its columns"


def _find_units(trace: Trace, region: Region) -> None:
    """Finds a region's units, if necessary with normalizations over all columns."""
    region.units = _units(trace, region)
    if len(region.units) < 2:
        region.norms = wide_norms(trace, region.block, region.sources)
        if region.norms:
            region.units = _units(trace, region)
    if len(region.units) < 2:
        region.norms, region.through = {}, norms_between(trace, region)
        if region.through:
            region.units = _units(trace, region)


def _reads_numbers(trace: Trace, region: Region) -> bool:
    outputs = {region.leaf(s): trace.calls[s][0].output for s in region.sources}
    return reads_numbers(lambda given: trace.replay(region.block, given, through=region.through), outputs)


def _units(trace: Trace, region: Region) -> list[Unit]:
    outputs = {region.leaf(s): trace.calls[s][0].output for s in region.sources}
    sources = {region.leaf(s): s for s in region.sources}

    def run(given: object) -> Tensor:
        replay = trace.replay(region.block, given, through=region.through)  # type: ignore[arg-type]
        return replay.seen[region.sink][0]

    units = find_units(run, outputs, trace.random)
    return [Unit(u.sink, {sources[leaf]: c for leaf, c in u.sources.items()}) for u in units]


def _signature(trace: Trace, region: Region, size: int) -> object:
    """Returns a block's classes, shapes and settings without the layer's number; equal for equal blocks."""
    strip = len(region.block)
    names = [[name[strip:] for name in linears] for linears in (region.sources, region.twins)]
    parts: list[object] = [size, region.sink[strip:], *map(tuple, names)]
    for name, module in trace.modules.items():
        if name == region.block or name.startswith(region.block + "."):
            settings = tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str) and key != "layer_idx" and key != "layer_id"
            )
            shapes = tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False))
            parts.append((name[strip:], type(module), settings, shapes))
    return tuple(parts)


def _moved(layout: Layout, rename: Callable[[str], str]) -> Layout:
    return Layout(
        {rename(s): c for s, c in layout.columns.items()},
        layout.rows,
        layout.expands,
        {(rename(module), key): values for (module, key), values in layout.attributes.items()},
        {rename(name): values for name, values in layout.parameters.items()},
        layout.arguments,
    )


def wide_norms(trace: Trace, block: str, sources: list[str]) -> dict[str, str]:
    """Returns a block's normalizations that take all columns of one source, each with that source."""
    found: dict[str, str] = {}
    for name, module in trace.modules.items():
        if not name.startswith(block + ".") or name not in trace.blocks or name in trace.linears:
            continue
        first = trace.blocks[name][0]
        given = first.args[0] if first.args else None
        if not isinstance(given, Tensor) or not given.requires_grad or formula_of(module) is None:
            continue
        outputs = [trace.calls[source][0].output for source in sources]
        gradients = torch.autograd.grad(
            given, outputs, trace.numbers(*given.shape).to(given.dtype), retain_graph=True, allow_unused=True
        )
        feeding = [s for s, g in zip(sources, gradients, strict=True) if g is not None and g.any()]
        # Only the source's own output counts: after a residual is added, the statistics differ.
        if len(feeding) == 1 and _are_close(given, trace.calls[feeding[0]][0].output):
            found[name] = feeding[0]
    return found if len(set(found.values())) == len(found) else {}


def norms_between(trace: Trace, region: Region) -> list[str]:
    """Returns the normalizations over all columns between the sources and the sink or its twins.

    Their input depends on all sources, like that of a normalization after attention.
    """
    found = []
    outputs = [trace.calls[source][0].output for source in region.sources]
    tables = (module for module in trace.modules.values() if isinstance(module, nn.Embedding))
    others = [
        call.output for name, calls in trace.calls.items() if name not in region.sources for call in calls
    ]
    others += [*trace.entries, *(table.weight for table in tables)]
    sink = trace.calls[region.sink][0].input
    for name in sorted({owner.rpartition(".")[0] for owner in region.parameters}):
        if not name.startswith(region.block + ".") or name not in trace.blocks:
            continue
        first = trace.blocks[name][0]
        given = first.args[0] if len(first.args) == 1 and not first.kwargs else None
        if not isinstance(given, Tensor) or not given.requires_grad or given.shape[-1] != sink.shape[-1]:
            continue
        if formula_of(trace.modules[name]) is None:
            continue
        # A sum with the residual stream, which all ranks have whole, is not part of the region.
        if _reaches(trace, outputs, given) and not _reaches(trace, others, given):
            found.append(name)
    return found


def _reaches(trace: Trace, leaves: list[Tensor], given: Tensor) -> bool:
    """Whether a tensor depends on any of the leaves."""
    leaves = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]
    if not leaves:
        return False
    numbers = trace.numbers(*given.shape).to(given.dtype)
    gradients = torch.autograd.grad(given, leaves, numbers, retain_graph=True, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-5)


class _Following(TorchDispatchMode):
    """Follows all tensors computed from the given ones, by their storage."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_read: bool = False
        self._kept: list[Tensor] = []
        """References that keep the storage from being reused by another tensor."""
        self._places: set[int] = set()
        for tensor in tensors:
            self._follow(tensor)

    def _follow(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self._places.add(tensor.untyped_storage()._cdata)

    def see_reading(self, tensor: Tensor) -> None:
        """Records a read if the tensor is followed."""
        self.is_read = self.is_read or tensor.untyped_storage()._cdata in self._places

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        depends = any(tensor.untyped_storage()._cdata in self._places for tensor in given)
        found = func(*args, **(kwargs or {}))
        if depends:
            self.is_read = self.is_read or reads_data(func, given)
            changed = given[:1] if func._schema.is_mutable else []
            for result in (*changed, *pytree.tree_leaves(found)):
                if isinstance(result, Tensor):
                    self._follow(result)
        return found


class _FollowingMethods(TorchFunctionMode):
    """Sees the methods that read followed tensors without an operator."""

    def __init__(self, following: _Following) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in READS_IN_PLACE and args and isinstance(args[0], Tensor):
            self._following.see_reading(args[0])
        return func(*args, **(kwargs or {}))


def reads_numbers(run: Callable[[Mapping[str, Tensor]], object], outputs: Mapping[str, Tensor]) -> bool:
    """Whether a run reads a value that depends on the given outputs into Python."""
    given = {name: output.detach().clone() for name, output in outputs.items()}
    following = _Following(given.values())
    with torch.no_grad(), following, _FollowingMethods(following):
        run(given)
    return following.is_read
