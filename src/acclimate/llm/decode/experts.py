"""Matches experts, as ``batched_mm_experts_forward`` of transformers computes them, and their router.

Like ``match.py``, it reads operators backwards: from the weighted sum of a token's experts to their products,
and from the weights to the router's logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acclimate.llm.decode.description import (
    ExpertNorms,
    Experts,
    Gating,
    Groups,
    Matrix,
    Mlp,
    Norm,
    NotRepresentedError,
    Operation,
    Part,
    Product,
    Router,
    Stack,
)
from acclimate.llm.decode.elements import MOVES, constant_of
from acclimate.llm.decode.modules import stacks_of
from acclimate.llm.decode.operators import activation_of, flat, orders, times_constant, widened
from acclimate.llm.decode.program import Value
from acclimate.llm.decode.reader import ProgramReader


def find_experts(reader: ProgramReader, value: Value) -> tuple[Experts, Value] | None:
    """Returns the experts that a value is the result of, and their input; ``None``: it is another's result.

    Raises:
        NotRepresentedError: it is the result of experts, in a form that a description cannot express.
    """
    value = flat(value)
    alone = _ExpertsReader(reader).routed(value)
    if alone is not None:
        _check_router(alone)
        return alone.experts, alone.source
    if value.op != "add" or not isinstance(value.args[1], Value):
        return None
    for first, second in orders(value):
        normed = reader.norm(flat(first))
        routed = _ExpertsReader(reader).routed(flat(first if normed is None else normed.given))
        if routed is None:
            continue
        if normed is not None:
            return _with_norms(reader, routed, normed.norm, flat(second))
        _check_router(routed)
        mlp, gate, given = _shared(reader, flat(second))
        if _rows(given) is not _rows(routed.source):
            raise NotRepresentedError("shared experts have another input than the others")
        return replace(routed.experts, shared=mlp, shared_gate=gate), routed.source
    return None


def _check_router(routed: _Routed) -> None:
    if _rows(routed.router_source) is not _rows(routed.source):
        raise NotRepresentedError("a router has another input than its experts")


def _with_norms(reader: ProgramReader, routed: _Routed, result: Norm, beside: Value) -> tuple[Experts, Value]:
    """Returns experts and an MLP beside them whose inputs and results have norms of their own, and the
    MLP's input."""
    shared_result = reader.norm(beside)
    if shared_result is None:
        raise NotRepresentedError("only one of the experts' and the shared MLP's results is normalized")
    mlp, gate, given = _shared(reader, flat(shared_result.given))
    if gate is not None:
        raise NotRepresentedError("a shared MLP has a gate, and its result is normalized")
    scaled = times_constant(_rows(routed.router_source))
    router_source, factor = (routed.router_source, 1.0) if scaled is None else scaled
    router, inner, own = (reader.norm(_rows(v)) for v in (router_source, routed.source, given))
    if router is None or inner is None or own is None:
        raise NotRepresentedError("of the inputs of a router, its experts and a shared MLP one has no norm")
    if any(_rows(normed.given) is not _rows(own.given) for normed in (router, inner)):
        raise NotRepresentedError("a router, its experts and a shared MLP normalize different values")
    norms = ExpertNorms(router.norm, factor, inner.norm, result, shared_result.norm)
    return replace(routed.experts, shared=mlp, norms=norms), given


def _shared(reader: ProgramReader, value: Value) -> tuple[Mlp, Product | None, Value]:
    """Returns the MLP of all tokens, the columns that gate its result, and its input."""
    alone = reader.dense_mlp(value)
    if alone is not None:
        return alone[0], None, alone[1]
    if value.op == "mul" and isinstance(value.args[1], Value):
        for result, factor in orders(value):
            mlp = reader.dense_mlp(flat(result))
            if mlp is None or factor.op != "sigmoid":
                continue
            gate = reader.columns(factor.args[0])
            if gate is not None and gate[0].width == 1 and _rows(gate[1]) is _rows(mlp[1]):
                return mlp[0], gate[0], mlp[1]
    raise NotRepresentedError("what is added to the experts' result is not an MLP's")


