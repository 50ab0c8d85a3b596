"""The base of the native optimizers: one call of one op updates a whole parameter group.

Devices without a native kernel have the ops in plain torch: a rule for one parameter updates a whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from acclimate.errors import InvalidOptimizerArgumentError, UnsupportedParameterError
from acclimate.host import huge_pages
from acclimate.ops.optimizers import shards
from acclimate.ops.optimizers.checks import (
    SUPPORTED_DTYPES,
    check_like,
    check_memory,
    check_saved_state,
    check_settings,
    check_sizes,
    check_state,
    check_tensor,
    number,
    saved_step,
)
from acclimate.ops.simd import chosen_isa

if TYPE_CHECKING:
    from acclimate.ops.build.builder import OpBuilder

Parameters: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
"""Tensors, parameter groups or named parameters, as for any torch optimizer."""

Place: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]
"""A tensor's address, shape and strides."""

MASTER = "master"
"""The key in ``state`` of a parameter's float32 copy, which ``master_weights=True`` keeps."""


@dataclass(frozen=True)
class GroupTensors:
    """The tensors of one parameter group in a step; each list has one for each parameter."""

    params: list[Tensor]
    """Parameters, or their float32 masters."""
    grads: list[Tensor]
    states: tuple[list[Tensor], ...]
    """In the order of :attr:`GroupOptimizer.state_names`."""
    steps: list[Tensor]
    """How often each was updated before: float32 scalars, which the op increments."""
    outputs: list[Tensor]
    """Tensors that also receive the new parameters; empty, or one for each."""

    def lists(self) -> tuple[list[Tensor], ...]:
        """Returns the lists in the order of every op's arguments."""
        return (self.params, self.grads, *self.states, self.steps, self.outputs)

    def on_this_rank(self) -> GroupTensors:
        """Returns this rank's parts of sharded tensors."""
        return _tensors([[shards.local(tensor) for tensor in tensors] for tensors in self.lists()])

    def by_device(self) -> Iterator[GroupTensors]:
        """Yields these tensors, divided by device if the parameters are on several."""
        devices = {parameter.device for parameter in self.params}
        if len(devices) == 1:
            yield self
            return
        for device in sorted(devices, key=str):
            chosen = [index for index, parameter in enumerate(self.params) if parameter.device == device]
            yield _tensors(rows(self.lists(), chosen))


def _places(tensors: Iterable[Tensor]) -> list[Place]:
    return [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors]


def _tensors(lists: Sequence[list[Tensor]]) -> GroupTensors:
    params, grads, *states, steps, outputs = lists
    return GroupTensors(params, grads, tuple(states), steps, outputs)


