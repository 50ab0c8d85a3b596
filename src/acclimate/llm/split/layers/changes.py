"""Changes the modules of a model so that it works with a rank's shards.

Modules keep their class and their forward. Hooks run the collectives around the forward, so a later step can
still change a linear module (another kernel, quantization, compilation). These hooks run closest to the
forward, so that the user's hooks see the same tensors as in the whole model. They use the module that they
are called with, because a deep copy of a model has the same hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acclimate.llm.split.collectives import Ranks, copy_to_ranks, gather_columns, sum_over_ranks
from acclimate.llm.split.layers.randomness import RankRandomness
from acclimate.llm.split.plan import Change, Ranges, Split, shard


def change_module(module: nn.Module, change: Change, ranks: Ranks, randomness: RankRandomness) -> None:
    """Changes one module, whose parameters already are shards."""
    config = getattr(module, "config", None)
    for attribute, values in change.attributes.items():
        set_attribute(module, attribute, values[ranks.rank])
    if own := frozenset(path.removeprefix("config.") for path in change.attributes if "." in path):
        follow_config(module, config, own)
    if change.arguments:
        _select_arguments(module, change.arguments, ranks.rank)
    if change.role == "columns":
        _resize(module, change)
        _columns(module, change, ranks, randomness)
    elif change.role == "rows":
        _resize(module, change)
        _rows(module, change, ranks)
        module.register_forward_pre_hook(lambda *_: randomness.leave(change.region))
    elif change.role == "vocabulary":
        _vocabulary(module, change, ranks)
    elif change.role == "head":
        _resize(module, change)
        _head(module, change, ranks)
    elif change.role == "norm":
        _norm(module, change, ranks)
    elif change.role == "experts":
        _experts(module, ranks)
    if change.copies_output:
        module.register_forward_hook(lambda _, args, output: copy_to_ranks(output, ranks))


def _resize(module: nn.Module, change: Change) -> None:
    """Corrects attributes of linear modules that hold a number of columns, such as ``out_features``."""
    shape = module.weight.shape
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape[0], shape[1]  # type: ignore[index, assignment]
    elif change.role != "rows":
        for name, value in vars(module).items():
            if type(value) is int and value == change.width:
                setattr(module, name, shape[-1])  # type: ignore[index]


def _own(parts: Ranges) -> Tensor:
    return torch.tensor([place for start, stop in parts for place in range(start, stop)], dtype=torch.long)


def _length(parts: tuple[Ranges, ...]) -> int:
    return max(stop for part in parts for _, stop in part)


def _select_arguments(
    module: nn.Module, arguments: Mapping[str | int, tuple[int, tuple[Ranges, ...]]], rank: int
) -> None:
    own = {key: (dim, _own(parts[rank]), _length(parts)) for key, (dim, parts) in arguments.items()}

    def select(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = list(args), dict(kwargs)
        for key, (dim, indices, whole) in own.items():
            owner: Any = positional if isinstance(key, int) else named
            value = owner[key] if isinstance(key, str) or key < len(positional) else None
            # An earlier block may have made the argument for the rank's own heads already.
            if isinstance(value, Tensor) and value.shape[dim] == whole:
                owner[key] = value.index_select(dim, indices.to(value.device))
        return tuple(positional), named

    module.register_forward_pre_hook(select, with_kwargs=True)


def _on_input(module: nn.Module, changed: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Changes the first tensor that a module is called with, by position or by name."""

    def change(
        own: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (changed(own, args[0]), *args[1:]), kwargs
        name = next(name for name, argument in kwargs.items() if isinstance(argument, Tensor))
        return args, {**kwargs, name: changed(own, kwargs[name])}

    module.register_forward_pre_hook(change, with_kwargs=True)


def _columns(module: nn.Module, change: Change, ranks: Ranks, randomness: RankRandomness) -> None:
    module.register_forward_pre_hook(lambda own, _: randomness.enter(own, change.region))
    if change.copies_input:
        _on_input(module, lambda _, inputs: copy_to_ranks(inputs, ranks))
    if change.expands and change.expands[ranks.rank]:
        _expand(module, change, ranks)


def _expand(module: nn.Module, change: Change, ranks: Ranks) -> None:
    own = _own(change.parts[ranks.rank])

    def expand(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        whole = output.new_zeros(*output.shape[:-1], change.width)
        return whole.index_copy(-1, own.to(output.device), output)

    module.register_forward_hook(expand, prepend=True)


def _rows(module: nn.Module, change: Change, ranks: Ranks) -> None:
    if change.copies_input:
        _on_input(module, lambda _, inputs: copy_to_ranks(inputs, ranks))
    if change.expands and change.expands[ranks.rank]:
        own = _own(change.parts[ranks.rank])
        _on_input(module, lambda _, inputs: inputs.index_select(-1, own.to(inputs.device)))
    if not change.parts[ranks.rank]:
        width = max(module.weight.shape)  # type: ignore[arg-type]
        # Some linear modules fail without columns; the sum of an empty tensor keeps the graph for backward.
        module.forward = lambda input: input.sum(-1, keepdim=True).expand(*input.shape[:-1], width)
    module.register_forward_hook(lambda _, args, output: sum_over_ranks(output, ranks), prepend=True)


def _vocabulary(module: nn.Module, change: Change, ranks: Ranks) -> None:
    parts = change.parts[ranks.rank]
    start, stop = parts[0] if parts else (0, 0)
    if isinstance(module, nn.Embedding):
        module.num_embeddings = stop - start
        if module.padding_idx is not None:
            inside = start <= module.padding_idx < stop
            module.padding_idx = module.padding_idx - start if inside else None

    def localise(module: nn.Module, whole: Tensor) -> Tensor:
        tokens = whole - start
        outside = (tokens < 0) | (tokens >= stop - start)
        # A token beyond the whole vocabulary stays unchanged, so that every rank's embedding raises.
        outside &= (whole >= 0) & (whole < change.width)
        module._acclimate_outside = outside
        return tokens.masked_fill(outside, 0)

    def combine(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        outside: Any = module._acclimate_outside
        return sum_over_ranks(output.masked_fill(outside[..., None], 0.0), ranks)

    if start == stop:
        # A rank without rows knows no token; it looks up a row of zeros, whose result is not used.
        module.forward = MethodType(_look_up_zeros, module)
    _on_input(module, localise)
    module.register_forward_hook(combine, prepend=True)


def _look_up_zeros(module: nn.Module, input: Tensor) -> Tensor:
    weight: Any = module.weight
    return nn.functional.embedding(input, weight.new_zeros(1, weight.shape[-1], device=input.device))


def _head(module: nn.Module, change: Change, ranks: Ranks) -> None:
    lengths = [sum(stop - start for start, stop in parts) for parts in change.parts]
    _on_input(module, lambda _, inputs: copy_to_ranks(inputs, ranks))
    module.register_forward_hook(lambda _, args, output: gather_columns(output, ranks, lengths), prepend=True)


def _norm(module: nn.Module, change: Change, ranks: Ranks) -> None:
    """Normalizes a rank's columns by the statistics of all columns; copied columns count once."""
    taken = {place for parts in change.parts[: ranks.rank] for place in _own(parts).tolist()}
    own_columns = _own(change.parts[ranks.rank]).tolist()
    counted = torch.zeros(change.width if change.sees_all else len(own_columns))
    for place, column in enumerate(own_columns):
        if column not in taken:
            counted[column if change.sees_all else place] = 1.0
            taken.add(column)
    formula = change.norm or "rms"

    def forward(module: nn.Module, inputs: Tensor) -> Tensor:
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        own = wide * counted.to(wide)
        sums = torch.stack([own.sum(-1), (own * wide).sum(-1)], dim=-1) / change.width
        # Each rank uses the statistics, so each computes a part of their gradient.
        sums = copy_to_ranks(sum_over_ranks(sums, ranks), ranks)
        return normalize(module, formula, inputs, sums[..., :1], sums[..., 1:])

    module.forward = MethodType(forward, module)
    if change.expands and change.expands[ranks.rank]:
        _expand(module, change, ranks)


def is_forward_of_split(forward: Callable[..., Any]) -> bool:
    """Whether a module's own ``forward`` is one that a split has put in place of its class's."""
    return getattr(forward, "__module__", None) == __name__


def _experts(module: nn.Module, ranks: Ranks) -> None:
    def copied(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda argument: copy_to_ranks(argument, ranks) if isinstance(argument, Tensor) else argument,
            (args, kwargs),
        )
        return found

    module.register_forward_pre_hook(copied, with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: sum_over_ranks(output, ranks), prepend=True)


def place_shard(
    module: nn.Module, name: str, split: Split, rank: int, whole: Tensor, made: dict[int, Any]
) -> None:
    """Replaces a module's whole parameter by a rank's shard; tied parameters share it."""
    if split.kind == "replicated":
        return
    if id(whole) in made:
        module._parameters[name] = made[id(whole)]
        return
    shape = split.shard_shape(rank)
    if rank and split.parts[0] == ((0, split.shape[split.dim]),) and not any(split.parts[1:]):
        # Another rank adds this bias.
        del module._parameters[name]
        if type(module).forward is nn.Linear.forward:
            module.register_parameter(name, None)
        else:
            zeros = torch.zeros(
                split.shape, dtype=whole.dtype, device="cpu" if whole.is_meta else whole.device
            )
            module.register_buffer(name, zeros, persistent=False)
        return
    with torch.no_grad():
        part = (
            torch.empty(shape, dtype=whole.dtype, device="meta")
            if whole.is_meta
            else shard(whole, split, rank).clone()
        )
    made[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
    module._parameters[name] = made[id(whole)]


def set_attribute(module: nn.Module, attribute: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of a module, or of a copy of its configuration; returns a function that undoes it."""
    owner, _, last = attribute.rpartition(".")
    if not owner:
        before = getattr(module, attribute)
        setattr(module, attribute, value)
        return lambda: setattr(module, attribute, before)
    whole = getattr(module, owner)
    own = copy.copy(whole)
    setattr(own, last, value)
    setattr(module, owner, own)
    return lambda: setattr(module, owner, whole)


def follow_config(module: nn.Module, whole: Any, own_values: frozenset[str]) -> None:
    """Keeps a module's copy of the model's configuration equal to it, besides the rank's own values.

    Later settings, such as another attention function, are made in the model's configuration.
    """
    # An attribute, so that a deep copy of the model follows the configuration of the copy.
    module._acclimate_whole_config = whole

    def follow(module: Any, _: object) -> None:
        settings = vars(module._acclimate_whole_config).items()
        vars(module.config).update({name: value for name, value in settings if name not in own_values})

    module.register_forward_pre_hook(follow)


Formula = Literal["rms", "rms+1", "layer"]
_FORMULAS: tuple[Formula, ...] = ("rms", "rms+1", "layer")


def _epsilon_of(module: nn.Module) -> float:
    """Returns the small number that a normalization adds to the mean square."""
    for name in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return 0.0


def formula_of(module: nn.Module) -> Formula | None:
    """Returns the formula that gives a normalization's results on random numbers, or ``None``."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or any(True for _ in module.children()):
        return None
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, len(weight), generator=random, dtype=torch.float64).to(weight.dtype)
    with torch.no_grad():
        found = module.forward(inputs)  # without hooks, because one of them records calls
        for formula in _FORMULAS:
            mean, square = inputs.mean(-1, keepdim=True), inputs.square().mean(-1, keepdim=True)
            expected = normalize(module, formula, inputs, mean, square)
            if isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                return formula
    return None


def normalize(module: nn.Module, formula: Formula, inputs: Tensor, mean: Tensor, square: Tensor) -> Tensor:
    """Normalizes by given statistics, with the module's own weight, bias and epsilon."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    dtype = inputs.dtype
    wide = inputs.to(torch.promote_types(dtype, torch.float32))
    if formula == "layer":
        wide = (wide - mean) * torch.rsqrt(square - mean.square() + _epsilon_of(module))
    else:
        wide = wide * torch.rsqrt(square + _epsilon_of(module))
    if formula == "rms+1":
        wide = wide * (1.0 + weight)  # type: ignore[operator]
    elif weight is not None:
        wide = wide * weight
    return (wide if bias is None else wide + bias).to(dtype)