def _rows(value: Value) -> Value:
    """Returns what has the same rows, in whatever dtype and with whatever dimensions before the last."""
    while True:
        found = flat(widened(value))
        if found is value:
            return value
        value = found


@dataclass(frozen=True)
class _Routed:
    """Experts without a shared MLP, their input, and their router's."""

    experts: Experts
    source: Value
    router_source: Value


@dataclass(frozen=True)
class _Multiplied:
    """The result of one product of chosen experts: pairs of a token and an expert x outputs."""

    stack: Stack
    chosen: Value
    given: Value
    result: Value


class _ExpertsReader:
    def __init__(self, reader: ProgramReader) -> None:
        self._reader, self._elements = reader, reader.elements
        self._dtype = reader.dtype

    def routed(self, value: Value) -> _Routed | None:
        """Returns the experts whose weighted sum a value is."""
        total = flat(widened(value))
        if total.op != "sum" or total.args[1:] != ((1,),) or total.args[0].op != "view":
            return None
        weighted = total.args[0].args[0]
        used = total.args[0].shape[1]
        if weighted.op != "mul" or not isinstance(weighted.args[1], Value) or not isinstance(used, int):
            return None
        for result, weights in orders(weighted):
            down = self._product(result)
            if down is None:
                continue
            found = self._gated(down.given)
            if found is None:
                raise NotRepresentedError("what experts compute between their products is unknown")
            inner, gating, interleaved = found
            chosen, source = self._unmoved(down.chosen), self._tokens(inner.given, used)
            if self._unmoved(inner.chosen) is not chosen:
                raise NotRepresentedError("the two products of an expert are of different experts")
            router, router_source = self._router(self._unmoved(weights), chosen)
            if router.used != used:
                raise NotRepresentedError("not all chosen experts are summed")
            rounds = weighted.dtype != torch.float32
            made = Experts(router, inner.stack, interleaved, gating, down.stack, rounds, None, None, None)
            return _Routed(made, source, router_source)
        return None

    # -- products --------------------------------------------------------------------------------------

    def _product(self, value: Value) -> _Multiplied | None:
        """Reads the product of each pair's input and its expert's weight, and a bias."""
        result, bias = value, None
        if value.op == "add" and isinstance(value.args[1], Value) and value.args[1].op == "index":
            value, bias = value.args[:2]
        if value.op != "squeeze" or value.args[0].op != "bmm":
            return None
        first, second = value.args[0].args
        for weight, given, is_turned in ((first, second, False), (second, first, True)):
            if weight.op != "index" or given.op != "unsqueeze" or len(weight.args[1]) != 1:
                continue
            axis = 1 if is_turned else 2
            if given.args[1] % 3 != axis or value.args[1] % 3 != axis:
                return None
            chosen = weight.args[1][0]
            if bias is not None and (len(bias.args[1]) != 1 or bias.args[1][0] is not chosen):
                raise NotRepresentedError("an expert's bias is another expert's")
            module, name = self._stack(self._reader.constant(weight.args[0]))
            own = None if bias is None else self._reader.constant(bias.args[0])
            return _Multiplied(Stack(module, name, is_turned, own), chosen, given.args[0], result)
        return None

    def _stack(self, tensor: Tensor) -> tuple[Any, str]:
        for module in self._reader.model.modules():
            for name, held in stacks_of(module):
                if held is tensor:
                    return module, name
        raise NotRepresentedError("the weights of experts are in no module")

    def _unmoved(self, value: Value) -> Value:
        """Returns what a value shows, element after element."""
        source, places = self._elements.moved(value)
        if not torch.equal(places.flatten(), torch.arange(places.numel())):
            raise NotRepresentedError("experts are in another order than their weights")
        return source

    def _tokens(self, value: Value, used: int) -> Value:
        """Returns the tokens that a value repeats for each of their experts."""
        source, places = self._elements.moved(value)
        width = places.shape[-1]
        tokens = torch.arange(len(places))[:, None] // used
        if not torch.equal(places, tokens * width + torch.arange(width)):
            raise NotRepresentedError("experts get something else than their tokens")
        return source

    # -- between the products ----------------------------------------------------------------------------

    def _gated(self, value: Value) -> tuple[_Multiplied, Gating, bool] | None:
        alone = activation_of(value)
        if alone is not None:
            inner = self._inner(alone[1])
            if inner is None or self._columns(alone[1], inner) != list(range(self._width(inner))):
                return None
            return inner, Gating(alone[0], False, 1.0, None, None, 0.0), False
        if value.op != "mul" or not isinstance(value.args[1], Value):
            return None
        for first, second in orders(value):
            active = _active(first)
            if active is None:
                continue
            name, steepness, gate, gate_limit = active
            up, up_limit, adds = _raised(second)
            inner = self._inner(gate)
            if inner is None:
                continue
            places = list(range(self._width(inner)))
            columns = self._columns(gate, inner), self._columns(up, inner)
            gating = Gating(name, True, steepness, gate_limit, up_limit, adds)
            if columns == (places[: len(places) // 2], places[len(places) // 2 :]):
                return inner, gating, False
            if columns == (places[::2], places[1::2]):
                return inner, gating, True
        return None

    def _inner(self, value: Value) -> _Multiplied | None:
        """Returns the product that a value is some columns of."""
        while True:
            found = self._product(value)
            if found is not None:
                return found
            if value.op not in MOVES:
                return None
            value = value.args[0]

    def _width(self, inner: _Multiplied) -> int:
        return int(inner.result.shape[-1])

    def _columns(self, value: Value, inner: _Multiplied) -> list[int] | None:
        """Returns which columns of each pair's product a value consists of."""
        found = self._elements.columns(value, lambda v: v is inner.result)
        is_inner = found is not None and bool((found[0] == self._elements.number(inner.result)).all())
        return found[1].tolist() if found is not None and is_inner else None

    # -- the router ------------------------------------------------------------------------------------

    def _router(self, weights: Value, chosen: Value) -> tuple[Router, Value]:
        """Returns a router and its input."""
        if chosen.op != "topk" or chosen.output != 1:
            raise NotRepresentedError(f"experts are chosen with {chosen.op}")
        choice, used = self._top(chosen)
        weights, factors = self._factors(weights, chosen)
        scores, on_weights = self._weights(weights, chosen)
        groups: Groups | None = None
        bias: Tensor | None = None
        if choice.op == "masked_fill":
            groups, choice = self._groups(choice)
        if scores is not choice and choice.op == "add" and isinstance(choice.args[1], Value):
            for operand, other in orders(choice):
                source_of_bias = self._elements.moved(widened(other))[0]
                if source_of_bias.op == "constant":
                    choice, bias = operand, self._reader.constant(self._unmoved(widened(other)))
                    break
        if scores is None:
            scores = choice
            experts = int(scores.shape[-1])
            if bias is not None or (groups is not None and used > groups.used * (experts // groups.count)):
                raise NotRepresentedError("experts are weighted by what they are chosen by")
        if scores is not choice:
            raise NotRepresentedError("experts are chosen by other scores than those that weight them")
        on_scores: list[Operation] = []
        while (before := self._operation(scores, on_scores)) is not None:
            scores = before
        logits, rounds, source = self._logits(scores)
        operations = tuple(reversed(on_scores)), tuple(reversed(on_weights))
        return Router(logits, rounds, operations[0], bias, groups, used, operations[1], factors), source

    def _factors(self, weights: Value, chosen: Value) -> tuple[Value, Tensor | None]:
        """Returns weights before they are multiplied by a number of their expert, and all these numbers."""
        value = widened(weights)
        if value.op != "mul" or value.dtype != torch.float32 or not isinstance(value.args[1], Value):
            return weights, None
        for before, other in orders(value):
            factor = widened(other)
            if factor.op == "index" and len(factor.args[1]) == 1 and factor.args[1][0] is chosen:
                return before, self._reader.constant(widened(factor.args[0]))
        return weights, None

    def _top(self, value: Value) -> tuple[Value, int]:
        """Returns what the largest values are chosen of, along the last dimension, and their number."""
        given, count = value.args[:2]
        dim = value.args[2] if len(value.args) > 2 else value.kwargs.get("dim", -1)
        largest = value.args[3] if len(value.args) > 3 else value.kwargs.get("largest", True)
        if dim % len(given.shape) != len(given.shape) - 1 or largest is not True:
            raise NotRepresentedError("experts are chosen in an unknown way")
        return given, int(count)

    def _weights(self, value: Value, chosen: Value) -> tuple[Value | None, list[Operation]]:
        """Returns the scores of all experts that weights come from, ``None``: those that experts are chosen
        by, and the operations on the chosen ones, the last one first."""
        operations: list[Operation] = []
        while True:
            if value.op == "gather":
                scores, dim, index = value.args[:3]
                if index is not chosen or dim % 2 != 1:
                    raise NotRepresentedError("experts are weighted by another expert's score")
                return scores, operations
            if value.op == "topk" and value.output == 0 and value.args is chosen.args:
                return None, operations
            before = self._operation(value, operations)
            if before is None:
                raise NotRepresentedError(f"experts are weighted with {value.op}")
            value = before

    def _operation(self, value: Value, operations: list[Operation]) -> Value | None:
        """Notes the operation that a value is made with, the last one first, and returns what it is made of;
        ``None``: it is made with something else."""
        found = self._read(value)
        if found is None:
            return None
        operation, before = found
        if value.dtype != torch.float32:
            if value.dtype != self._dtype:
                raise NotRepresentedError(f"a router computes in {value.dtype}")
            operations.append(Operation("round"))
        if operation is not None:
            operations.append(operation)
        return before

    def _read(self, value: Value) -> tuple[Operation | None, Value] | None:
        if value.op == "_to_copy":
            return None, value.args[0]
        if value.op in ("_softmax", "softmax"):
            if value.args[1] % len(value.shape) != len(value.shape) - 1:
                raise NotRepresentedError("a router's softmax is not over its experts")
            return Operation("softmax"), value.args[0]
        if value.op == "sigmoid":
            return Operation("sigmoid"), value.args[0]
        scaled = times_constant(value)
        if scaled is not None:
            inner = widened(scaled[0])
            if inner.op == "tanh":
                divided = times_constant(widened(inner.args[0]))
                if divided is not None and abs(divided[1] * scaled[1] - 1.0) < 1e-6:
                    return Operation("soft_cap", scaled[1]), divided[0]
            return Operation("scale", scaled[1]), scaled[0]
        return _normalization(value)

    def _groups(self, value: Value) -> tuple[Groups, Value]:
        """Reads the choice of some groups; returns it, and the scores of all experts."""
        unknown = NotRepresentedError("a router chooses groups of experts in an unknown way")
        scores, mask, others = value.args[:3]
        others = constant_of(others)
        if others is None or mask.op not in ("bitwise_not", "logical_not"):
            raise unknown
        mask = mask.args[0]
        if mask.op != "_to_copy" or mask.dtype != torch.bool:
            raise unknown
        marked, places = self._elements.moved(mask.args[0])
        if marked.op != "scatter" or marked.args[0].op not in ("zeros_like", "zeros"):
            raise unknown
        _, dim, index, mark = marked.args[:4]
        count, experts = int(marked.shape[-1]), int(scores.shape[-1])
        tokens = torch.arange(len(places))[:, None] * count
        if not torch.equal(places, tokens + torch.arange(experts) // (experts // count)):
            raise unknown
        if dim % 2 != 1 or constant_of(mark) != 1.0 or index.op != "topk" or index.output != 1:
            raise unknown
        own, used = self._top(index)
        best = 1
        if own.op == "sum" and own.args[1] in ((-1,), (2,)) and own.args[0].op == "topk":
            own = own.args[0]
            if own.output != 0:
                raise unknown
            by_group, best = self._top(own)
        elif own.op in ("max", "amax") and own.output == 0 and own.args[1] in (-1, 2, (-1,), (2,)):
            by_group = own.args[0]
        else:
            raise unknown
        if by_group.op != "view" or by_group.args[0] is not scores or by_group.shape[1] != count:
            raise unknown
        return Groups(count, used, best, others), scores

    def _logits(self, value: Value) -> tuple[Matrix | Part, bool, Value]:
        """Returns the product that logits are, whether they are rounded, and its input."""
        rounds = value.dtype != torch.float32 or self._dtype == torch.float32
        value = flat(value)
        if value.op == "linear":
            given, width = value.args[0], int(value.shape[-1])
            found: Matrix | Part = Part(self._reader.program.modules[value.args[1]], 0, width)
        elif value.op in ("mm", "addmm"):
            given, weight = value.args[-2:]
            bias = None if value.op == "mm" else self._reader.constant(widened(value.args[0]))
            if value.kwargs or weight.op != "t":
                raise NotRepresentedError("a router's logits are computed in an unknown way")
            found = Matrix(self._reader.constant(widened(weight.args[0])), bias)
        else:
            raise NotRepresentedError(f"a router's logits come from {value.op}")
        return found, rounds, given


def _normalization(value: Value) -> tuple[Operation, Value] | None:
    """Reads weights that are divided by their sum, which is at least a number or has a number added."""
    if value.op != "div" or len(value.args) != 2 or not isinstance(value.args[1], Value):
        return None
    total, eps, kind = widened(value.args[1]), 0.0, "normalize"
    if total.op == "clamp" and _limits(total)[1] is None:
        eps, kind = float(_limits(total)[0] or 0.0), "normalize_at_least"
        total = widened(total.args[0])
    elif total.op == "add":
        small = constant_of(total.args[1])
        total, eps = widened(total.args[0]), -1.0 if small is None else small
    if total.op != "sum" or total.args[0] is not value.args[0] or eps < 0.0:
        return None
    dims = total.args[1] if len(total.args) > 1 else ()
    if dims not in ((-1,), (len(value.shape) - 1,)) or total.args[2:] != (True,):
        return None
    return Operation(kind, eps), value.args[0]


def _active(value: Value) -> tuple[str, float, Value, float | None] | None:
    """Reads the activation of a gate: its name and steepness, the gate, and its limit."""
    named = activation_of(value)
    if named is not None:
        gate, limit = _limited_above(named[1])
        return named[0], 1.0, gate, limit
    if value.op == "mul" and isinstance(value.args[1], Value):
        for gate, other in orders(value):
            scaled = times_constant(other.args[0]) if other.op == "sigmoid" else None
            if scaled is not None and scaled[0] is gate:
                inner, limit = _limited_above(gate)
                return "silu", scaled[1], inner, limit
    return None


def _limits(value: Value) -> tuple[float | None, float | None]:
    given = [*value.args[1:], None, None][:2]
    given = [value.kwargs.get(name, own) for name, own in zip(("min", "max"), given, strict=True)]
    return given[0], given[1]


def _limited_above(value: Value) -> tuple[Value, float | None]:
    if value.op == "clamp":
        low, high = _limits(value)
        if low is None:
            return value.args[0], high
    return value, None


def _raised(value: Value) -> tuple[Value, float | None, float]:
    """Reads what a gate is multiplied by: the value, its limit, and what is added to it."""
    adds = 0.0
    if value.op == "add" and constant_of(value.args[1]) is not None:
        value, adds = value.args[0], constant_of(value.args[1]) or 0.0
    if value.op == "clamp":
        low, high = _limits(value)
        if low is not None and high is not None and low == -high:
            return value.args[0], high, adds
    return value, None, adds
