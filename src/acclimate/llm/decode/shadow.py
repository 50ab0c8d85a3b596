"""Builds a model's shadow: the same modules, with fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acclimate.llm.decode.description import NotRepresentedError
from acclimate.llm.decode.fake_calls import FakeTensors, fake_tensors
from acclimate.llm.decode.modules import bias_of, packed_weight, with_bias_as_parameter
from acclimate.llm.decode.program import Role, Value
from acclimate.llm.decode.recorder import Recorder, input_value
from acclimate.llm.decode.shadow_operators import ShadowName
from acclimate.llm.decode.staleness import attributes_of, changed_attribute, is_same_config
from acclimate.llm.split.layers.changes import is_forward_of_split
from acclimate.llm.split.tracing.linear_modules import linear_dims


class _Linear(nn.Module):
    def __init__(self, number: int, width: int, weight: Any, bias: Any) -> None:
        super().__init__()
        self.number, self.width = number, width
        self.weight, self.bias = weight, bias

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = torch.ops.acclimate_capture.linear(input, self.number, self.width)
        return found


class _Rows:
    def __init__(self, number: int, shape: tuple[int, int]) -> None:
        self.number, self.shape = number, shape

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.acclimate_capture.rows(tokens, self.number, self.shape[1], dtype)
        return found


class Shadow:
    """Builds a model's shadow.

    Args:
        fakes: makes the fake tensors.
        widths: the number of columns of a split model's linear modules, where it is not that of the weight.
    """

    def __init__(self, fakes: FakeTensors, widths: dict[nn.Module, int]) -> None:
        self.fakes, self.widths = fakes, widths
        self.modules: list[nn.Module] = []
        self.origins: dict[int, Tensor] = {}
        self._made: dict[int, Any] = {}
        self._copies: list[tuple[nn.Module, dict[str, Any]]] = []
        self._configs: list[tuple[Any, Any]] = []

    def tensor(self, original: Tensor) -> Tensor:
        """Returns the fake that stands for a tensor; equal objects get one."""
        if type(original) not in (Tensor, nn.Parameter):
            raise NotRepresentedError(f"a tensor is a {type(original).__name__}, which may compute otherwise")
        if id(original) not in self._made:
            fake: Any = self.fakes.mode.from_tensor(original.detach(), static_shapes=True)
            if isinstance(original, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=False)
            self._made[id(original)] = fake
            self.origins[id(fake)] = original
        found: Tensor = self._made[id(original)]
        return found

    def config(self, original: Any) -> Any:
        """Returns a copy of a configuration, whose attention and experts are the shadow's."""
        if id(original) not in self._made:
            self._made[id(original)] = made = copy.deepcopy(original)
            for config in (made, *(getattr(made, name) for name in made.sub_configs)):
                if config is not None:
                    for name in ("_attn_implementation", "_experts_implementation"):
                        setattr(config, name, ShadowName(getattr(config, name, None)))
            self._configs.append((made, copy.deepcopy(made)))
        return self._made[id(original)]

    def module(self, original: nn.Module) -> nn.Module:
        """Returns the module that stands for one of the model's."""
        if id(original) not in self._made:
            self._made[id(original)] = (
                self._linear(original) if _is_linear(original) else self._copy(original)
            )
        found: nn.Module = self._made[id(original)]
        return found

    def _number(self, original: nn.Module) -> int:
        self.modules.append(original)
        return len(self.modules) - 1

    def _linear(self, original: nn.Module) -> nn.Module:
        packed = packed_weight(original)
        bias = bias_of(original)
        if packed is not None:
            compute: Any = original.compute
            width, weight = packed.shape[0], self._empty(packed.shape, compute.dtype, compute.device)
        else:
            dims = linear_dims(with_bias_as_parameter(original))
            if dims is None:
                raise NotRepresentedError("a linear module's weight is of an unknown layout")
            width, weight = original.weight.shape[dims[0]], self.tensor(original.weight)  # type: ignore
        return _Linear(
            self._number(original),
            self.widths.get(original, int(width)),
            weight,
            None if bias is None else self.tensor(bias),
        )

    def _copy(self, original: nn.Module) -> nn.Module:
        # Packed experts are captured as those of the model's own class, whose weights are tensors.
        stand_ins = vars(original).get("stand_ins", {})
        made: nn.Module = object.__new__(type(original).__bases__[1] if stand_ins else type(original))
        self._made[id(original)] = made
        own = vars(made)
        # What compile() has made would call the original.
        later = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
        own.update((name, self._attribute(v)) for name, v in vars(original).items() if name not in later)
        for kind in ("_parameters", "_buffers"):
            held = vars(original)[kind].items()
            own[kind] = {name: None if tensor is None else self.tensor(tensor) for name, tensor in held}
        for name, stand_in in stand_ins.items():
            own["_parameters"][name] = self._shown(original, stand_in)
        packed = packed_weight(original)
        if packed is not None:  # an embedding
            own["packed"] = _Rows(self._number(original), packed.shape)
        children = original._modules.items()
        own["_modules"] = {name: None if child is None else self.module(child) for name, child in children}
        # The hooks and forwards of a split model, which sum over ranks: one with others is not captured.
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            own[kind] = type(vars(original)[kind])()
        if "forward" in own and is_forward_of_split(own["forward"]):
            del own["forward"]
        self._copies.append((made, attributes_of(made)))
        return made

    def _shown(self, module: nn.Module, stand_in: Tensor) -> Tensor:
        """Returns the fake of a tensor without content, which stands for packed weights."""
        device: Any = module.compute.device
        fake = self._empty(stand_in.shape, stand_in.dtype, device)
        self._made[id(stand_in)] = fake
        self.origins[id(fake)] = stand_in
        return fake

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        """Returns a fake parameter whose origin is not known, so that no program may use its elements."""
        with self.fakes.mode:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def _attribute(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if type(value) is tuple:
            return tuple(map(self._attribute, value))
        if isinstance(value, (list, dict, set)):
            if id(value) not in self._made:
                made: Any = copy.copy(value)
                self._made[id(value)] = made
                if isinstance(value, dict):
                    made.update((name, self._attribute(item)) for name, item in value.items())
                elif isinstance(value, list):
                    made[:] = map(self._attribute, value)
            return self._made[id(value)]
        return self.config(value) if _is_config(value) else value

    def keep_new_attributes(self) -> bool:
        """Returns whether the program has added attributes, which the next call finds; these are kept."""
        added = False
        for index, (module, before) in enumerate(self._copies):
            now = attributes_of(module)
            if now.keys() > before.keys():
                self._copies[index] = module, {n: before.get(n, value) for n, value in now.items()}
                added = True
        return added

    def check_unchanged(self) -> None:
        """Raises if the program changed an attribute: another call may compute something else."""
        if not all(is_same_config(made, before) for made, before in self._configs):
            raise NotRepresentedError("its code changes its configuration")
        for module, before in self._copies:
            name = changed_attribute(before, module)
            if name is not None:
                raise NotRepresentedError(f"{type(module).__name__} changes its attribute {name}")


# -- what is not captured, or captured as one operator ---------------------------------------------------

_OF_A_PRODUCT = {
    "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "expand", "clone", "detach", "alias",
    "squeeze", "unsqueeze", "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "add",
    "device",  # asks for it
}  # fmt: skip


def _is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight and adds a bias, and does nothing else."""
    own = type(module)
    if own.__call__ is not nn.Module.__call__ or own._call_impl is not nn.Module._call_impl:
        return False
    if own.__getattr__ is not nn.Module.__getattr__ or own.__getattribute__ is not object.__getattribute__:
        return False
    if hasattr(module, "packed"):
        # A class that somebody derived may do more.
        return isinstance(module, nn.Linear) and own.__module__.startswith("acclimate.")
    module = with_bias_as_parameter(module)
    dims = linear_dims(module)
    if dims is None or hasattr(own, "weight") or hasattr(own, "bias"):  # a property, in place of a parameter
        return False
    return own.forward is nn.Linear.forward or _only_multiplies(module, dims)


def _only_multiplies(module: nn.Module, dims: tuple[int, int]) -> bool:
    """Whether a module's own forward runs operators of a product only, for inputs of any size and value.

    Its results were compared for one input. A limit beyond that input's values, or a branch, would be missed.
    """
    made = copy.copy(module)
    with fake_tensors() as fakes, torch.no_grad():
        shadow = Shadow(fakes, {})
        weight: Any = module.weight
        shape = (*fakes.sizes, weight.shape[dims[1]])
        with fakes.mode:
            given = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        recorder = Recorder(fakes, shadow.origins)
        parameters: Any = {n: None if p is None else shadow.tensor(p) for n, p in module._parameters.items()}
        made._parameters = parameters
        recorder.name(given, input_value(given, Role.TOKENS))
        before = attributes_of(made)
        try:
            with fakes.mode, recorder:
                made.forward(given)
        except Exception:  # noqa: BLE001 - a forward may raise anything
            return False
        is_free = fakes.hold_for_all_sizes()
    values = list(recorder.values.values())
    operators = {value.op for value in values} - {"input", "constant"}
    adds_numbers = any(value.op == "add" and not isinstance(value.args[1], Value) for value in values)
    own = {id(parameter) for parameter in module._parameters.values()}
    others = any(value.tensor is not None and id(value.tensor) not in own for value in values)
    is_product = operators <= _OF_A_PRODUCT and not adds_numbers and not others
    return is_free and changed_attribute(before, made) is None and is_product


def _is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)
