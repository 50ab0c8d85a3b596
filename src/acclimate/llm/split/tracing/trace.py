"""Runs a copy of a model without its weights, and records which linear modules feed which.

Stand-ins replace linear modules, the vocabulary's embedding and experts. They return random numbers of the
right shape, so no weight is needed. Normalizations, rotary embeddings, masks and attention run unchanged.
Gradients do not pass through a stand-in, so the gradient of a linear module's input reaches the modules that
feed it directly and no others.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acclimate.errors import PlanError, TraceError
from acclimate.llm.split.layers.changes import set_attribute
from acclimate.llm.split.tracing.calls import Call, NoEmptyAttention, Record, Replay, fresh
from acclimate.llm.split.tracing.linear_modules import CalledLinears, embeddings, expert_weights, linear_dims
from acclimate.llm.split.tracing.random_inputs import (
    Numbers,
    fill_weights,
    random_inputs,
    richer_inputs,
    tokens_for,
)
from acclimate.llm.split.tracing.stand_ins import StandIns

LARGE = 1 << 24
"""An embedding with more elements gets a stand-in, to save memory."""


class Trace:
    """One run of a model's copy; its blocks can be run again with other outputs of linear modules.

    Args:
        model: the model; it may be on the meta device.
        example: a function that calls the model once; ``None`` to try random inputs.
        dtype: the dtype of the copy.
        opaque: classes of modules that run without stand-ins.
        is_rich: whether the random inputs are more than text.

    Raises:
        TraceError: the model's code raised.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Callable[[nn.Module], Any] | None = None,
        dtype: torch.dtype = torch.float64,
        opaque: Collection[type[nn.Module]] = (),
        is_rich: bool = False,
    ) -> None:
        # The copy, and what in it can be split.
        self.opaque = opaque
        self.dtype = dtype
        # Its own generator gives the same random numbers on all ranks, which must find the same plan.
        self.random = torch.Generator().manual_seed(0)
        self.model = _without_weights(model).to(dtype).eval()
        self.modules = dict(self.model.named_modules())
        self.vocabulary, self.head = embeddings(self.model)
        """The names of the vocabulary's embeddings, and of the output head."""
        self.linears: dict[str, tuple[int, int]] = {}
        """Per linear module with a stand-in, the dimensions of its weight's columns and rows."""
        self.opaque_linears: dict[str, tuple[int, int]] = {}
        """The same for linear modules inside opaque modules, which run without a stand-in."""
        self.experts: dict[str, dict[str, nn.Parameter]] = {}

        # What the run recorded.
        self.stand_ins = StandIns(self.numbers)
        self.calls = self.stand_ins.calls
        self.order = self.stand_ins.order
        self.entries = self.stand_ins.entries
        self.blocks = self.stand_ins.blocks
        self.inputs: dict[str, Any] = {}
        """The keyword arguments of the run; empty if it used only tokens or the user's example."""
        self.text_inputs: dict[str, Any] = {}
        """The keyword arguments of a text-only run, if this run had more inputs."""
        self.tokens: Tensor | None = None
        """The tokens of the run; ``None`` if the user's example made the call."""
        self.called_linears: dict[str, tuple[int, int]] = {}
        """The linear modules inside opaque modules whose weights only their own forward uses."""

        self._place_stand_ins()
        self.parameters = self._filled()
        """The parameters of the modules that run unchanged."""
        outputs = self._run(example, is_rich)
        self.flows = Flows(self.calls, self.entries, outputs, self.parameters, self.numbers)

    def numbers(self, *shape: int) -> Tensor:
        """Returns positive random numbers, because ReLU would cut the flow of negative ones."""
        return torch.rand(shape, generator=self.random, dtype=self.dtype) + 0.1

    # -- preparing -------------------------------------------------------------------------------

    def _place_stand_ins(self) -> None:
        opaque = [n for n, m in self.modules.items() if type(m) in self.opaque and n]
        for name, module in self.modules.items():
            if any(name.startswith(f"{parent}.") for parent in opaque):
                if "forward" not in vars(module) and (dims := linear_dims(module)) is not None:
                    self.opaque_linears[name] = dims
            elif self._is_replaced_embedding(name, module):
                self.stand_ins.replace_embedding(name, module, module.weight.shape[-1])
            elif (dims := linear_dims(module)) is not None:
                self.linears[name] = dims
                columns, rows = (module.weight.shape[dim] for dim in dims)
                self.stand_ins.replace_linear(name, module, columns, rows)
            elif weights := expert_weights(module):
                self.experts[name] = weights
                self.stand_ins.replace_experts(name, module)
            elif name:
                self.stand_ins.record_block(name, module)

    def _is_replaced_embedding(self, name: str, module: nn.Module) -> bool:
        is_large = isinstance(module, nn.Embedding) and module.weight.numel() > LARGE
        return name in self.vocabulary or is_large

    def _filled(self) -> dict[str, nn.Parameter]:
        """Gives random values to the modules that run unchanged; returns their parameters by name."""
        replaced = [self.modules[name] for name in (*self.linears, *self.experts)]
        replaced += [m for n, m in self.modules.items() if self._is_replaced_embedding(n, m)]
        weights = {id(p) for module in replaced for p in module.parameters()}
        fill_weights(self.modules.values(), weights, self.numbers)
        return {n: p for n, p in self.model.named_parameters() if not p.is_meta}

    # -- running ---------------------------------------------------------------------------------

    def _run(self, example: Callable[[nn.Module], Any] | None, is_rich: bool) -> list[Tensor]:
        """Runs the copy; returns its outputs that have gradients."""
        try:
            # Without this, tensors that the model creates would be on the default device, not the copy's.
            watching = self._watching()
            with torch.device("cpu"), _seeded(), torch.enable_grad(), watching:
                found = example(self.model) if example is not None else self._call(is_rich)
            if isinstance(watching, CalledLinears):
                called = sorted(watching.found())
                self.called_linears = {name: self.opaque_linears[name] for name in called}
        except Exception as error:
            raise TraceError(
                _raised_in(error),
                f"{type(self.model).__name__} could not be traced: "
                f"{type(error).__name__}: {error}. Pass a call that works: "
                "make_plan(..., example=lambda model: model(...)).",
            ) from error
        leaves = pytree.tree_leaves(dict(found) if isinstance(found, Mapping) else found)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def _watching(self) -> CalledLinears | contextlib.nullcontext[None]:
        if not self.opaque_linears:
            return contextlib.nullcontext()
        modules = {name: self.modules[name] for name in self.opaque_linears}
        self.stand_ins.modules += modules.values()  # their forward is replaced too
        return CalledLinears(modules)

    def _call(self, is_rich: bool) -> Any:
        """Calls the model with random inputs; if it fails, tries the next ones."""
        tokens = tokens_for(self.model)
        refused: Exception | None = None
        furthest = -1
        candidates = (richer_inputs if is_rich else random_inputs)(self.model, tokens, self.numbers)
        for make in candidates:
            self.stand_ins.restart([])
            try:
                inputs = make()
                self.stand_ins.restart(inputs.entries)
                self.inputs, self.tokens = inputs.arguments, tokens
                return self.call(inputs.arguments, tokens)
            except Exception as error:  # noqa: BLE001 - any code may stand in a model
                if len(self.calls) > furthest:
                    refused, furthest = error, len(self.calls)
        if refused is not None:
            raise refused
        raise PlanError(f"No input is known for {type(self.model).__name__}.")

    def call(self, inputs: Mapping[str, Any], tokens: Tensor) -> Any:
        """Calls the model with keyword arguments, or with only tokens if there are none."""
        return self.model(**inputs) if inputs else self.model(tokens)

    def recording(self, record: Record) -> contextlib.AbstractContextManager[None]:
        """Passes each call of a block in the ``with`` block to ``record``; leaves the trace unchanged."""
        return self.stand_ins.recording(record)

    # -- running blocks again --------------------------------------------------------------------

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
        replay = Replay(outputs)
        passed = [name for name in outputs if name not in self.calls]
        for name in passed:
            self.modules[name].forward = self._passing(outputs[name])
        for name in through:
            self.modules[name].forward = lambda given: given * 1.0
        try:
            with (
                self.stand_ins.replaying(replay),
                torch.device("cpu"),
                NoEmptyAttention(),
                _seeded(),
            ):
                self.modules[block](*args, **kwargs)
            return replay
        finally:
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
            for restore in reversed(undo):
                restore()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Random numbers of the host from one seed in the ``with`` block; the program's go on after it.

    Not by ``torch.manual_seed``, which seeds devices whose state is not kept.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _without_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with its parameters on the meta device."""
    meta: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.is_floating_point())
        for p in model.parameters()
    }
    return copy.deepcopy(model, meta)


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


def traced(model: nn.Module, example: Callable[[nn.Module], Any] | None) -> Trace:
    """Runs the model's copy, with inputs that reach most of it."""
    first = _traced(model, example)
    missed = _unreached(first)
    if example is not None or not missed or first.tokens is None:
        return first
    if any(True for _ in richer_inputs(first.model, first.tokens, first.numbers)):
        with contextlib.suppress(TraceError):  # the text-only run already works
            rich = _traced(model, None, is_rich=True)
            if _unreached(rich) < missed:
                rich.text_inputs = first.inputs
                return rich
    return first


