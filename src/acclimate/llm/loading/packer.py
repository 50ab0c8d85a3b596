"""Packs weights while a model is loaded: reads, slices, quantises and frees one after the other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from acclimate.errors import CorruptModelError, OpBuildError, QuantizationError, WeightError, excerpt
from acclimate.host.huge_pages import SharedPages

if TYPE_CHECKING:
    import torch

    from acclimate.llm.files.deferred_tensors import Source
    from acclimate.llm.files.slices import Slice
    from acclimate.llm.gguf.tensors import Blocks
    from acclimate.llm.kernels import PackedStack, PackedWeight

logger = logging.getLogger("acclimate.llm")
_Packed = TypeVar("_Packed", "PackedWeight", "PackedStack")

FORMATS = ("int8", "int4")
"""The weight formats that a user can choose; some weights get another one (:meth:`Packer.find_sensitive`)."""


def check_format(name: Any) -> None:
    """Raises :class:`QuantizationError` unless ``name`` is one of :data:`FORMATS`."""
    if name is not None and name not in FORMATS:
        raise QuantizationError(
            f"quantize must be {' or '.join(FORMATS)}, or left out; it is '{excerpt(str(name), 40)}'"
        )


CACHE_DTYPES = ("auto", "int8")
"""The dtypes of keys and values that a user can choose; ``auto``: the dtype that the model computes in."""


def check_cache_dtype(name: Any) -> None:
    """Raises :class:`QuantizationError` unless ``name`` is one of :data:`CACHE_DTYPES`."""
    if name not in CACHE_DTYPES:
        raise QuantizationError(
            f"kv_cache_dtype must be {' or '.join(CACHE_DTYPES)}; it is '{excerpt(str(name), 40)}'"
        )


def has_kernels(device: str) -> bool:
    """Whether there are native kernels for packed weights on a device; builds them when first asked."""
    from acclimate.llm.kernels import builder

    device_type = device.partition(":")[0]
    if device_type not in builder.WITH_KERNELS:
        return False
    try:
        builder.load(device_type)
    except OpBuildError as error:
        logger.warning("models run without native kernels: %s", error)
        return False
    return True


_SHORT_ROW = 1024
_PACKED_TOGETHER = 1 << 25
"""Values that are read and packed at a time, so that a vocabulary of 100,000 is not in memory twice."""


@dataclass(frozen=True)
class Unpacked:
    """Weights that are quantised in the files, but not in memory."""

    count: int = 0
    size_bytes: int = 0
    """Their memory."""
    stored_bytes: int = 0
    """Their bytes in the files."""


@dataclass(frozen=True)
class Changed:
    """Weights whose values are not those of the files."""

    count: int = 0
    error: float = 0.0
    """The largest relative error of a weight."""
    format: str = ""
    """The format that they are in."""


@dataclass
class Packer:
    """Decides how each weight is stored, and records the weights that stayed dense."""

    format: str | None
    """``int8`` or ``int4``; ``None``: weights that are quantised in the files may stay so, and others stay
    dense."""
    source: str
    """The model's folder or file, for messages."""
    keeps_quantised: bool = True
    """Without a format: whether weights that are quantised in the files stay so."""
    packed: Counter[str] = field(default_factory=Counter)
    """The number of weights in each format."""
    dense: dict[str, str] = field(default_factory=dict)
    """The names of matrices that stayed dense, each with the reason."""
    unpacked: dict[str, Unpacked] = field(default_factory=dict)
    """What was unpacked, by its kind in the files."""
    changed: dict[str, Changed] = field(default_factory=dict)
    """What no format holds exactly, by its kind in the files."""
    _sensitive: dict[str, str] = field(default_factory=dict)
    """The weights that get another format than ``format``, by name."""
    _small_tables: set[str] = field(default_factory=set)
    """The names of embeddings with fewer rows than the vocabulary."""
    _pages: SharedPages = field(default_factory=SharedPages)
    """Where weights are that are too small for huge pages of their own."""

    def find_sensitive(self, model: torch.nn.Module) -> None:
        """Chooses more bits for the parameters of a whole model that lose too much accuracy in ``int4``.

        In all formats, embeddings with fewer rows than the vocabulary, such as those of positions, stay
        dense: they are small, a token reads one row, and the native step adds it as it is.

        Embeddings and output heads get 5 bits, because an error in a row of the output head changes every
        token's probability. Matrices with fewer outputs than inputs (values, attention's and the MLP's
        output) get 8 bits, because their errors reach the residual stream without being averaged. Other
        matrices get 5 bits if their rows are short, as in the smallest models, which lose the most.
        ``benchmarks/quality.py`` measures the effect.
        """
        import torch

        if self.format is None:
            return
        tables = {
            f"{prefix}.weight": module.num_embeddings
            for prefix, module in model.named_modules()
            if isinstance(module, torch.nn.Embedding)
        }
        most = max(tables.values(), default=0)
        self._small_tables.update(name for name, rows in tables.items() if rows < most)
        if self.format != "int4":
            return
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for prefix, module in model.named_modules():
            is_table = module is head or isinstance(module, torch.nn.Embedding)
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() in (2, 3):
                    rows, columns = parameter.shape[-2:]
                    if parameter.dim() == 3 and getattr(module, "is_transposed", False):
                        rows, columns = columns, rows
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    if rows < columns and not is_table:
                        self._sensitive[name] = "int8"
                    elif is_table or columns < _SHORT_ROW:
                        self._sensitive[name] = "int5"

    def pack(self, part: Slice, device: str) -> bool:
        """Packs one slice into its modules; returns whether it was packed."""
        from acclimate.llm.loading.packed_modules import hold, hold_stack

        dtype = part.shard.dtype
        if part.shard.dim() == 3:
            stack = self._packed_stack(part)
            if stack is not None:
                ((module, leaf),) = part.places
                hold_stack(module, leaf, self._placed(stack, device), dtype, device)
            made: PackedWeight | PackedStack | None = stack
        else:
            made = matrix = self._packed_matrix(part)
            if matrix is not None:
                there = self._placed(matrix, device)
                for module, _ in part.places:
                    hold(module, there, dtype, device)
        if made is None:
            self._note_unpacked(part)
            return False
        self.packed[made.format] += 1
        return True

    def _placed(self, made: _Packed, device: str) -> _Packed:
        """Returns packed weights on a device; on the host, small ones on huge pages that they share."""
        there = made.to(device)
        return replace(there, data=self._pages.move(there.data))

    def _quantised(self, part: Slice, quantise: Callable[[torch.Tensor, str], _Packed]) -> _Packed | None:
        """Quantises a slice to the format that was asked for; notes the reason if that is impossible."""
        chosen = self._sensitive.get(part.name, str(self.format))
        try:
            return quantise(part.read(self.source), chosen)
        except WeightError as error:
            self.dense[part.name] = str(error)
            return None

    def _packed_matrix(self, part: Slice) -> PackedWeight | None:
        from acclimate.llm.kernels import PackedWeight
        from acclimate.llm.loading.packed_modules import can_be_packed

        if part.shard.dim() != 2 or part.shard.numel() == 0:
            return None
        if not all(can_be_packed(module, leaf) for module, leaf in part.places):
            if self.format is not None:
                self.dense[part.name] = "its module is neither a linear module nor an embedding"
            return None
        if self.format is None:
            return (self._published(part) or self._as_stored(part)) if self.keeps_quantised else None
        if part.name in self._small_tables:
            self.dense[part.name] = "it is a small table, of which a token reads one row"
            return None
        return self._quantised(part, PackedWeight.quantize)

    def _packed_stack(self, part: Slice) -> PackedStack | None:
        """Packs the weights of experts."""
        from acclimate.llm.kernels import PackedStack
        from acclimate.llm.loading.packed_modules import can_be_stacked
        from acclimate.llm.published.experts import pack_experts

        (module, leaf), *others = part.places
        if others or not can_be_stacked(module, leaf) or part.shard.numel() == 0:
            if self.format is not None:
                self.dense[part.name] = "its module is neither a linear module nor transformers' experts"
            return None
        is_turned = bool(module.is_transposed)
        experts, n, k = part.shard.shape
        n, k = (k, n) if is_turned else (n, k)
        if self.format is not None:
            return self._quantised(part, partial(PackedStack.quantize, is_turned=is_turned))
        if not self.keeps_quantised:
            return None
        made = pack_experts(part.shard, part.name, self.source, is_turned=is_turned)
        if made is not None:
            self._note_error(part, made[1], made[0].format)
            return made[0]
        found = self._stored_blocks(part, is_turned=is_turned)
        if found is None:
            return None
        data = self._packed_blocks(part, found, experts)
        return PackedStack(found.format.name, data, (n, k), is_turned)

    def pack_loaded(self, model: torch.nn.Module, device: str) -> None:
        """Packs the weights of a loaded model, which may be split, one after the other."""
        from acclimate.llm.files.slices import Slice

        found: dict[int, Slice] = {}
        for prefix, module in model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    part = found.setdefault(id(parameter), Slice(name, parameter.detach()))
                    part.places.append((module, leaf))
        for part in found.values():
            self.pack(part, device)

    def _as_stored(self, part: Slice) -> PackedWeight | None:
        from acclimate.llm.kernels import PackedWeight

        found = self._stored_blocks(part)
        if found is None:
            return None
        return PackedWeight(found.format.name, self._packed_blocks(part, found)[0], found.shape)

    def _stored_blocks(self, part: Slice, *, is_turned: bool = False) -> Blocks | None:
        """Returns a matrix, or those of experts, as blocks of a file, if it consists of them.

        If ``is_turned``, the last dimension counts the rows of blocks.
        """
        from acclimate.llm.gguf.tensors import source_types, stored_blocks

        found = stored_blocks(part.shard, is_turned=is_turned)
        types = source_types(part.shard)
        if found is None and types - _UNPACKED:
            self.dense[part.name] = (
                f"its blocks ({', '.join(sorted(types))}) have no kernel, no common type, or are cut"
            )
        return found

    def _packed_blocks(self, part: Slice, found: Blocks, matrices: int = 1) -> torch.Tensor:
        """Reads and packs blocks, some rows at a time; returns matrices x groups x bytes of a group."""
        import torch

        from acclimate.llm.kernels import PackedWeight
        from acclimate.llm.kernels.formats import GROUP_ROWS
        from acclimate.llm.kernels.packed_weight import new_data

        rows, k = found.shape
        n = rows // matrices
        groups, done = matrices * -(-n // GROUP_ROWS), 0
        step = max(_PACKED_TOGETHER // k // GROUP_ROWS, 1) * GROUP_ROWS
        if matrices > 1 and n % GROUP_ROWS:  # the rows of each begin a group
            step = n
        data = torch.empty(0, dtype=torch.uint8)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            blocks = found.read(first, last)
            if found.has_broken_scales(blocks):
                raise CorruptModelError(
                    f"the tensor {part.name} in {self.source} is corrupt: the scale of a block is infinite "
                    "or NaN"
                )
            packed = PackedWeight.from_gguf(blocks, found.format.name, (last - first, k)).data
            if len(packed) == groups:
                data = packed
                break
            data = data if done else new_data(found.format, groups * GROUP_ROWS, k, torch.device("cpu"))
            data[done : done + len(packed)] = packed
            done += len(packed)
        return data.view(matrices, groups // matrices, -1)

    def _published(self, part: Slice) -> PackedWeight | None:
        from acclimate.llm.published.packing import pack_part, quantised_parts

        found = quantised_parts(part.shard)
        if found is None:
            return None
        made = pack_part(found[0], part.name, self.source)
        self._note_error(part, made.error, made.weight.format)
        return made.weight

    def _note_error(self, part: Slice, error: float, weight_format: str) -> None:
        """Notes that a weight's values are not those of the files, unless the error is 0."""
        from acclimate.llm.files.deferred_tensors import sources

        if error:
            kind = _kind(next(sources(part.shard)))
            before = self.changed.get(kind, Changed())
            self.changed[kind] = Changed(before.count + 1, max(before.error, error), weight_format)

    def _note_unpacked(self, part: Slice) -> None:
        """Notes that a weight that is quantised in the files takes more memory than there."""
        from acclimate.llm.files.deferred_tensors import sources

        found = {_kind(source): source for source in sources(part.shard) if stored_bits(source)}
        if not found or self.format is not None:
            return
        stored = sum(map(stored_bits, found.values())) / len(found) / 8
        kind, before = " and ".join(sorted(found)), self.unpacked.get(" and ".join(sorted(found)), Unpacked())
        values = part.shard.numel()
        self.unpacked[kind] = Unpacked(
            before.count + 1,
            before.size_bytes + values * part.shard.dtype.itemsize,
            before.stored_bytes + int(values * stored),
        )

    def tell(self) -> None:
        """Says in one line for each kind of weights what was unpacked or changed, and what it costs."""
        for kind, some in self.unpacked.items():
            logger.warning(
                "%s: %s in %s unpacked, which takes %s in place of %s of memory",
                self.source, _weights(some.count), kind, _megabytes(some.size_bytes),
                _megabytes(some.stored_bytes),
            )  # fmt: skip
        for kind, rounded in self.changed.items():
            logger.warning(
                "%s: no weight format holds the numbers of %s in %s; they are rounded to %s, with a "
                "relative error of at most %.1e (root mean square); dtype float32 gives the exact ones",
                self.source, _weights(rounded.count), kind, rounded.format, rounded.error,
            )  # fmt: skip


_UNPACKED = frozenset({"F32", "F16", "BF16"})
"""gguf's names of types that are not quantised."""


def stored_bits(source: Source) -> float:
    """Returns the bits of each value in a file of a quantised tensor; 0: it is not quantised."""
    return float(getattr(source, "stored_bits", 0))


def _kind(source: Source) -> str:
    """Returns the name of how a tensor is quantised in its file."""
    return str(getattr(source, "kind", ""))


def _weights(count: int) -> str:
    return f"{count} weight{'s' * (count != 1)}"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
