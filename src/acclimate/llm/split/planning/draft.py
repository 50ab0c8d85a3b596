"""A plan in the making: the splits of a model's tensors and the changes of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from acclimate.errors import TiedSplitsError
from acclimate.llm.split.plan import Change, Kind, Plan, Ranges, Source, Split
from acclimate.llm.split.planning.layouts import even_shares


class Draft:
    """The splits and changes that are decided so far; tensors without a split stay whole."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.size = size
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        """The parameters and persistent buffers of the model."""
        persistent = set(model.state_dict(keep_vars=True))
        self.tensors |= {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in persistent}
        self.splits: dict[str, Split] = {}
        self.changes: dict[str, Change] = {}
        self.partial: set[str] = set()
        """Parameters whose gradient each rank computes only in part."""
        self.split_modules: dict[str, None] = {}
        """The names of the split modules, in the order of the decisions."""

    def split(self, name: str, kind: Kind, dim: int, parts: tuple[Ranges, ...]) -> None:
        """Splits a tensor, if the model has one of this name."""
        if name in self.tensors:
            self.splits[name] = Split(name, tuple(self.tensors[name].shape), kind, dim, parts)

    def keep_on_first_rank(self, name: str) -> None:
        """Keeps a bias on the first rank only, because the outputs are summed over ranks."""
        if name in self.tensors:
            whole: Ranges = ((0, self.tensors[name].shape[0]),)
            self.split(name, "rows", 0, (whole, *((),) * (self.size - 1)))

    def change(self, name: str, change: Change) -> None:
        """Sets the change of a module that is split."""
        self.changes[name] = change
        self.split_modules[name] = None

    def change_block(
        self,
        name: str,
        attributes: Mapping[str, tuple[int, ...]] | None = None,
        arguments: Mapping[str | int, tuple[int, tuple[Ranges, ...]]] | None = None,
    ) -> None:
        """Adds changed attributes or arguments to a module's change."""
        known = self.changes.get(name, Change("block"))
        self.changes[name] = replace(
            known,
            attributes={**known.attributes, **(attributes or {})},
            arguments={**known.arguments, **(arguments or {})},
        )

    def even_parts(self, count: int) -> tuple[Ranges, ...]:
        """Returns each rank's range of ``count`` consecutive indices."""
        shares = even_shares(count, self.size, 16 if count >= 64 * self.size else 1)
        return tuple(((share.start, share.stop),) if share else () for share in shares)

    def role(self, name: str) -> str:
        """Returns how a split module is split; the columns of an output head are the vocabulary."""
        role = self.changes[name].role
        return "vocabulary" if role == "head" else role

    def tie(self, is_used: Callable[[str], bool]) -> dict[str, str]:
        """Gives tied parameters one split; returns the first name of each other name.

        ``is_used`` says whether the module that holds a parameter uses it.

        Raises:
            TiedSplitsError: one parameter would have to be split in two ways.
        """
        first: dict[int, str] = {}
        shared: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            if first.setdefault(id(tensor), name) != name:
                shared[name] = first[id(tensor)]
        for name, other in shared.items():
            one, two = self.splits.get(name), self.splits.get(other)
            if one is None and two is None:
                continue
            # The module does not use the tied parameter: the trace ran without its values.
            if one is None and two is not None and not is_used(name):
                one = self.splits[name] = replace(two, name=name)
            if two is None and one is not None and not is_used(other):
                two = self.splits[other] = replace(one, name=other)
            if one is None or two is None or replace(one, name=other) != two:
                raise TiedSplitsError(
                    frozenset(tied.rpartition(".")[0] for tied in (name, other)),
                    f"{name} is the same parameter as {other}, but the two would be split differently "
                    f"({(one and one.kind) or 'replicated'} and {(two and two.kind) or 'replicated'}).",
                )
        return shared

    def finished(
        self, source: Mapping[str, Source], shared: Mapping[str, str], whole: Mapping[str, str]
    ) -> Plan:
        """Returns the plan, in which all other tensors are replicated.

        ``source`` says per split module who decided the split, and ``whole`` per whole linear module why;
        ``shared`` is the result of :meth:`tie`.
        """
        splits = dict(self.splits)
        for name, tensor in self.tensors.items():
            if name not in splits:
                parts = (((0, tensor.shape[0]) if tensor.dim() else (0, 1),),) * self.size
                splits[name] = Split(name, tuple(tensor.shape), "replicated", 0, parts)
        partial = frozenset(name for name in self.partial if splits[name].kind == "replicated")
        return Plan(self.size, splits, source, self.changes, shared, partial, whole)