def _unreached(trace: Trace) -> set[str]:
    dims = trace.linears.keys() | trace.opaque_linears
    return {name for name in dims if name not in trace.calls and name not in trace.called_linears}


def _traced(model: nn.Module, example: Callable[[nn.Module], Any] | None, is_rich: bool = False) -> Trace:
    """Runs the model's copy.

    Uses float32 if the model's code works only in float32. A module whose code uses the weights of linear
    modules directly runs without stand-ins and stays whole.
    """
    opaque: list[type[nn.Module]] = []
    while True:
        try:
            return Trace(model, example, opaque=opaque, is_rich=is_rich)
        except TraceError as error:
            first = error
        try:
            return Trace(model, example, torch.float32, opaque, is_rich)
        except TraceError as error:
            module = error.module
            if not isinstance(module, nn.Module) or type(module) in opaque or type(module) is type(model):
                raise first from None
            if not _holds_linears(module):
                raise first from None
            opaque.append(type(module))


def _holds_linears(module: nn.Module) -> bool:
    weights = (
        submodule._parameters.get("weight")
        for submodule in module.modules()
        if not isinstance(submodule, nn.Embedding)
    )
    return any(weight is not None and weight.dim() == 2 for weight in weights)


MODEL = ""
"""Stands for the whole model's outputs, among the names of stand-ins."""


