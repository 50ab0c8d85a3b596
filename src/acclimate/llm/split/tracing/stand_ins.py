"""Stand-ins for modules with weights: they return random numbers, and record what they are called with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from acclimate.llm.split.tracing.calls import Call, Invocation, Record, Replay, as_given
from acclimate.llm.split.tracing.random_inputs import Numbers


class StandIns:
    """The stand-ins of one model, and what they and the recorded blocks were called with."""

    def __init__(self, numbers: Numbers) -> None:
        self.modules: list[nn.Module] = []
        """The modules whose ``forward`` is replaced."""
        self.hooks: set[int] = set()
        """The ids of the hooks that record blocks."""
        self.calls: dict[str, list[Call]] = {}
        """Per stand-in, its calls."""
        self.order: list[str] = []
        """The names of the called stand-ins, in the order of their first calls."""
        self.entries: list[Tensor] = []
        """The tensors that enter the model: outputs of embeddings, and inputs with gradients."""
        self.blocks: dict[str, list[Invocation]] = {}
        """Per module that runs unchanged, and per module of experts, its calls."""
        self._numbers = numbers
        self._replay: Replay | None = None
        self._record: Record | None = None

    def replace_embedding(self, name: str, module: nn.Module, width: int) -> None:
        """Replaces an embedding; its output enters the model."""
        self._replace(name, module, lambda given: (*given.shape, width), is_entry=True)

    def replace_linear(self, name: str, module: nn.Module, columns: int, rows: int) -> None:
        """Replaces a linear module with ``rows`` inputs and ``columns`` outputs."""

        def shape(given: Tensor) -> tuple[int, ...]:
            if given.shape[-1] != rows:
                raise RuntimeError(f"{name} takes {rows} columns, but was called with {given.shape[-1]}")
            return (*given.shape[:-1], columns)

        self._replace(name, module, shape)

    def replace_experts(self, name: str, module: nn.Module) -> None:
        """Replaces a module of experts, and keeps its arguments."""
        self._replace(name, module, lambda given: tuple(given.shape), is_block=True)

    def _replace(
        self,
        name: str,
        module: nn.Module,
        shape: Callable[[Tensor], tuple[int, ...]],
        is_entry: bool = False,
        is_block: bool = False,
    ) -> None:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given = next(argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor))
            if self._replay is not None:
                return self._replayed(name, given, self._replay)
            expected = shape(given)
            if self._record is not None:
                return self._numbers(*expected)
            if is_block:
                self.blocks.setdefault(name, []).append(Invocation(args, dict(kwargs)))
            output = self._numbers(*expected).requires_grad_()
            if name not in self.calls:
                self.order.append(name)
            self.calls.setdefault(name, []).append(Call(name, given, output))
            if is_entry:
                self.entries.append(output)
            # Not a leaf itself, because code may change a module's output in place, which leaves forbid.
            return output * 1.0

        self.modules.append(module)
        module.forward = forward

    def _replayed(self, name: str, given: Tensor, replay: Replay) -> Tensor:
        number = replay.counts.get(name, 0)
        replay.counts[name] = number + 1
        replay.seen.setdefault(name, []).append(given)
        if name in replay.outputs:
            return replay.outputs[name] * 1.0
        return self.calls[name][number].output.detach().clone()

    def record_block(self, name: str, module: nn.Module) -> None:
        """Records the calls of a module that runs unchanged."""

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._record is not None:
                self._record(name, args, kwargs)
            elif self._replay is None:
                self.blocks.setdefault(name, []).append(Invocation(*as_given((args, dict(kwargs)))))

        self.hooks.add(module.register_forward_pre_hook(record, with_kwargs=True).id)

    def restart(self, entries: list[Tensor]) -> None:
        """Forgets all calls; ``entries`` are the inputs of the next run."""
        self.calls.clear()
        self.order.clear()
        self.blocks.clear()
        self.entries[:] = entries

    @contextlib.contextmanager
    def replaying(self, replay: Replay) -> Iterator[None]:
        """Returns a replay's outputs in the ``with`` block, and records nothing else."""
        self._replay = replay
        try:
            yield
        finally:
            self._replay = None

    @contextlib.contextmanager
    def recording(self, record: Record) -> Iterator[None]:
        """Passes each call of a block in the ``with`` block to ``record``; keeps the recorded calls."""
        self._record = record
        try:
            yield
        finally:
            self._record = None
