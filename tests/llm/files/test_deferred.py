"""A deferred tensor has the values that the same operators give at once, and reads no more than is needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from acclimate.errors import CorruptModelError
from acclimate.llm.files.checkpoint import WeightFile
from acclimate.llm.files.deferred_tensors import DeferredTensor, deferred, read, whole_region

SHAPES = {"a": (6, 8), "b": (6, 8), "c": (4, 6, 10), "v": (12,)}
Tensors = dict[str, torch.Tensor]

OPERATORS: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "cat rows": lambda t: torch.cat([t["a"], t["b"]]),
    "cat columns": lambda t: torch.cat([t["a"], t["b"]], dim=-1),
    "cat of two dtypes": lambda t: torch.cat([t["a"], t["b"].to(torch.float64)], 1),
    "stack": lambda t: torch.stack([t["a"], t["b"]]),
    "stack inside": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "chunk": lambda t: torch.chunk(t["a"], 3, dim=0)[1],
    "split by sizes": lambda t: torch.split(t["a"], [1, 5, 2], dim=-1)[1],
    "narrow": lambda t: t["c"].narrow(-1, 3, 5),
    "steps": lambda t: t["c"][:, ::2, 1::3],
    "select": lambda t: t["c"][:, -2],
    "unbind": lambda t: t["c"].unbind(1)[4],
    "transpose": lambda t: t["c"].transpose(0, -1),
    "permute": lambda t: t["c"].permute(2, 0, 1),
    "t": lambda t: t["a"].t().contiguous(),
    "squeeze": lambda t: t["a"].unsqueeze(1).squeeze(1),
    "view joins dimensions": lambda t: t["c"].view(24, 10),
    "view splits a dimension": lambda t: t["a"].view(2, 3, 8),
    "view across dimensions": lambda t: t["c"].reshape(8, 30),
    "interleave": lambda t: t["a"].reshape(3, 2, 8).transpose(0, 1).reshape(6, 8),
    "experts": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "to another dtype": lambda t: t["c"].to(torch.bfloat16),
    "an unknown operator": lambda t: torch.flip(t["a"] * 2, [0]),
    "a vector": lambda t: t["v"].view(3, 4)[1:],
}


@pytest.fixture
def whole(tmp_path: Path) -> Tensors:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


@pytest.fixture
def file(whole: Tensors, tmp_path: Path) -> WeightFile:
    return WeightFile(tmp_path / "model.safetensors")


def deferred_tensors(file: WeightFile) -> Tensors:
    return {name: deferred(tensor) for name, tensor in file.tensors.items()}


def bounds(size: int) -> list[tuple[int, int]]:
    return [(0, size), (size // 2, size), (size // 3, max(size // 3 + 1, 2 * size // 3))]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_region_has_the_values_of_the_same_operators_at_once(
    name: str, whole: Tensors, file: WeightFile
) -> None:
    expected = OPERATORS[name](whole)
    made = OPERATORS[name](deferred_tensors(file))
    assert isinstance(made, DeferredTensor)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    for region in product(*map(bounds, expected.shape)):
        wanted = expected[tuple(slice(*bounds_of_axis) for bounds_of_axis in region)]
        assert torch.equal(read(made, region), wanted), region


def test_a_change_in_place_is_refused(file: WeightFile) -> None:
    with pytest.raises(NotImplementedError, match="deferred tensor in place"):
        deferred_tensors(file)["a"].add_(1)


def test_equal_tensors_are_compared_by_their_values(file: WeightFile) -> None:
    tensors = deferred_tensors(file)
    assert torch.equal(torch.cat([tensors["a"], tensors["b"]])[:6], tensors["a"])
    assert not torch.equal(tensors["a"], tensors["b"])


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_reads_no_more_than_its_rows(dim: int, tmp_path: Path) -> None:
    save_file({"large": torch.zeros(4096, 1 << 10)}, tmp_path / "model.safetensors")  # 16 MB
    tensor = deferred(WeightFile(tmp_path / "model.safetensors").tensors["large"])
    before = read_bytes()
    read(tensor, ((0, 1024), (0, 1024)) if dim == 0 else ((0, 1024), (0, 256)))
    assert read_bytes() - before < 5 << 20


def test_a_file_that_is_cut_off_while_it_is_read_names_the_tensor(file: WeightFile) -> None:
    os.truncate(file.path, file.size_bytes - 8)
    with pytest.raises(CorruptModelError, match=r"the tensor v .* cut off while it was read"):
        read(deferred(file.tensors["v"]))


@pytest.mark.parametrize("how", ["replaced", "written"])
def test_a_file_that_changes_while_it_is_read_is_noticed(how: str, file: WeightFile) -> None:
    file.check_unchanged()
    content = file.path.read_bytes()
    if how == "replaced":
        file.path.unlink()
    file.path.write_bytes(content)
    with pytest.raises(CorruptModelError, match="replaced or changed while it was read"):
        file.check_unchanged()


def test_a_header_that_does_not_fit_the_file_names_the_tensor(file: WeightFile) -> None:
    os.truncate(file.path, file.size_bytes - 8)
    with pytest.raises(CorruptModelError, match=r"the tensor v .* is cut off"):
        WeightFile(file.path)


def test_whole_regions_cover_all_elements(file: WeightFile) -> None:
    assert whole_region(deferred_tensors(file)["c"]) == ((0, 4), (0, 6), (0, 10))
