"""What the native optimizers share: the tensors of a whole parameter group go to one call of one op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError, UnsupportedParameterError
from acclimate.ops.optimizers import huge_pages, shards
from acclimate.ops.optimizers.simd import chosen_isa

if TYPE_CHECKING:
    from acclimate.ops.build.builder import OpBuilder

Parameters: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
"""Tensors, parameter groups or named parameters, as any torch optimizer takes them."""

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MASTER = "master"
"""The state's name of the float32 copy of a parameter that is kept with ``master_weights=True``."""


class GroupOptimizer(torch.optim.Optimizer):
    """An optimizer that updates each parameter group in one call.

    Args:
        params: what to optimize; float32, bfloat16 or float16, any size and layout; also parameters that
            FSDP2 has sharded, of which each rank updates its own part.
        defaults: the settings of groups that do not say otherwise.
        state_dtype: of the optimizer's state: float32, bfloat16 or float16; ``None``: each parameter's own.
        master_weights: keeps a float32 copy of each parameter of 16 bits, updates that, and writes the
            parameter from it in the same pass.

    Raises:
        UnsupportedParameterError: a parameter of another dtype.
    """

    state_names: ClassVar[tuple[str, ...]]
    """The names in ``state`` of the tensors that have the parameter's shape: one or two."""
    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {}
    """By type of device: whose library to load for a parameter there."""
    elsewhere: ClassVar[str | None] = None
    """What to use for parameters that are not on the host, where this optimizer is for the host alone."""

    def __init__(
        self,
        params: Parameters,
        defaults: dict[str, Any],
        *,
        state_dtype: torch.dtype | None,
        master_weights: bool = False,
    ) -> None:
        if state_dtype is not None and state_dtype not in SUPPORTED_DTYPES:
            raise InvalidOptimizerArgumentError(
                f"Optimizer state can be float32, bfloat16 or float16. Value {state_dtype} is not supported."
            )
        self.state_dtype = state_dtype
        self.master_weights = master_weights
        self._isa = chosen_isa()
        self._has_shards = False  # told when parameters are added: asking each in every step takes long
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with settings of its own.

        Raises:
            UnsupportedParameterError: a parameter that this optimizer cannot update.
        """
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                self.check_parameter(parameter)
        except UnsupportedParameterError:
            del self.param_groups[-1]
            raise
        self._has_shards |= any(map(shards.is_sharded, self.param_groups[-1]["params"]))

    def check_parameter(self, parameter: Tensor) -> None:
        """Loads the op for the parameter's device.

        Raises:
            UnsupportedParameterError: a parameter that this optimizer cannot update.
        """
        if parameter.dtype not in SUPPORTED_DTYPES:
            raise UnsupportedParameterError(
                f"{type(self).__name__} updates float32, bfloat16 and float16 parameters, and was given one "
                f"of {parameter.dtype}. Convert it, or use torch.optim for that one."
            )
        device = parameter.device.type
        if self.elsewhere is not None and device != "cpu":
            raise UnsupportedParameterError(
                f"{type(self).__name__} updates parameters on the host, and was given one on "
                f"{parameter.device}. Use {self.elsewhere} there."
            )
        if device in self.builders:
            self.builders[device]().load()

    # -- a step ----------------------------------------------------------------------------------

    def update(
        self,
        group: Mapping[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: tuple[list[Tensor], list[Tensor]],
        steps: list[Tensor],
        outputs: list[Tensor],
        grad_scale: float,
    ) -> None:
        """Updates the tensors of one group.

        Args:
            group: its settings.
            params: parameters, or their float32 masters.
            grads: their gradients.
            states: their state tensors, by :attr:`state_names`; the second list is empty where there is one.
            steps: how often each has been updated before, float32 scalars; to be counted up.
            outputs: what to write the new parameters to as well; empty, or one for each.
            grad_scale: multiplies the gradients.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grads: Sequence[Tensor | None] | None = None,
        outputs: Sequence[Tensor] | None = None,
        grad_scale: float = 1.0,
    ) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: computes the loss and the gradients again.
            grads: gradients to use in place of ``parameter.grad``, one for each parameter in the order of
                the groups, ``None`` for one that has none. They need not have the parameter's dtype: the
                gradients that an accelerator made in bfloat16 update float32 parameters here as they are.
            outputs: tensors that the new parameters are also written to, in the same pass over memory; one
                for each parameter, of the parameter's shape and any supported dtype.
            grad_scale: multiplies the gradients: 1 / loss scale.

        Returns:
            What the closure returned.

        Raises:
            InvalidOptimizerArgumentError: ``grads`` or ``outputs`` are not one for each parameter, or
                ``outputs`` were given to an optimizer that has master weights.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if grads is not None:
            self._check_one_each("grads", grads)
        if outputs is not None:
            self._check_one_each("outputs", outputs)
            if self.master_weights:
                raise InvalidOptimizerArgumentError(
                    "With master_weights=True the parameters are the outputs. Leave outputs out of step()."
                )
        first = 0
        for group in self.param_groups:
            last = first + len(group["params"])
            params: list[Tensor] = []
            found: list[Tensor] = []
            states: tuple[list[Tensor], list[Tensor]] = ([], [])
            steps: list[Tensor] = []
            written: list[Tensor] = []
            self._init_group(group, params, found, *states, steps, written,
                             grads[first:last] if grads is not None else None,
                             outputs[first:last] if outputs is not None else None)  # fmt: skip
            if params:
                own = [params, found, *states, written]
                if self._has_shards:
                    own = [shards.locals_of(tensors) for tensors in own]
                self.update(group, own[0], own[1], (own[2], own[3]), steps, own[4], grad_scale)
                if not torch.compiler.is_compiling():
                    # Native code writes below autograd, which has to learn that these values are new.
                    torch.autograd.graph.increment_version((*params, *written))
            first = last
        return loss

    def _check_one_each(self, name: str, tensors: Sequence[Any]) -> None:
        expected = sum(len(group["params"]) for group in self.param_groups)
        if len(tensors) != expected:
            raise InvalidOptimizerArgumentError(
                f"{name} has {len(tensors)} tensors for {expected} parameters; give one for each."
            )

    # torch.compile runs a method of this name as it is, and takes from it the lists that it filled.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        found: list[Tensor],
        first_states: list[Tensor],
        second_states: list[Tensor],
        steps: list[Tensor],
        written: list[Tensor],
        grads: Sequence[Tensor | None] | None = None,
        outputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Fills the lists with what a step over a group needs, making the state that is not there yet."""
        names = self.state_names
        second = names[1] if len(names) > 1 else None
        for index, parameter in enumerate(group["params"]):
            grad = parameter.grad if grads is None else grads[index]
            if grad is None:
                continue
            state = self.state[parameter]
            if "step" not in state:
                self._check_gradient(grad)
                self._make_state(group, parameter, state)
            if not self.master_weights:
                params.append(parameter)
            elif parameter.dtype == torch.float32:
                params.append(parameter)
                written.append(parameter)
            else:
                if MASTER not in state:
                    state[MASTER] = huge_pages.empty_like(parameter, torch.float32).copy_(parameter)
                params.append(state[MASTER])
                written.append(parameter)
            found.append(shards.spread_like(grad, parameter) if self._has_shards else grad)
            first_states.append(state[names[0]])
            if second is not None:
                second_states.append(state[second])
            steps.append(state["step"])
            if outputs is not None:
                written.append(outputs[index])

    def _check_gradient(self, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise UnsupportedParameterError(
                f"{type(self).__name__} takes dense gradients, and was given a {grad.layout} one. "
                "Make it dense, or use torch.optim.SparseAdam."
            )

    def _make_state(self, group: Mapping[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for name in self.state_names:
            memory = huge_pages.empty_like(parameter, self.state_dtype or parameter.dtype)
            state[name] = memory.fill_(self.initial_state(name, group))

    def initial_state(self, name: str, group: Mapping[str, Any]) -> float:
        """What a state tensor holds before the first step."""
        return 0.0

    # -- saving and loading ----------------------------------------------------------------------

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` of this optimizer, or of torch's of the same algorithm, returned.

        State keeps this optimizer's dtype for it, where torch would cast it to the parameter's.
        """
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            saved = state_dict["state"].get(saved_id)
            if not saved:
                continue
            state = self.state[parameter]
            state["step"] = torch.tensor(float(saved.get("step", 0)), dtype=torch.float32)
            for name, dtype in self._state_dtypes(parameter):
                if name in saved:
                    state[name] = huge_pages.empty_like(parameter, dtype).copy_(saved[name])

    def _state_dtypes(self, parameter: Tensor) -> Iterator[tuple[str, torch.dtype]]:
        for name in self.state_names:
            yield name, self.state_dtype or parameter.dtype
        if self.master_weights and parameter.dtype != torch.float32:
            yield MASTER, torch.float32

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)  # a state saved by another optimizer of the same algorithm


