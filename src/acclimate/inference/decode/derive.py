"""Derives a description of a decoder from a recording of one run.

Nothing is looked up by name or class. The recorded values show which module's output is which other module's
input, and trying the known operations on them shows which operation lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from acclimate.inference.decode.angles import find_tables
from acclimate.inference.decode.description import (
    Attention,
    Decoder,
    Layer,
    Mlp,
    Norm,
    NotRepresentedError,
    Part,
    Product,
    Rotary,
    RotaryTable,
)
from acclimate.inference.decode.matching import (
    activation_of,
    check_mask,
    distance,
    find_blocks,
    is_close,
    is_sum,
    multiplier,
    norm_of,
    numbers_of,
    product_of,
)
from acclimate.inference.decode.modules import is_linear
from acclimate.inference.decode.recording import AttentionCall, Call, Recording

_T = TypeVar("_T")
_Way = tuple[Rotary | None, Callable[[Tensor], Tensor]]


def derive(model: Any, recording: Recording) -> Decoder:
    """Returns the description of a recorded model.

    Raises:
        NotRepresentedError: the model did something that a description cannot express.
    """
    return _Deriver(model, recording).decoder()


@dataclass
class _Projection:
    """The path of queries, keys or values from a linear module to attention."""

    product: Product
    norm: Norm | None = None
    norm_is_per_head: bool = True
    rotary: Rotary | None = None
    rotary_first: bool = False
    factor: float = 1.0
    """The factor by which the heads are multiplied."""


class _Deriver:
    def __init__(self, model: Any, recording: Recording) -> None:
        self.model, self.recording = model, recording
        self.calls = recording.calls
        self.numbers = numbers_of(model.config)
        self.dtype: torch.dtype = model.dtype
        self.linear = {id(m) for m in model.modules() if is_linear(m)}
        # Most layers equal the previous one, whose values are tried first.
        self.last_rotary: Rotary | None = None
        self.last_had_norm = False
        self.tables: list[RotaryTable] = []
        self.angles: list[tuple[Tensor, Tensor]] = []

    def decoder(self) -> Decoder:
        spans = self._layers()
        self._find_tables()
        inputs = [_need(call.given, "a layer has no input") for call, _, _ in spans]
        outputs = [_need(call.output, "a layer has no output") for call, _, _ in spans]
        for earlier, later in zip(outputs, inputs[1:], strict=False):
            if not torch.equal(earlier, later):
                raise NotRepresentedError("a layer's input is not the previous layer's output")
        embedding, factor, positions, offset = self._embedding(inputs[0], spans[0][1])
        layers = tuple(
            self._layer(call, self.calls[first:last], attention)
            for (call, first, last), attention in zip(spans, self.recording.attentions, strict=True)
        )
        norm, head, times, cap = self._end(outputs[-1], spans[-1][2])
        return Decoder(
            embedding, factor, positions, offset, tuple(self.tables), layers, norm, head, times, cap,
            self.dtype, int(inputs[0].shape[-1]), int(_need(self.recording.logits, "no logits").shape[-1]),
            self.recording.share,
        )  # fmt: skip

    # -- the whole -------------------------------------------------------------------------------

    def _layers(self) -> list[tuple[Call, int, int]]:
        """Returns the call of each layer, and where the calls inside it begin and end."""
        attentions = self.recording.attentions
        if not attentions:
            raise NotRepresentedError("no attention goes through transformers' registry")
        for members in self.model.modules():
            if not isinstance(members, nn.ModuleList) or len(members) != len(attentions):
                continue
            ends = [[i for i, c in enumerate(self.calls) if c.module is each] for each in members]
            if any(len(end) != 1 for end in ends):
                continue
            last = [end[0] for end in ends]
            prefixes = [f"{self.calls[i].name}." for i in last]
            first = [
                min((i for i in range(end) if self.calls[i].name.startswith(p)), default=end)
                for end, p in zip(last, prefixes, strict=True)
            ]
            if all(f <= a.after <= e for f, a, e in zip(first, attentions, last, strict=True)):
                return [(self.calls[e], f, e) for f, e in zip(first, last, strict=True)]
        raise NotRepresentedError("the layers are not a list of modules with one attention each")

    def _embedding(self, start: Tensor, before: int) -> tuple[nn.Module, float, Tensor | None, int]:
        table = self.model.get_input_embeddings()
        rows = _need(self.recording.rows, "the tokens' embedding is not known")
        if rows.shape != start.shape:
            raise NotRepresentedError("the tokens' embedding is not a table of the layers' width")
        factor = multiplier(rows, start, self.numbers)
        if factor is not None:
            return table, factor, None, 0
        others = {
            id(c.module): c for c in self.calls[:before]
            if isinstance(c.module, nn.Embedding) and c.module is not table
        }  # fmt: skip
        length = start.shape[1]
        for call in others.values():
            places = call.module.weight.detach()  # type: ignore[operator]
            if call.output is None or places.shape[-1] != start.shape[-1]:
                continue
            for offset in range(4):
                added = places[offset : offset + length][None]
                if not torch.equal(call.output.reshape(-1, length, places.shape[-1])[:1], added):
                    continue
                for candidate in self.numbers:
                    if is_sum(((rows.float() * candidate).to(self.dtype), added), start):
                        return table, candidate, places, offset
        raise NotRepresentedError("the first layer's input is not made of embeddings only")

    def _end(self, hidden: Tensor, after: int) -> tuple[Norm | None, nn.Module, float, float | None]:
        logits = _need(self.recording.logits, "the model has no logits")
        later = self.calls[after + 1 :]
        head = self.model.get_output_embeddings()
        call = next((c for c in later if c.module is head and id(c.module) in self.linear), None)
        if call is None or call.given is None or call.output is None:
            raise NotRepresentedError("the output head is not one linear module")
        norm = self._norm_between(hidden, call.given, later)
        raw = call.output
        if raw.shape != logits.shape:
            raise NotRepresentedError("the logits are not the output head's")
        factor = multiplier(raw, logits, self.numbers)
        if factor is None or not torch.equal((raw.float() * factor).to(raw.dtype), logits):
            capped = next(self._caps(raw, logits, factor), None)
            if capped is not None:
                return norm, call.module, *capped
        if factor is not None:
            return norm, call.module, factor, None
        raise NotRepresentedError("the logits are changed in an unknown way")

    def _caps(self, raw: Tensor, logits: Tensor, factor: float | None) -> Iterator[tuple[float, float]]:
        """Yields factors and caps that turn ``raw`` into ``logits``.

        If a factor without a cap is close, either the logits are small compared with a cap, or only the
        rounding differs. A cap is then accepted only if it gives the same bits.
        """
        for cap in (each for each in self.numbers if each > 1):
            if factor is None:
                for times in (1.0, *self.numbers):
                    if is_close(_capped(raw, times, cap), logits):
                        yield times, cap
                continue
            for times in dict.fromkeys((1.0, factor)):
                for x in (raw, raw.float()):
                    last = _capped(x[:, -1], times, cap).to(logits.dtype)
                    if torch.equal(last, logits[:, -1]) and is_close(_capped(raw, times, cap), logits):
                        yield times, cap

    def _norm_between(self, x: Tensor, y: Tensor, calls: list[Call]) -> Norm | None:
        """Returns the normalization that turns ``x`` into ``y``; ``None``: they are equal."""
        if torch.equal(x, y):
            return None
        for call in calls:
            if self._is_norm_call(call, x) and call.output is not None and torch.equal(call.output, y):
                norm = norm_of(call.module, x, y)
                if norm is not None:
                    return norm
        raise NotRepresentedError("an unknown operation stands where a normalization is expected")

    def _is_norm_call(self, call: Call, x: Tensor) -> bool:
        return (
            call.given is not None
            and id(call.module) not in self.linear
            and call.given.shape == x.shape
            and torch.equal(call.given, x)
        )

    # -- rotary embeddings -----------------------------------------------------------------------

    def _find_tables(self) -> None:
        """Finds calls that returned cosines and sines of positions."""
        length = self.recording.tokens.shape[1]
        for table in find_tables(self.calls, length):
            self.tables.append(table)
            with torch.no_grad():
                self.angles.append(table(torch.arange(length, device=self.recording.tokens.device)))

    def _rotations(self, size: int) -> Iterator[_Way]:
        for index, (table, (cos, sin)) in enumerate(zip(self.tables, self.angles, strict=True)):
            if table.width > size:
                continue
            for interleaved in (False, True):
                for rounds in (True, False):
                    rotary = Rotary(index, table.width, interleaved, rounds)
                    yield rotary, lambda x, r=rotary, c=cos, s=sin: r(x, c, s)  # type: ignore[misc]

    # -- a layer ---------------------------------------------------------------------------------

    def _layer(self, call: Call, calls: list[Call], attention: AttentionCall) -> Layer:
        x, end = _need(call.given, "no input"), _need(call.output, "no output")
        linears = [c for c in calls if id(c.module) in self.linear and c.given is not None]
        flat = attention.result.flatten(2)
        out = [c for c in linears if c.given is not None and c.given.shape == flat.shape
               and torch.equal(c.given, flat)]  # fmt: skip
        if len(out) != 1:
            raise NotRepresentedError("attention's result does not go to one linear module")
        position = calls.index(out[0])
        before = [c for c in calls[:position] if id(c.module) in self.linear]
        start = next((c.given for c in before if c.given is not None), None)
        start = _need(start, "no linear module comes before attention")
        attention_norm = self._norm_between(x, start, calls)
        described = self._attention(attention, calls[:position], start, out[0].module)
        branch, post = self._branch_ends(out[0], calls)
        taken = {id(p.module) for q in (described.query, described.key, described.value) for p in q.parts}
        rest = [c for c in linears if id(c.module) not in taken and c is not out[0]]
        for added, norm in zip(branch, post, strict=True):
            found = self._rest(x, start, end, added, calls, rest)
            if found is not None:
                mlp_norm, mlp, factor, mlp_post, mlp_factor, parallel, branches_first = found
                return Layer(
                    attention_norm, described, norm, factor, mlp_norm, mlp, mlp_post, mlp_factor,
                    parallel is not None, branches_first, parallel == "shared",
                )  # fmt: skip
        raise NotRepresentedError("the layer's output is not a sum of its input, attention and an MLP")

    def _branch_ends(self, call: Call, calls: list[Call]) -> tuple[list[Tensor], list[Norm | None]]:
        """Returns what a branch may add to the residual stream: its last output, raw or normalized."""
        result = _need(call.output, "no output")
        ends: list[Tensor] = [result]
        norms: list[Norm | None] = [None]
        for each in calls:
            if self._is_norm_call(each, result) and each.output is not None and each.output is not result:
                norm = norm_of(each.module, result, each.output)
                if norm is not None and not torch.equal(each.output, result):
                    ends.append(each.output)
                    norms.append(norm)
        return ends, norms

    def _rest(
        self, x: Tensor, start: Tensor, end: Tensor, added: Tensor, calls: list[Call], linears: list[Call]
    ) -> tuple[Norm | None, Mlp, float, Norm | None, float, str | None, bool] | None:
        """Finds the MLP, and how both branches are added."""
        downs = [c for c in linears if c.output is not None and c.output.shape == x.shape]
        for down in reversed(downs):
            inner = _need(down.given, "no input")
            others = [c for c in linears if c is not down]
            if not others:
                continue
            mlp_start = _need(others[0].given, "no input")
            found = self._mlp([c for c in others if _same(c.given, mlp_start)], inner, down.module)
            if found is None or len([c for c in others if not _same(c.given, mlp_start)]):
                continue
            results, norms = self._branch_ends(down, calls)
            for result, norm in zip(results, norms, strict=True):
                # One after the other: the MLP starts from input and attention together.
                for middle in self._sums_before(mlp_start, calls):
                    factor = self._added(x, added, middle)
                    last = self._added(middle, result, end) if factor is not None else None
                    if factor is not None and last is not None:
                        before = self._norm_between(middle, mlp_start, calls)
                        return before, found, factor, norm, last, None, False
                if is_sum((x, added, result), end):
                    gaps = [distance((x + added) + result, end), distance(x + (added + result), end)]
                    branches_first = gaps[1] < gaps[0]
                    if torch.equal(mlp_start, start):
                        return None, found, 1.0, norm, 1.0, "shared", branches_first
                    own = self._norm_between(x, mlp_start, calls)
                    return own, found, 1.0, norm, 1.0, "own", branches_first
        return None

    def _sums_before(self, start: Tensor, calls: list[Call]) -> list[Tensor]:
        """Returns the tensors that the MLP may start from: its input, or the input of a normalization."""
        found = [start]
        for call in calls:
            if call.output is not None and call.given is not None and id(call.module) not in self.linear:
                found += [call.given] if _same(call.output, start) else []
        return found

    def _added(self, x: Tensor, branch: Tensor, result: Tensor) -> float | None:
        """Returns the factor with which a branch is added to the residual stream."""
        if x.shape != branch.shape or x.shape != result.shape:
            return None
        if is_sum((x, branch), result):
            return 1.0
        wide = branch.double()
        estimate = float((wide * (result.double() - x.double())).sum() / wide.square().sum())
        for factor in self.numbers:
            if abs(factor - estimate) <= 0.05 * abs(estimate) and is_sum((x, branch * factor), result):
                return factor
        return None

    def _mlp(self, calls: list[Call], inner: Tensor, down: nn.Module) -> Mlp | None:
        width = inner.shape[-1]
        outputs = [(c.module, _need(c.output, "no output")) for c in calls]
        halves: list[tuple[Part, Tensor]] = []
        for module, output in outputs:
            for first in range(0, output.shape[-1] - width + 1, width):
                halves.append((Part(module, first, width), output[..., first : first + width]))
        if len(halves) == 1:
            name = activation_of(None, halves[0][1], inner)
            return None if name is None else Mlp(None, Product((halves[0][0],)), name, down)
        if len(halves) == 2:
            for gate, up in (halves, halves[::-1]):
                name = activation_of(gate[1], up[1], inner)
                if name is not None:
                    return Mlp(Product((gate[0],)), Product((up[0],)), name, down)
        return None

    # -- attention -------------------------------------------------------------------------------

    def _attention(
        self, call: AttentionCall, calls: list[Call], start: Tensor, output: nn.Module
    ) -> Attention:
        if call.query.shape[0] != 1 or call.query.shape[1] % call.key.shape[1]:
            raise NotRepresentedError("query heads do not divide evenly over key heads")
        sources = [c for c in calls if id(c.module) in self.linear and _same(c.given, start)]
        query = self._projection(call.query[0], sources, calls)
        key = self._projection(call.key[0], sources, calls)
        value = self._projection(call.value[0], sources, calls)
        if value.norm is not None or value.rotary is not None:
            raise NotRepresentedError("values are normalized or rotated")
        if key.factor != 1.0 or value.factor != 1.0:
            raise NotRepresentedError("keys or values are multiplied by a number")
        ways = [(p.rotary, p.rotary_first, p.norm is None, p.norm_is_per_head) for p in (query, key)]
        if ways[0] != ways[1]:
            raise NotRepresentedError("queries and keys are treated differently")
        window = self._window(call)
        return Attention(
            query.product, key.product, value.product, query.norm, key.norm, query.norm_is_per_head,
            query.rotary, query.rotary_first, call.query.shape[1], call.key.shape[1], call.query.shape[3],
            call.value.shape[3], call.scale * query.factor, window, call.softcap,
            None if call.sinks is None else call.sinks.detach(), output,
        )  # fmt: skip

    def _window(self, call: AttentionCall) -> int | None:
        own = getattr(self.model.config, "sliding_window", None)
        failure = NotRepresentedError("attention's mask is unknown")
        for window in dict.fromkeys((call.window, None, own)):
            try:
                check_mask(call.mask_rule, window)
            except NotRepresentedError as error:
                failure = error
            else:
                return window
        raise failure

    def _projection(self, heads: Tensor, sources: list[Call], calls: list[Call]) -> _Projection:
        """Finds where queries, keys or values (heads x tokens x size) come from."""
        size = heads.shape[-1]
        ways: list[_Way] = [(None, _unchanged)]
        ways += self._rotations(size)
        ways.sort(key=lambda way: way[0] != self.last_rotary)
        finders = [self._direct, self._normalized]
        for find in finders if not self.last_had_norm else reversed(finders):
            found = find(heads, sources, calls, ways)
            if found is not None:
                self.last_rotary, self.last_had_norm = found.rotary, found.norm is not None
                return found
        raise NotRepresentedError("queries, keys or values do not come from linear modules only")

    def _direct(
        self, heads: Tensor, sources: list[Call], calls: list[Call], ways: list[_Way]
    ) -> _Projection | None:
        """Like ``_projection``, with at most a rotation or a factor in between."""
        size = heads.shape[-1]
        factor = float(size**-0.5)  # a model may scale its queries, and not the scores
        for rotary, change in [*ways, (None, lambda x: x * factor)]:
            for source in sources:
                blocks = find_blocks(heads, _need(source.output, "no output")[0], change)
                if blocks is not None:
                    times = 1.0 if rotary is not None or change is _unchanged else factor
                    return _Projection(product_of(source.module, blocks, size), rotary=rotary, factor=times)
        return None

    def _normalized(
        self, heads: Tensor, sources: list[Call], calls: list[Call], ways: list[_Way]
    ) -> _Projection | None:
        """Like ``_projection``, with a normalization in between."""
        for call in calls:
            if id(call.module) in self.linear or call.output is None or call.given is None:
                continue
            for per_head, given, made in _as_heads(call, heads.shape[-1]):
                found = self._normalized_by(call, heads, per_head, given, made, sources, ways)
                if found is not None:
                    return found
        return None

    def _normalized_by(
        self,
        call: Call,
        heads: Tensor,
        per_head: bool,
        given: Tensor,
        made: Tensor,
        sources: list[Call],
        ways: list[_Way],
    ) -> _Projection | None:
        """Like ``_projection``, with one normalization from ``given`` to ``made`` (heads x tokens x size)."""
        size = heads.shape[-1]
        if made.shape != heads.shape or call.given is None or call.output is None:
            return None
        for rotary, change in ways:
            if not is_close(change(made), heads):
                continue
            norm = norm_of(call.module, call.given, call.output)
            if norm is None:
                return None
            inner = [way for way in ways if way[0] is None] if rotary is not None else ways
            for inner_rotary, inner_change in inner:
                if inner_rotary is not None and not per_head:
                    continue
                for source in sources:
                    blocks = find_blocks(given, _need(source.output, "no output")[0], inner_change)
                    if blocks is not None:
                        product = product_of(source.module, blocks, size)
                        return _Projection(
                            product, norm, per_head, rotary or inner_rotary, inner_rotary is not None
                        )
        return None


def _unchanged(x: Tensor) -> Tensor:
    return x


def _as_heads(call: Call, size: int) -> Iterator[tuple[bool, Tensor, Tensor]]:
    """Returns a call's input and output as heads x tokens x size, and whether each head was one row."""
    given, made = call.given, call.output
    if given is None or made is None or given.shape != made.shape or given.shape[0] != 1:
        return
    if given.dim() == 4 and given.shape[-1] == size:
        yield True, given[0].transpose(0, 1), made[0].transpose(0, 1)  # tokens x heads
        yield True, given[0], made[0]
    elif given.dim() == 3 and given.shape[-1] % size == 0:
        shape = (given.shape[1], -1, size)
        yield False, given[0].reshape(shape).transpose(0, 1), made[0].reshape(shape).transpose(0, 1)


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(one, other)


def _need(value: _T | None, message: str) -> _T:
    if value is None:
        raise NotRepresentedError(message)
    return value


def _capped(logits: Tensor, factor: float, cap: float) -> Tensor:
    return torch.tanh(logits * factor / cap) * cap
