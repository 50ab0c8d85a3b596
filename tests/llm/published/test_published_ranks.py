"""Ranks that share a published model hold their parts of its numbers, in the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_ranks import IDS, check_parts_of_experts
from published_files import AWQ_4, FILES, GPTQ_4, awq, gptq, save_gpt_oss, save_published

import acclimate
from acclimate.llm.files.checkpoint import HostTensor
from acclimate.llm.files.deferred_tensors import deferred
from acclimate.llm.published.packing import pack_part, quantised_parts
from acclimate.llm.published.tensors import published_tensors
from rank_processes import RankProcesses


def generated(rank: int, folder: str) -> tuple[list[int], dict[str, int], tuple[int, int]]:
    model = acclimate.init_inference(folder)
    tokens = model.generate(IDS, max_new_tokens=12, do_sample=False)[0].tolist()
    down: Any = model.model.layers[0].mlp.down_proj
    return tokens, dict(model.packing.packed), down.packed.shape


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "gptq, asymmetric", "awq", "packed", "int8 of rows"])
def test_two_ranks_write_the_tokens_of_the_published_values(
    kind: str, two: RankProcesses, tmp_path: Path
) -> None:
    quantise, settings, formats = FILES[kind]
    whole = save_published(tmp_path, quantise, settings)
    expected = whole.generate(IDS, max_new_tokens=12, do_sample=False)[0].tolist()
    for tokens, packed, shape in two.values(generated, str(tmp_path)):
        assert tokens == expected
        assert packed.keys() == formats
        assert shape == (128, 128)


@pytest.mark.slow
def test_two_ranks_hold_parts_of_each_expert_in_mxfp4(two: RankProcesses, tmp_path: Path) -> None:
    check_parts_of_experts(two, tmp_path, save_gpt_oss(tmp_path))


@pytest.mark.parametrize(
    ("quantise", "settings"), [(gptq(is_symmetric=False), GPTQ_4), (awq(), AWQ_4)], ids=["gptq", "awq"]
)
def test_a_part_of_a_matrix_has_the_values_of_the_whole_one(quantise: Any, settings: Any) -> None:
    parts, values = quantise(96, 256, torch.Generator().manual_seed(1))
    found = published_tensors(settings, {f"m.{name}": HostTensor(name, part) for name, part in parts.items()})
    whole = deferred(found["m.weight"])
    cases = {
        "rows": (whole[8:40], values[8:40]),
        "columns": (whole[:, 32:160], values[:, 32:160]),
        "rows of columns": (whole[16:48, 64:128], values[16:48, 64:128]),
        "rows beside others": (
            torch.cat([whole[64:96], whole[0:24]]), torch.cat([values[64:96], values[:24]])
        ),
        "columns beside others": (
            torch.cat([whole[:, 128:], whole[:, :32]], 1), torch.cat([values[:, 128:], values[:, :32]], 1)
        ),
        "rows of joined rows": (torch.cat([whole, whole])[80:112], torch.cat([values, values])[80:112]),
    }  # fmt: skip
    for name, (tensor, expected) in cases.items():
        (part,) = quantised_parts(tensor) or (None,)
        assert part is not None, name
        made = pack_part(part, "m.weight", "here")
        assert made.weight.format == "uint4", name
        assert torch.equal(made.weight.dequantize(), expected), name


def test_each_matrix_of_a_stack_is_found_through_parts_of_all_three_dimensions() -> None:
    parts, values = gptq(is_symmetric=False)(32, 256, torch.Generator().manual_seed(1))
    named = {f"{module}.{name}": HostTensor(name, part) for name, part in parts.items() for module in "ab"}
    found = published_tensors(GPTQ_4, named)
    a, b = deferred(found["a.weight"]), deferred(found["b.weight"])
    first, second = torch.stack([a, b]), torch.stack([b, a])
    whole = torch.cat([torch.cat([first, second], 1)[:, 16:48, :128], second[:, :, 128:]], 0)[1:3]
    expected = [torch.cat([values[16:], values[:16]])[:, :128], values[:, 128:]]
    matrices = quantised_parts(whole)
    assert matrices is not None
    assert len(matrices) == len(expected)
    for part, values_of_it in zip(matrices, expected, strict=True):
        assert torch.equal(pack_part(part, "m.weight", "here").weight.dequantize(), values_of_it)


def test_columns_that_cut_a_block_are_rounded_and_not_wrong() -> None:
    parts, values = gptq(is_symmetric=False)(32, 256, torch.Generator().manual_seed(1))
    found = published_tensors(GPTQ_4, {f"m.{name}": HostTensor(name, part) for name, part in parts.items()})
    (part,) = quantised_parts(deferred(found["m.weight"])[:, 8:200]) or (None,)
    assert part is not None
    made = pack_part(part, "m.weight", "here")
    assert made.weight.format == "uint8"
    error = (made.weight.dequantize() - values[:, 8:200]).norm() / values[:, 8:200].norm()
    assert 0 < float(error) < 0.01
    assert made.error == pytest.approx(float(error), rel=1e-3)
