"""Linear and embedding modules that compute with a packed weight, which is quantised or the model's own.

A module stays the same object with its hooks, at its place in the model; only its class changes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from acclimate.errors import QuantizationError
from acclimate.llm.split.tracing.linear_modules import linear_is_replaced

if TYPE_CHECKING:
    from acclimate.llm.kernels import PackedStack, PackedWeight


class QuantisedTensor(torch.Tensor):
    """A module's ``weight`` that is stored quantised, or a view of it: unpacks when used, and is read-only.

    A write could only change the unpacked values, not the module, so it raises :class:`QuantizationError`.
    """

    # With slots of its own, torch.utils.swap_tensors refuses it: it would only swap a description.
    __slots__ = ("_shown", "packed")

    packed: PackedWeight | PackedStack
    _shown: torch.Tensor | None
    """The values of a view, which were unpacked to make it."""

    @staticmethod
    def __new__(
        cls,
        packed: PackedWeight | PackedStack,
        dtype: torch.dtype,
        device: torch.device,
        values: torch.Tensor | None = None,
    ) -> QuantisedTensor:
        """Describes a packed weight, which takes no memory, or a view with these values."""
        made: QuantisedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            tuple(packed.shape if values is None else values.shape),
            strides=None if values is None else values.stride(),
            dtype=dtype,
            device=device,
            requires_grad=False,
        )
        made.packed, made._shown = packed, values
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"QuantisedTensor({self.packed.format}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> QuantisedTensor:
        """The same tensor, as read-only."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise _read_only(self.packed)

    @property
    def requires_grad(self) -> bool:
        """``False``: such a weight cannot be trained."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            raise _read_only(self.packed)

    def requires_grad_(self, requires_grad: bool = True) -> QuantisedTensor:
        """Returns the tensor; it cannot require a gradient."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> None:
        """``None``: such a weight cannot be trained."""
        return

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise _read_only(self.packed)

    # It has no memory: these three would read and write at address 0.

    def apply_(self, change: Any) -> torch.Tensor:
        """Raises :class:`QuantizationError`."""
        raise _read_only(self.packed)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raises :class:`QuantizationError`, also for ``share_memory_``."""
        raise _read_only(self.packed)

    def __dlpack__(self, **options: Any) -> Any:
        """Raises :class:`QuantizationError`."""
        raise _read_only(self.packed)

    def unpacked(self) -> torch.Tensor:
        """Returns the values as a tensor of their own, or of a view."""
        return self.packed.dequantize(dtype=self.dtype) if self._shown is None else self._shown

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shown: QuantisedTensor | None = None  # whose memory the result shows
        for index, declared in enumerate(func._schema.arguments):
            given = args[index] if index < len(args) else kwargs.get(declared.name)
            own = next((leaf for leaf in tree_leaves(given) if isinstance(leaf, QuantisedTensor)), None)
            if own is None or declared.alias_info is None:
                continue
            if declared.alias_info.is_write:
                raise _read_only(own.packed)
            shown = shown or own
        if shown is not None and func is torch.ops.aten.detach.default:
            return QuantisedTensor(shown.packed, shown.dtype, shown.device, shown._shown)
        result = func(*tree_map(_unpacked, args), **tree_map(_unpacked, kwargs))
        return result if shown is None else tree_map(lambda tensor: _view(shown, tensor), result)


def _unpacked(value: Any) -> Any:
    return value.unpacked() if isinstance(value, QuantisedTensor) else value


def _view(of: QuantisedTensor, value: Any) -> Any:
    return QuantisedTensor(of.packed, value.dtype, value.device, value) if torch.is_tensor(value) else value


def _read_only(packed: PackedWeight | PackedStack) -> QuantizationError:
    return QuantizationError(
        f"a weight that is quantised ({packed.format}) is read-only. To change the model, load it without "
        "quantize, and a GGUF file with dtype set; to change a copy of the weight, use weight.clone()"
    )


class _Quantised(nn.Module):
    """The base of modules whose weights are quantised.

    The weights are not parameters: they cannot be trained, cast or replaced. ``state_dict`` unpacks them.
    """

    compute: torch.Tensor
    """An empty tensor, whose dtype and device ``module.to(…)`` changes as it does a parameter's."""

    def _quantised(self) -> dict[str, PackedWeight | PackedStack]:
        """Returns the weights by the name of the parameter that each replaces."""
        raise NotImplementedError

    def _hold(self, name: str, packed: PackedWeight | PackedStack) -> None:
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, packed in self._quantised().items():
            if packed.device != self.compute.device:
                self._hold(name, packed.to(self.compute.device))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, packed in self._quantised().items():
            destination[f"{prefix}{name}"] = packed.dequantize(dtype=self.compute.dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {f"{prefix}{name}": packed.format for name, packed in self._quantised().items()}
        others = {name: value for name, value in state_dict.items() if name not in own}
        error_msgs += [
            f"{name} is quantised ({own[name]}) and cannot be replaced; load the model without quantize"
            for name in own.keys() & state_dict.keys()
        ]
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class PackedModule(_Quantised):
    """The base of modules with one quantised weight."""

    packed: PackedWeight

    @property
    def weight(self) -> QuantisedTensor:
        """The weight as a tensor that unpacks itself when an operator uses it."""
        return QuantisedTensor(self.packed, self.compute.dtype, self.compute.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            if not isinstance(value, QuantisedTensor) or value.shape != self.packed.shape:
                raise _read_only(self.packed)
            self.packed = value.packed  # type: ignore[assignment]  # ties it to another module's
        else:
            super().__setattr__(name, value)

    def _quantised(self) -> dict[str, PackedWeight | PackedStack]:
        return {"weight": self.packed}

    def _hold(self, name: str, packed: Any) -> None:
        self.packed = packed

    def extra_repr(self) -> str:
        """Returns the module's sizes and how its weight is stored."""
        return f"{super().extra_repr()}, weight={self.packed.format}"


class PackedLinear(PackedModule, nn.Linear):  # type: ignore[misc]  # a property in place of a parameter
    """A linear module with a quantised weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product, in the input's dtype."""
        return self.packed.linear(input, self.bias)


class PackedEmbedding(PackedModule, nn.Embedding):  # type: ignore[misc]
    """An embedding with a quantised weight; unpacks only the rows that it returns."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the tokens' rows."""
        return self.packed.rows(input, self.compute.dtype)


class PackedExperts(_Quantised):
    """The base of experts with quantised weights; a class of a model's own comes after it."""

    packed_stacks: dict[str, PackedStack]
    """The weights by the name of the parameter that each replaces."""
    stand_ins: dict[str, torch.Tensor]
    """Tensors without content, of the shapes of those parameters."""
    has_gate: bool
    has_bias: bool
    act_fn: nn.Module

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sums of the chosen experts' results, as transformers' experts do."""
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        first = "gate_up_proj" if self.has_gate else "up_proj"
        activate: Any = self._apply_gate if self.has_gate else self.act_fn
        for expert in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == expert)
            inner = activate(self._multiplied(first, expert, hidden_states[tokens]))
            found = self._multiplied("down_proj", expert, inner) * top_k_weights[tokens, places, None]
            total.index_add_(0, tokens, found.float())
        return total.to(hidden_states.dtype)

    def _multiplied(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        stack = self.packed_stacks.get(name)
        if stack is not None:
            return stack.expert(expert).linear(x, bias)
        weight = getattr(self, name)[expert]
        is_turned: Any = self.is_transposed
        return nn.functional.linear(x, weight.t() if is_turned else weight, bias)

    def __getattr__(self, name: str) -> Any:
        stacks = vars(self).get("packed_stacks", {})
        if name in stacks:
            return QuantisedTensor(stacks[name], self.compute.dtype, self.compute.device)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("packed_stacks", {}):
            raise _read_only(self.packed_stacks[name])
        super().__setattr__(name, value)

    def _quantised(self) -> dict[str, PackedWeight | PackedStack]:
        return dict(self.packed_stacks)

    def _hold(self, name: str, packed: Any) -> None:
        self.packed_stacks[name] = packed


def _is_watched() -> bool:
    """Whether someone wants to see or replace torch's linear function, which the kernels do not call."""
    return (
        linear_is_replaced()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


class FewRowLinear(nn.Linear):
    """A linear module that multiplies inputs of few rows at full memory bandwidth.

    The weight stays its parameter. If a gradient is needed, or the kernels lack the dtype or the device, the
    module works like :class:`nn.Linear`.
    """

    _view: PackedWeight | None = None
    _view_of: tuple[Any, ...] | None = None

    @property
    def packed(self) -> PackedWeight:
        """The weight in the kernels' form; it shares the parameter's memory."""
        from acclimate.llm.kernels import PackedWeight

        weight = self.weight
        now = weight.data_ptr(), weight.dtype, weight.shape, weight.stride()
        if self._view is None or self._view_of != now:
            self._view, self._view_of = PackedWeight.dense(weight.detach()), now
        return self._view

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product."""
        wants_gradient = torch.is_grad_enabled() and (self.weight.requires_grad or input.requires_grad)
        # torch.compile has its own matrix products, and cannot trace addresses; autocast chooses the dtype.
        is_cast = torch.is_autocast_enabled(input.device.type)
        if wants_gradient or is_cast or torch.compiler.is_compiling() or _is_watched():
            return super().forward(input)
        if not self._has_kernel(input):
            return super().forward(input)
        return self.packed.linear(input, self.bias)

    def _has_kernel(self, input: torch.Tensor) -> bool:
        """Whether there is a kernel for the weight, which ``module.to(…)`` may have changed, and an input."""
        from acclimate.llm.kernels.builder import WITH_KERNELS
        from acclimate.llm.kernels.formats import DENSE_DTYPES

        is_known = self.weight.dtype in DENSE_DTYPES and input.dtype in DENSE_DTYPES
        if type(self.weight) is not nn.Parameter:  # a class of its own may multiply otherwise
            return False
        # The kernels would need a copy of any other weight, which would miss later changes.
        return is_known and self.weight.is_contiguous() and self.weight.device.type in WITH_KERNELS

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the packed view, which would be saved as a second copy of the weight."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_view", "_view_of")}


def can_be_packed(module: nn.Module, leaf: str) -> bool:
    """Whether a module uses its weight only as a linear module or an embedding would."""
    if leaf != "weight":
        return False
    if isinstance(module, nn.Embedding):
        # Options that change the table during a lookup cannot work with a packed weight.
        return module.max_norm is None and not module.sparse
    return type(module) is nn.Linear


def can_be_stacked(module: nn.Module, leaf: str) -> bool:
    """Whether a module uses a weight of experts only as transformers' ways to compute experts do."""
    own = type(module)
    own = own.__bases__[1] if issubclass(own, PackedExperts) else own
    # The decorator of transformers keeps the class's own forward, which computes the same in another way.
    is_known = own.__module__.startswith("transformers.") and hasattr(own.forward, "__wrapped__")
    if not is_known or not hasattr(own, "_apply_gate") or getattr(module, "has_post_expert_norm", True):
        return False
    return leaf == "down_proj" or leaf == ("gate_up_proj" if module.has_gate else "up_proj")


def hold_stack(
    module: nn.Module, leaf: str, packed: PackedStack, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Replaces a parameter of experts, for which :func:`can_be_stacked` is true, by packed weights."""
    del module._parameters[leaf]
    if not isinstance(module, PackedExperts):
        module.__class__ = _packed_experts(type(module))  # type: ignore[arg-type]
        vars(module)["packed_stacks"], vars(module)["stand_ins"] = {}, {}
        module.register_buffer("compute", torch.empty(0, dtype=dtype, device=device), persistent=False)
    vars(module)["packed_stacks"][leaf] = packed
    vars(module)["stand_ins"][leaf] = torch.empty(packed.shape, dtype=dtype, device="meta")


@lru_cache
def _packed_experts(own: type[nn.Module]) -> type[nn.Module]:
    """Returns a model's own class of experts over quantised weights."""
    return type(own.__name__, (PackedExperts, own), {"__module__": own.__module__})


def hold(module: nn.Module, packed: PackedWeight, dtype: torch.dtype, device: torch.device | str) -> None:
    """Replaces the ``weight`` of a module, for which :func:`can_be_packed` is true, by a packed weight.

    ``dtype`` is that of the module's result if its input does not determine it.
    """
    del module._parameters["weight"]
    own = type(module)
    module.__class__ = PackedLinear if own is nn.Linear else _packed_embedding(own)  # type: ignore[arg-type]
    vars(module)["packed"] = packed
    module.register_buffer("compute", torch.empty(0, dtype=dtype, device=device), persistent=False)


@lru_cache
def _packed_embedding(own: type[nn.Module]) -> type[nn.Module]:
    """Returns a model's own embedding class over a quantised table."""
    if own is nn.Embedding:
        return PackedEmbedding
    # The model's own class comes first, because it may scale the looked-up rows, as Gemma's does.
    return type(own.__name__, (own, PackedEmbedding), {"__module__": own.__module__})


def use_few_row_kernels(model: nn.Module) -> None:
    """Makes a loaded model's linear modules use the few-row kernels with their own weights."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dim() == 2:
            module.__class__ = FewRowLinear