class Flows:
    """The modules and parameters on which the inputs of stand-ins depend, without another stand-in between.

    Args:
        calls: the calls of each stand-in.
        entries: the tensors that enter the model: outputs of embeddings, and inputs with gradients.
        outputs: the model's outputs.
        parameters: the parameters of the modules that run unchanged.
        numbers: makes random numbers.
    """

    def __init__(
        self,
        calls: Mapping[str, Sequence[Call]],
        entries: Sequence[Tensor],
        outputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        numbers: Numbers,
    ) -> None:
        self.sources: dict[str, set[str]] = {}
        """Per stand-in, the stand-ins whose outputs its input depends on."""
        self.sinks: dict[str, set[str]] = {name: set() for name in calls}
        """Per stand-in, the stand-ins whose inputs depend on its output."""
        self.uses: dict[str, set[str]] = {}
        """Per stand-in, the parameters that its input depends on."""
        self.from_entry: set[str] = set()
        """The stand-ins whose input depends on an entry."""
        self._numbers = numbers
        self._parameters = parameters
        self._entries = {id(entry) for entry in entries}
        self._leaves = [call.output for recorded in calls.values() for call in recorded]
        self._names = [name for name, recorded in calls.items() for _ in recorded]
        for tensor in entries:
            if all(tensor is not leaf for leaf in self._leaves):
                self._leaves.append(tensor)
                self._names.append(MODEL)
        for name, each_calls in calls.items():
            self._follow(name, [call.input for call in each_calls])
        self._follow(MODEL, outputs)

    def _follow(self, target: str, tensors: Sequence[Tensor]) -> None:
        """Records the leaves and parameters that a stand-in's inputs depend on."""
        sources = self.sources.setdefault(target, set())
        uses = self.uses.setdefault(target, set())
        for tensor in tensors:
            if not (tensor.requires_grad and tensor.is_floating_point()):
                continue
            gradients = torch.autograd.grad(
                tensor,
                [*self._leaves, *self._parameters.values()],
                self._numbers(*tensor.shape).to(tensor.dtype),
                retain_graph=True,
                allow_unused=True,
            )
            reached = [gradient is not None and bool(gradient.any()) for gradient in gradients]
            count = len(self._leaves)
            for leaf, name, is_reached in zip(self._leaves, self._names, reached[:count], strict=True):
                if not is_reached:
                    continue
                if id(leaf) in self._entries:
                    self.from_entry.add(target)
                else:
                    sources.add(name)
                    self.sinks[name].add(target)
            uses.update(
                name for name, is_used in zip(self._parameters, reached[count:], strict=True) if is_used
            )
