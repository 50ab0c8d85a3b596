"""Codes in 32-bit words are packed alike by native code and by plain torch, whatever their order."""

from __future__ import annotations

import pytest
import torch

from acclimate.llm.kernels import builder, layout
from acclimate.llm.kernels.formats import WEIGHT_FORMATS
from acclimate.llm.kernels.words import AWQ, BY_ROW, BY_WORD, from_words

HELD = {"by row": (BY_ROW, (37, 9)), "by word": (BY_WORD, (9, 37)), "awq": (AWQ, (65, 5))}


CASES = [
    (held, kind, bits)
    for held in HELD
    for kind in ("uint4", "uint8", "q4_0")
    for bits in ((4,) if held == "awq" else (2, 4, 8))
    if bits <= WEIGHT_FORMATS[kind].bits
]


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize(("held", "kind", "bits"), CASES)
def test_native_code_packs_words_as_plain_torch_does(held: str, kind: str, skip: int, bits: int) -> None:
    (order, shape), form = HELD[held], WEIGHT_FORMATS[kind]
    builder.load("cpu")
    words = torch.randint(-(2**31), 2**31, shape).to(torch.int32)
    n, k = (37, 65) if order == AWQ else (37, 9 * 32 // bits - skip)
    random = {f.name: torch.randn(n, f.parts(form.padded(k))).mul(9).to(f.dtype) for f in form.fields}
    header = layout.pack_fields(random, form, 3, form.padded(k))
    flip = 128 if bits == 8 else 0
    arguments = (words, header, form.number, n, k, bits, order, skip, flip)
    assert torch.equal(torch.ops.acclimate.packed_from_words(*arguments), from_words(*arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 38}, "do not match"),
        ({"k": 73}, "do not match"),
        ({"k": 2**62}, "cannot be packed"),
        ({"n": -1}, "cannot be packed"),
        ({"skip": 8}, "cannot be packed"),
        ({"skip": -1}, "cannot be packed"),
        ({"bits": 3}, "2, 4 or 8 bits, not 3"),
        ({"order": 3}, "no order 3"),
        ({"number": 99}, "no weight format with the number 99"),
        ({"number": 0}, "no weight format with the number 0"),
        ({"header": torch.zeros(3, 64, dtype=torch.uint8)}, "fields do not match"),
        ({"words": torch.zeros(37, 9)}, "words do not match"),
    ],
)
def test_words_that_do_not_match_are_refused(changes: dict[str, object], message: str) -> None:
    builder.load("cpu")
    form = WEIGHT_FORMATS["uint4"]
    zeros = {f.name: torch.zeros(37, f.parts(96), dtype=f.dtype) for f in form.fields}
    usual = {
        "words": torch.zeros(37, 9, dtype=torch.int32), "header": layout.pack_fields(zeros, form, 3, 96),
        "number": form.number, "n": 37, "k": 72, "bits": 4, "order": BY_ROW, "skip": 0, "flip": 0,
    }  # fmt: skip
    torch.ops.acclimate.packed_from_words(*usual.values())
    with pytest.raises(RuntimeError, match=message):
        torch.ops.acclimate.packed_from_words(*{**usual, **changes}.values())