class GroupOptimizer(torch.optim.Optimizer):
    """An optimizer that updates each parameter group in one call of its op.

    Args:
        params: what to optimize: float32, bfloat16 or float16, of any size and layout. Of parameters that
            FSDP2 has sharded, each rank updates its own part.
        defaults: the settings of groups that have none of their own.
        state_dtype: the dtype of the state: float32, bfloat16 or float16; ``None``: each parameter's own.
        master_weights: keeps a float32 copy of each 16-bit parameter, updates the copy, and writes the
            parameter from it in the same pass.

    Raises:
        InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        UnsupportedParameterError: a parameter has an unsupported dtype, layout or device.
    """

    define_op: ClassVar[Callable[[], Any]]
    """Defines the op that updates a group, and returns it."""
    state_names: ClassVar[tuple[str, ...]]
    """The keys in ``state`` of the one or two tensors with the parameter's shape."""
    op_arguments: ClassVar[Mapping[str, str]]
    """The op's arguments, each with the name of its setting in a group, apart from the betas."""
    counts_steps: ClassVar[bool] = True
    """Whether an update depends on the number of earlier ones."""
    builders: ClassVar[Mapping[str, type[OpBuilder]]] = {}
    """The builder of the library to load, by the parameters' device type. This process's accelerator is not
    asked for its ``op_builders``, since a process on a GPU also updates parameters on the host."""
    elsewhere: ClassVar[str | None] = None
    """For an optimizer of host parameters only: the optimizer to use for parameters on other devices.
    ``None``: one group may have parameters on several devices; each device gets its own call."""
    needs_whole_parameters: ClassVar[bool] = False
    """Whether an update needs the norm of each whole parameter, so a rank cannot update its part alone."""
    options: ClassVar[tuple[str, ...]] = ()
    """The attributes that hold a subclass's own options, which copies of an optimizer keep."""
    initial_setting: ClassVar[str | None] = None
    """The setting that gives the first value of a state's elements; ``None``: it is 0."""

    def __init__(
        self,
        params: Parameters,
        defaults: dict[str, Any],
        *,
        state_dtype: torch.dtype | None,
        master_weights: bool = False,
    ) -> None:
        self.defaults = defaults
        self.check_group(defaults)
        if state_dtype is not None and state_dtype not in SUPPORTED_DTYPES:
            raise InvalidOptimizerArgumentError(
                f"Optimizer state can be float32, bfloat16 or float16. Value {state_dtype} is not supported."
            )
        self.state_dtype = state_dtype
        self.master_weights = master_weights
        self._prepare_op()
        super().__init__(params, defaults)

    def _prepare_op(self) -> None:
        self._op = type(self).define_op()
        self._isa = chosen_isa()
        self._loaded: set[str] = set()  # device types; each look for a library takes milliseconds
        self._has_shards = False  # set when parameters are accepted: checking each in every step is slow
        self._accepted: dict[int, list[Place]] = {}  # where parameters were, by their group's index
        self._accepted_outputs: list[Place] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with its own settings, and loads the op for their devices.

        Raises:
            InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
            UnsupportedParameterError: a parameter has an unsupported dtype, layout or device.
        """
        self.check_group(param_group)
        super().add_param_group(param_group)
        try:
            self._accept(len(self.param_groups) - 1)
        except UnsupportedParameterError:
            del self.param_groups[-1]
            raise

    def _accept(self, group_index: int) -> None:
        """Checks the parameters of a group, where they are now, and loads the op for their devices."""
        parameters = self.param_groups[group_index]["params"]
        for parameter in parameters:
            self.check_parameter(parameter)
            state = self.state.get(parameter, {})
            for name in {*self.state_names, MASTER} & state.keys():
                check_state(name, state[name], parameter)
        check_memory(self._parameters())
        for device in {parameter.device.type for parameter in parameters} - self._loaded:
            if device in self.builders:
                self.builders[device]().load()
            self._loaded.add(device)
        self._has_shards |= any(map(shards.is_sharded, parameters))
        self._accepted[group_index] = _places(parameters)

    def _accept_moved(self, group: Mapping[str, Any]) -> None:
        """Checks a group again if its parameters were replaced by others, perhaps of another kind."""
        index = next(index for index, own in enumerate(self.param_groups) if own is group)
        if self._accepted.get(index) != _places(group["params"]):
            self._accept(index)

    def check_group(self, settings: Mapping[str, Any]) -> None:
        """Checks the settings of a new or loaded group.

        Raises:
            InvalidOptimizerArgumentError: a setting is out of range or of the wrong kind.
        """
        if settings.get("amsgrad"):
            raise InvalidOptimizerArgumentError(
                f"{type(self).__name__} has no AMSGrad variant. Use torch.optim.AdamW(amsgrad=True)."
            )
        check_settings({name: settings[name] for name in self.defaults if name in settings})

    def check_parameter(self, parameter: Tensor) -> None:
        """Checks a parameter.

        Raises:
            UnsupportedParameterError: the parameter has an unsupported dtype, layout or device.
        """
        if self.needs_whole_parameters and shards.is_sharded(parameter):
            raise UnsupportedParameterError(
                f"{type(self).__name__} needs the norm of each whole parameter, but one is sharded over "
                "ranks. Use FusedAdam, or keep whole parameters on each rank (DDP)."
            )
        if parameter.dtype not in SUPPORTED_DTYPES:
            raise UnsupportedParameterError(
                f"{type(self).__name__} updates float32, bfloat16 and float16 parameters, but one is "
                f"{parameter.dtype}. Convert it, or give it to an optimizer of torch.optim."
            )
        if parameter.is_neg():
            raise UnsupportedParameterError(
                "A parameter is the imaginary part of a conjugate, which torch negates later. Use a clone()."
            )
        device = parameter.device.type
        if self.elsewhere is not None and device != "cpu":
            raise UnsupportedParameterError(
                f"{type(self).__name__} updates parameters on the host, but one is on {parameter.device}. "
                f"Use {self.elsewhere} for it."
            )

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    # -- a step ----------------------------------------------------------------------------------

    def op_settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a group's settings under the names of the op's arguments."""
        settings = {argument: number(group[name]) for argument, name in self.op_arguments.items()}
        if "betas" in group:
            settings["beta1"], settings["beta2"] = map(number, group["betas"])
        return settings

    def update(self, group: Mapping[str, Any], tensors: GroupTensors, grad_scale: float) -> None:
        """Updates the tensors of one group.

        Args:
            group: the group's settings.
            tensors: its tensors.
            grad_scale: a factor for the gradients.
        """
        for part in tensors.by_device() if self.elsewhere is None else (tensors,):
            self._op(
                *part.lists(),
                **self.op_settings(group),
                maximize=group["maximize"],
                grad_scale=grad_scale,
                isa=self._isa,
            )

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
            grads: gradients to use instead of ``parameter.grad``, one for each parameter in the order of
                the groups; ``None``: the parameter has none. Their dtype may differ from the parameter's:
                bfloat16 gradients from an accelerator update float32 parameters here without a conversion.
            outputs: tensors that also receive the new parameters, in the same pass over memory; one for each
                parameter, of the parameter's shape and any supported dtype.
            grad_scale: a factor for the gradients: 1 / loss scale.

        Returns:
            The closure's result.

        Raises:
            InvalidOptimizerArgumentError: ``grads`` or ``outputs`` do not match the parameters in number or
                shape, or ``outputs`` is given although the optimizer has master weights. Nothing is changed.
            UnsupportedParameterError: a gradient or output is sparse, on another device, or of an
                unsupported dtype; an output shares memory with a parameter or another output; or the tensor
                that replaced a parameter's ``data`` cannot be updated. Nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if grads is not None:
            check_like("grads", grads, self._parameters())
        if outputs is not None:
            self._check_outputs(outputs)
        groups: list[tuple[dict[str, Any], GroupTensors]] = []
        first = 0
        for group in self.param_groups:
            last = first + len(group["params"])
            lists: list[list[Tensor]] = [[] for _ in range(4 + len(self.state_names))]
            self._init_group(
                group,
                *lists,
                grads=grads[first:last] if grads is not None else None,
                outputs=outputs[first:last] if outputs is not None else None,
            )
            groups.append((group, _tensors(lists)))
            first = last
        for group, tensors in groups:
            if tensors.params:
                try:
                    self.update(group, tensors.on_this_rank() if self._has_shards else tensors, grad_scale)
                except RuntimeError:  # checking each gradient's dtype in every step would be slow
                    for parameter, grad in zip(tensors.params, tensors.grads, strict=True):
                        check_tensor("A gradient", grad, parameter)
                    raise
                if not torch.compiler.is_compiling():
                    # Native code writes without autograd's knowledge.
                    torch.autograd.graph.increment_version((*tensors.params, *tensors.outputs))
        return loss

    def _check_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Raises the errors of :meth:`step` about ``outputs``."""
        check_like("outputs", outputs, self._parameters())
        if self.master_weights:
            raise InvalidOptimizerArgumentError(
                "With master_weights=True the parameters are the outputs. Do not pass outputs to step()."
            )
        places = _places(self._parameters()) + _places(outputs)
        if places != self._accepted_outputs:
            check_memory([*self._parameters(), *outputs], "parameters or outputs")
            self._accepted_outputs = places

    # torch.compile runs a method of this name uncompiled, and then uses the lists among its arguments.
    def _init_group(
        self,
        group: dict[str, Any],
        *lists: list[Tensor],
        grads: Sequence[Tensor | None] | None = None,
        outputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Fills :meth:`GroupTensors.lists` for a step over a group, creating missing state."""
        self._accept_moved(group)
        tensors = _tensors(lists)
        # Looked up once: there may be thousands of small tensors.
        all_states, has_masters, has_shards = self.state, self.master_weights, self._has_shards
        named = list(zip(self.state_names, tensors.states, strict=True))
        for index, parameter in enumerate(group["params"]):
            grad = parameter.grad if grads is None else grads[index]
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                check_tensor("A gradient", grad, parameter)
            state = all_states[parameter]
            if "step" not in state:
                self._make_state(group, parameter, state)
            if not has_masters:
                tensors.params.append(parameter)
            elif parameter.dtype == torch.float32:
                tensors.params.append(parameter)
                tensors.outputs.append(parameter)
            else:
                if MASTER not in state:
                    state[MASTER] = _empty_like(parameter, torch.float32).copy_(parameter)
                tensors.params.append(state[MASTER])
                tensors.outputs.append(parameter)
            tensors.grads.append(shards.spread_like(grad, parameter) if has_shards else grad)
            for name, states in named:
                states.append(state[name])
            tensors.steps.append(state["step"])
            if outputs is not None:
                tensors.outputs.append(outputs[index])

    def _make_state(self, group: Mapping[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        initial = 0.0 if self.initial_setting is None else float(group[self.initial_setting])
        for name in self.state_names:
            memory = _empty_like(parameter, self.state_dtype or parameter.dtype)
            state[name] = memory.fill_(initial)

    # -- saving and loading ----------------------------------------------------------------------

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict()`` of this optimizer or of torch's optimizer for the same algorithm.

        Casts the state to this optimizer's state dtype; torch's would cast it to the parameter's.

        Raises:
            InvalidOptimizerArgumentError: a setting is out of range, or a state is incomplete, of another
                shape, or of another algorithm. Nothing is changed.
            ValueError: the groups differ from this optimizer's in number or length.
        """
        groups = state_dict["param_groups"]
        loaded = []
        # If the groups differ, torch refuses the state below and says how.
        if [len(group["params"]) for group in groups] == [
            len(group["params"]) for group in self.param_groups
        ]:
            for group in groups:
                self.check_group(group)
            optional = (MASTER,) if self.master_weights else ()
            saved_ids = chain.from_iterable(group["params"] for group in groups)
            for index, (saved_id, parameter) in enumerate(zip(saved_ids, self._parameters(), strict=True)):
                if saved := state_dict["state"].get(saved_id):
                    place = f"parameter {index}"
                    check_saved_state(saved, parameter, self.state_names, optional, place)
                    loaded.append((parameter, saved, saved_step(saved, place, self.counts_steps)))
        super().load_state_dict(state_dict)
        for parameter, saved, step in loaded:
            state = self.state[parameter]
            state["step"] = torch.tensor(step, dtype=torch.float32)
            for name, dtype in self._state_dtypes(parameter):
                if name in saved:
                    state[name] = _empty_like(parameter, dtype).copy_(saved[name])

    def _state_dtypes(self, parameter: Tensor) -> Iterator[tuple[str, torch.dtype]]:
        for name in self.state_names:
            yield name, self.state_dtype or parameter.dtype
        if self.master_weights and parameter.dtype != torch.float32:
            yield MASTER, torch.float32

    # torch's optimizers keep everything in the groups and the state. Its base calls __setstate__ to load the
    # groups and the state, too.

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy gets, also through pickle: all but the op, which each process defines."""
        own = {name: getattr(self, name) for name in ("state_dtype", "master_weights", *self.options)}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)  # missing in the state of torch's optimizer
        if "_op" not in vars(self):
            self._prepare_op()
            for index in range(len(self.param_groups)):
                self._accept(index)


class FusedOptimizer(GroupOptimizer):
    """Adds ``set_grad_none``, with which DeepSpeed chooses what :meth:`zero_grad` does.

    Comes before the optimizer among the bases of a class.
    """

    options: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    set_grad_none: bool
    """The default of :meth:`zero_grad`'s argument."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Removes the gradients, or sets them to zero."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates an uninitialised tensor of the same shape and layout, on huge pages if it is large."""
    result = torch.empty_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
    huge_pages.request(shards.local(result))
    return result


def rows(lists: Sequence[list[Tensor]], indices: Sequence[int]) -> list[list[Tensor]]:
    """Returns the tensors at these indices of each list that is not empty."""
    return [[tensors[index] for index in indices] if tensors else [] for tensors in lists]


def update_group(
    rule: Callable[..., Sequence[Tensor]],
    lists: Sequence[list[Tensor]],
    state_names: Sequence[str],
    *,
    maximize: bool = False,
    grad_scale: float = 1.0,
    isa: int = 0,
    **settings: Any,
) -> None:
    """Updates each parameter and its state in place.

    Args:
        rule: takes the number of this update, from 1; the parameter, its gradient and its states in float32;
            and the settings. Returns the new parameter and states.
        lists: the tensors, in the order of :meth:`GroupTensors.lists`.
        state_names: the names of the states in messages.
        isa: not used: torch chooses the instructions.
    """
    params, grads, *states, steps, outputs = lists
    named_states = dict(zip(state_names, states, strict=True))
    check_sizes(params, gradient=grads, **named_states, output=outputs)
    scale = -grad_scale if maximize else grad_scale
    for index, step in enumerate(steps):
        step.add_(1)
        changed = [params[index], *(state[index] for state in states)]
        param, *own_states = (tensor.float() for tensor in changed)
        new = rule(step.item(), param, grads[index].float() * scale, *own_states, **settings)
        for tensor, value in zip(changed, new, strict=True):
            tensor.copy_(value)
        if outputs:
            outputs[index].copy_(new[0])


def square_root(x: Tensor) -> Tensor:
    """Returns the float32 square root, correctly rounded on the host.

    On the host torch's own comes from a vector library and can be off by one unit in the last place. The
    float64 root has more than twice the digits, so rounding it to float32 gives the correct result.
    """
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()