class FusedOptimizer(GroupOptimizer):
    """What adds to an optimizer of one device's parameters that a group may be on several.

    Comes before that optimizer among the bases of a class.
    """

    set_grad_none: bool
    """What :meth:`zero_grad` does unless told."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or sets them to zero."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def update(
        self,
        group: Mapping[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: tuple[list[Tensor], list[Tensor]],
        steps: list[Tensor],
        outputs: list[Tensor],
        grad_scale: float,
    ) -> None:
        """Updates the tensors of one group, in one call for each device they are on."""
        for part in by_device(params, grads, *states, steps, outputs):
            super().update(group, part[0], part[1], (part[2], part[3]), part[4], part[5], grad_scale)


def number(value: float | Tensor) -> float:
    """A setting as a number; schedulers may put a tensor in its place."""
    return value.item() if isinstance(value, Tensor) else value


def check_settings(*, lr: float | Tensor, weight_decay: float, **others: float) -> None:
    """Raises :class:`InvalidOptimizerArgumentError` for a negative setting, or a beta that is not below 1."""
    for name, value in {"lr": number(lr), "weight_decay": weight_decay, **others}.items():
        if not value >= 0.0 or (name.startswith("beta") and not value < 1.0):
            limit = "from 0 to below 1" if name.startswith("beta") else "0 or more"
            raise InvalidOptimizerArgumentError(f"{name} has to be {limit}. Value {value} is not.")


def by_device(*lists: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """The lists, or where the tensors of the first are on several devices, one set of lists for each.

    Lists are as long as the first, or empty.
    """
    devices = {tensor.device for tensor in lists[0]}
    if len(devices) == 1:
        yield lists
        return
    for device in sorted(devices, key=str):
        chosen = [index for index, tensor in enumerate(lists[0]) if tensor.device == device]
        yield tuple([tensors[index] for index in chosen] if tensors else [] for tensors in lists)
