"""Runs a copy of a model without its weights, and records which linear modules feed which.

Stand-ins replace linear modules, the vocabulary's embedding and experts. They return random numbers of the
right shape, so no weight is needed. Normalizations, rotary embeddings, masks and attention run unchanged.
Each stand-in's output is a new leaf of the autograd graph, so the gradient of a linear module's input reaches
the modules that feed it directly and no others.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acclimate.errors import PlanError, TraceError
from acclimate.parallel.layers.attributes import set_attribute
from acclimate.parallel.tracing.arguments import as_given, fresh
from acclimate.parallel.tracing.linear_modules import embeddings, expert_weights, weight_of
from acclimate.parallel.tracing.random_inputs import made_up_inputs, richer_inputs, tokens_for
from acclimate.parallel.tracing.weight_access import CalledLinears

Record = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Receives the name and the arguments of a block that is called."""


def _raised_in(error: BaseException) -> nn.Module | None:
    """Returns the innermost module whose code an error passed through."""
    found = None
    place = error.__traceback__
    while place is not None:
        owner = place.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = owner
        place = place.tb_next
    return found


@dataclass
class Call:
    """One call of a module that a stand-in replaces."""

    name: str
    input: Tensor
    """Its first argument, on the graph."""
    output: Tensor
    """A leaf."""


