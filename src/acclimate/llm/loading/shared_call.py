"""One call of ``generate`` on ranks that share a model: the same arguments, the same tokens, the same end.

Ranks that generate wait for each other in each layer. If one rank stopped alone, because of its clock, its
own stopping criterion or an error in its streamer, the others would wait for it forever. So all stop
together.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from acclimate.errors import InvalidRankError
from acclimate.llm.ranks import ModelRanks

_PROCESSORS = ("logits_processor", "prefix_allowed_tokens_fn")
_OF_THE_USER = ("streamer", "stopping_criteria", *_PROCESSORS)
"""The arguments with the user's code, which only some ranks may have."""


class SharedCall:
    """A call of ``generate`` on ranks that agreed on its arguments.

    If a rank passed its own code, such as a streamer, or a time limit, the ranks exchange each token, and
    whether they stop after it.
    """

    def __init__(self, ranks: ModelRanks, user_code: frozenset[str]) -> None:
        self._ranks, self._is_watched = ranks, bool(user_code)
        self._has_processors = not user_code.isdisjoint(_PROCESSORS)
        self._failure: BaseException | None = None

    def streamer(self, own: Any) -> Any:
        """Returns a streamer whose errors all ranks raise."""
        return _Streamer(self, own)

    def processors(self, own: Any) -> Any:
        """Returns the list with one processor that runs the given ones, and whose errors all ranks raise."""
        from transformers import LogitsProcessorList

        def process(input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
            processed: Tensor = self._run(own, input_ids, scores, **more, instead=scores)
            return processed

        # On ranks that have none too, because a rank without processors does not gather all logits.
        return LogitsProcessorList([process]) if self._has_processors else own

    def criteria(self, own: Any) -> Any:
        """Returns stopping criteria that end a sequence on all ranks if they end it on one."""
        from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

        # These two follow from the tokens, and transformers looks for them in the list.
        common = [criterion for criterion in own if type(criterion) in (EosTokenCriteria, MaxLengthCriteria)]
        others = StoppingCriteriaList([criterion for criterion in own if criterion not in common])
        # Others than the user's follow from arguments, which are equal on all ranks.
        self._is_watched |= bool(others)
        if not self._is_watched:
            return own

        def ends(input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
            nothing = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
            ended = self._run(others, input_ids, scores, **more, instead=nothing) if others else nothing
            return self._agreed(input_ids[:, -1], ended)

        return StoppingCriteriaList([*common, ends])

    def finish(self) -> None:
        """Raises on all ranks an error that the user's code raised on one."""
        if self._is_watched:
            self._ranks.raise_together(self._failure)

    def _run(self, function: Any, *args: Any, instead: Any, **kwargs: Any) -> Any:
        if self._failure is not None:
            return instead
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - also sys.exit(); raised once the other ranks know
            self._failure = error
            return instead

    def _agreed(self, tokens: Tensor, ended: Tensor) -> Tensor:
        import torch.distributed as dist

        own = torch.cat([tokens.long(), ended.long(), tokens.new_tensor([self._failure is not None]).long()])
        told = [torch.empty_like(own) for _ in range(self._ranks.size)]
        dist.all_gather(told, own, group=self._ranks.group)
        all_told = torch.stack(told).cpu()
        if all_told[:, -1].any():
            self.finish()
        chosen, ends = all_told[:, : len(tokens)], all_told[:, len(tokens) : -1]
        if not torch.equal(chosen, chosen[:1].expand_as(chosen)):
            raise InvalidRankError(
                f"the ranks chose different tokens ({chosen[0].tolist()[:4]} on rank 0); all ranks that "
                "share a model need the same logits processors"
            )
        return ends.any(0).to(ended.device)


class _Streamer:
    def __init__(self, call: SharedCall, own: Any) -> None:
        self._call, self._own = call, own

    def put(self, value: Any) -> None:
        self._call._run(self._own.put, value, instead=None)

    def end(self) -> None:
        self._call._run(self._own.end, instead=None)


def user_code(kwargs: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the arguments of ``generate`` that are code of the user's."""
    return frozenset(name for name in _OF_THE_USER if kwargs.get(name) not in (None, []))


def by_name(
    generate: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call of ``generate``, by name if it names them."""
    parameters = inspect.signature(generate).parameters.values()
    # A wrapper's, such as peft's.
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return args, dict(kwargs)
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][
        : len(args)
    ]
    return args[len(names) :], dict(zip(names, args, strict=False)) | dict(kwargs)


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of each argument of ``generate`` that all ranks must give alike, by its name."""
    named = {"prompt" if n == 0 else f"argument {n + 1}": value for n, value in enumerate(args)}
    for name, value in kwargs.items():
        if name not in _OF_THE_USER and value is not None:
            named["prompt" if name in ("inputs", "input_ids") else name] = value
    return {name: _digest(value) for name, value in named.items()}


def different(first: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Returns the name of an argument that differs, or ``None``."""
    names = (name for name in {**first, **other} if first.get(name) != other.get(name))
    return next(names, None)


def _digest(value: Any) -> str:
    content = hashlib.sha256()
    for piece in _pieces(value):
        content.update(len(piece).to_bytes(8, "little") + piece)
    return content.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        yield bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"list {len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif hasattr(value, "to_diff_dict"):  # a generation config
        # Its private attributes have a hash of texts, which differs between processes.
        yield from _pieces({name: own for name, own in vars(value).items() if not name.startswith("_")})
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield repr(value).encode()
    else:  # a model, a cache or a function, whose content cannot be compared
        yield type(value).__qualname__.encode()