@dataclass
class Invocation:
    """The arguments of one call of a module that runs unchanged."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Replay:
    """The outputs that stand-ins return while one block runs again, and the inputs that they get."""

    outputs: Mapping[str, Tensor]
    seen: dict[str, list[Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Trace:
    """One run of a model's copy; its blocks can be run again with other outputs of linear modules."""

    def __init__(
        self,
        model: nn.Module,
        example: Callable[[nn.Module], Any] | None = None,
        dtype: torch.dtype = torch.float64,
        opaque: Collection[type[nn.Module]] = (),
        is_rich: bool = False,
    ) -> None:
        self.opaque = opaque
        self._inputs = richer_inputs if is_rich else made_up_inputs
        self.plain: dict[str, Any] = {}
        """The keyword arguments of a text-only run, if this run had more inputs."""
        self.dtype = dtype
        meta = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.is_floating_point())
            for p in model.parameters()
        }
        # Its own generator gives the same random numbers on all ranks, which must find the same plan.
        self.random = torch.Generator().manual_seed(0)
        self.model = copy.deepcopy(model, dict(meta))
        self.model.to(dtype).eval()
        self.vocabulary, self.head = embeddings(self.model)
        self.modules = dict(self.model.named_modules())
        self.linears: dict[str, tuple[int, int]] = {}
        self.experts: dict[str, dict[str, nn.Parameter]] = {}
        self.calls: dict[str, list[Call]] = {}
        self.order: list[str] = []
        self.entries: list[Tensor] = []
        self.blocks: dict[str, list[Invocation]] = {}
        self.replaying: Replay | None = None
        self._record: Record | None = None
        self.inputs: dict[str, Any] = {}
        """The keyword arguments of the run; empty if it used only tokens or the user's example."""
        self.tokens: Tensor | None = None
        """The tokens of the run; ``None`` if the user's example made the call."""
        self.recorders: set[int] = set()
        """The ids of the hooks that this trace added."""
        self.stand_ins: list[nn.Module] = []
        self.called_linears: dict[str, tuple[int, int]] = {}
        """Linear modules inside unchanged code that only calls them."""
        self.really_run: dict[str, tuple[int, int]] = {}
        self._place_stand_ins()
        self._fill()
        self.outputs = self._run(example)
        self._find_flows()

    # -- preparing -------------------------------------------------------------------------------

    def _place_stand_ins(self) -> None:
        really_run = [n for n, m in self.modules.items() if type(m) in self.opaque and n]
        for name, module in self.modules.items():
            if any(name.startswith(f"{each}.") for each in really_run):
                if "forward" not in vars(module) and (dims := weight_of(module)) is not None:
                    self.really_run[name] = dims
                continue
            if name in self.vocabulary or self._is_large_embedding(module):
                module.forward = self._stand_in(name, module.weight.shape[-1], entry=True)
            elif (dims := weight_of(module)) is not None:
                self.linears[name] = dims
                module.forward = self._stand_in(
                    name, module.weight.shape[dims[0]], module.weight.shape[dims[1]]
                )
            elif weights := expert_weights(module):
                self.experts[name] = weights
                module.forward = self._stand_in(name, None)
            elif name:
                handle = module.register_forward_pre_hook(self._recorder(name), with_kwargs=True)
                self.recorders.add(handle.id)

    @staticmethod
    def _is_large_embedding(module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding) and module.weight.numel() > 1 << 24

    def _stand_in(
        self, name: str, width: int | None, rows: int | None = None, entry: bool = False
    ) -> Callable[..., Tensor]:
        self.stand_ins.append(self.modules[name])

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            if self.replaying is not None:
                return self._replayed(name, given)
            if rows is not None and given.shape[-1] != rows:
                raise RuntimeError(f"{name} takes {rows} columns, but was called with {given.shape[-1]}")
            shape = given.shape if width is None else (*given.shape[: None if entry else -1], width)
            if self._record is not None:
                return self.numbers(*shape)
            if width is None:
                self.blocks.setdefault(name, []).append(Invocation(args, dict(kwargs)))
            output = self.numbers(*shape).requires_grad_()
            if name not in self.calls:
                self.order.append(name)
            self.calls.setdefault(name, []).append(Call(name, given, output))
            if entry:
                self.entries.append(output)
            # Not a leaf itself, because code may change a module's output in place, which leaves forbid.
            return output * 1.0

        return forward

    def _replayed(self, name: str, given: Tensor) -> Tensor:
        replay = self.replaying
        if replay is None:
            raise PlanError(f"{name} was called outside of a run.")
        number = replay.counts.get(name, 0)
        replay.counts[name] = number + 1
        replay.seen.setdefault(name, []).append(given)
        if name in replay.outputs:
            return replay.outputs[name] * 1.0
        return self.calls[name][number].output.detach().clone()

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._record is not None:
                self._record(name, args, kwargs)
            elif self.replaying is None:
                self.blocks.setdefault(name, []).append(Invocation(*as_given((args, dict(kwargs)))))

        return record

    @contextlib.contextmanager
    def recording(self, record: Record) -> Iterator[None]:
        """Passes each call of a block in the ``with`` block to ``record``; leaves the trace unchanged."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    def numbers(self, *shape: int) -> Tensor:
        """Returns positive random numbers, because ReLU would cut the flow of negative ones."""
        return torch.rand(shape, generator=self.random, dtype=self.dtype) + 0.1

    def _fill(self) -> None:
        """Gives random values to the parameters of unchanged modules that have none."""
        kept = {id(p) for name in (*self.linears, *self.experts) for p in self.modules[name].parameters()}
        stubs = [m for n, m in self.modules.items() if n in self.vocabulary or self._is_large_embedding(m)]
        kept |= {id(p) for module in stubs for p in module.parameters()}
        filled: dict[int, nn.Parameter] = {}
        for module in self.modules.values():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in kept:
                    if id(p) not in filled:
                        floating = p.is_floating_point()
                        new = self.numbers(*p.shape) if floating else torch.zeros_like(p, device="cpu")
                        filled[id(p)] = nn.Parameter(new, floating)
                    module._parameters[name] = filled[id(p)]
            for name, b in module._buffers.items():
                if b is not None and b.is_meta:
                    if b.is_floating_point():
                        module._buffers[name] = self.numbers(*b.shape).to(b.dtype)
                    elif b.dtype == torch.bool:
                        module._buffers[name] = torch.ones(b.shape, dtype=b.dtype)
                    else:
                        module._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
                elif b is not None:
                    module._buffers[name] = b.cpu()
        # Parameters are looked up by name, because modules hold new objects now.
        self.parameters = {n: p for n, p in self.model.named_parameters() if not p.is_meta}

    # -- running ---------------------------------------------------------------------------------

    def _run(self, example: Callable[[nn.Module], Any] | None) -> list[Tensor]:
        try:
            # Without this, tensors that the model creates would be on the default device, not the copy's.
            watching = self._watching()
            with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad(), watching:
                torch.manual_seed(0)
                found = example(self.model) if example is not None else self._call()
            if isinstance(watching, CalledLinears):
                self.called_linears = {name: self.really_run[name] for name in sorted(watching.found())}
        except Exception as error:
            raise TraceError(
                _raised_in(error),
                f"{type(self.model).__name__} could not be traced: "
                f"{type(error).__name__}: {error}. Pass a call that works: "
                "make_plan(..., example=lambda model: model(...)).",
            ) from error
        leaves = pytree.tree_leaves(dict(found) if isinstance(found, Mapping) else found)
        return [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]

    def _watching(self) -> CalledLinears | contextlib.nullcontext[None]:
        if not self.really_run:
            return contextlib.nullcontext()
        modules = {name: self.modules[name] for name in self.really_run}
        self.stand_ins += modules.values()
        return CalledLinears(modules)

    def _call(self) -> Any:
        """Calls the model with made-up inputs; if it fails, tries the next ones."""
        tokens = tokens_for(self.model)
        refused: Exception | None = None
        furthest = -1
        for make in self._inputs(self.model, tokens, self.numbers):
            self.calls.clear()
            try:
                made_up = make()
                self.calls.clear()
                self.order.clear()
                self.blocks.clear()
                self.entries[:] = made_up.entries
                self.inputs, self.tokens = made_up.given, tokens
                return self.call(made_up.given, tokens)
            except Exception as error:  # noqa: BLE001 - any code may stand in a model
                if len(self.calls) > furthest:
                    refused, furthest = error, len(self.calls)
        if refused is not None:
            raise refused
        raise PlanError(f"No input is known for {type(self.model).__name__}.")

    def call(self, inputs: Mapping[str, Any], tokens: Tensor) -> Any:
        """Calls the model with keyword arguments, or with only tokens if there are none."""
        return self.model(**inputs) if inputs else self.model(tokens)

    # -- flows -----------------------------------------------------------------------------------

    def _find_flows(self) -> None:
        """Finds which outputs and parameters each stand-in's input depends on."""
        leaves: list[Tensor] = []
        names: list[str] = []
        for name, calls in self.calls.items():
            for call in calls:
                leaves.append(call.output)
                names.append(name)
        entries = {id(each) for each in self.entries}
        for each in self.entries:
            if all(each is not leaf for leaf in leaves):
                leaves.append(each)
                names.append("")
        parameters = list(self.parameters)
        everything = [*leaves, *self.parameters.values()]
        self.sources: dict[str, set[str]] = {}
        self.from_entry: set[str] = set()
        self.uses: dict[str, set[str]] = {}
        self.sinks: dict[str, set[str]] = {name: set() for name in self.calls}

        def follow(target: str, tensors: list[Tensor]) -> None:
            self.sources.setdefault(target, set())
            self.uses.setdefault(target, set())
            for tensor in tensors:
                if not (tensor.requires_grad and tensor.is_floating_point()):
                    continue
                found = torch.autograd.grad(
                    tensor, everything, self.numbers(*tensor.shape).to(tensor.dtype),
                    retain_graph=True, allow_unused=True,
                )  # fmt: skip
                for place, gradient in enumerate(found):
                    if gradient is None or not gradient.any():
                        continue
                    if place >= len(leaves):
                        self.uses[target].add(parameters[place - len(leaves)])
                    elif id(leaves[place]) in entries:
                        self.from_entry.add(target)
                    else:
                        self.sources[target].add(names[place])
                        self.sinks[names[place]].add(target)

        for name, calls in self.calls.items():
            follow(name, [call.input for call in calls])
        follow("", self.outputs)

    def called_by(self, names: list[str]) -> str:
        """Returns the smallest called module that contains all the given modules."""
        paths = [name.split(".")[:-1] for name in names]
        common = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        # A ModuleList is never called.
        while common and ".".join(common) not in self.blocks:
            common.pop()
        return ".".join(common)

    def replay(
        self,
        block: str,
        outputs: Mapping[str, Tensor],
        arguments: Callable[..., Any] | None = None,
        through: Collection[str] = (),
    ) -> Replay:
        """Runs one block again with other outputs of some linear modules.

        Modules in ``through`` return their input unchanged.
        """
        first = self.blocks[block][0]
        plain = fresh((first.args, first.kwargs))
        args, kwargs = arguments(*plain) if arguments is not None else plain
        self.replaying = Replay(outputs)
        passed = [name for name in outputs if name not in self.calls]
        for name in passed:
            self.modules[name].forward = self._passing(outputs[name])
        for name in through:
            self.modules[name].forward = lambda given: given * 1.0
        try:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.modules[block](*args, **kwargs)
            return self.replaying
        finally:
            self.replaying = None
            for name in (*passed, *through):
                del self.modules[name].forward  # the class's own

    @staticmethod
    def _passing(output: Tensor) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: output * 1.0

    @contextlib.contextmanager
    def changed(self, values: Mapping[tuple[str, str], Any]) -> Iterator[None]:
        """Sets attributes of modules (``config.x`` in a copy of the configuration), and restores them."""
        undo: list[Callable[[], None]] = []
        try:
            for (name, attribute), value in values.items():
                undo.append(set_attribute(self.modules[name], attribute, value))
            yield
        finally:
            for each in reversed(undo):
                each()


def detached(values: Any) -> Any:
    """Returns nested values with all tensors detached."""
    return pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, values)
