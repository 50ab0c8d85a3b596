"""The format of a GGUF file's weights has llama.cpp's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from acclimate.llm.gguf.convert import weights_format
from acclimate.llm.gguf.header import TensorEntry

Q = gguf.GGMLQuantizationType
SAID = gguf.LlamaFileType


def header(said: int | None, *kinds: int) -> Any:
    tensors = tuple(TensorEntry(f"t{number}", (256, 4), kind, 0) for number, kind in enumerate(kinds))
    return SimpleNamespace(tensors=tensors, value={"general.file_type": said}.get)


@pytest.mark.parametrize(
    ("said", "kinds", "name"),
    [
        (SAID.MOSTLY_Q4_K_M, (Q.Q4_K, Q.Q6_K, Q.F32), "Q4_K_M"),
        (SAID.MOSTLY_Q8_0, (Q.Q8_0, Q.F32), "Q8_0"),
        (SAID.ALL_F32, (Q.F32,), "F32"),
        (SAID.MOSTLY_BF16, (Q.BF16, Q.F32), "BF16"),
        (None, (Q.Q5_K, Q.Q5_K, Q.Q6_K), "Q5_K"),
        (9999, (Q.Q5_0,), "Q5_0"),
        (SAID.MOSTLY_Q4_K_M, (Q.Q8_0,), "Q8_0"),  # not what the tensors are
        (None, (), ""),
    ],
)
def test_it_is_what_the_file_says_if_its_tensors_bear_it_out(
    said: int | None, kinds: tuple[int, ...], name: str
) -> None:
    assert weights_format(header(said, *kinds)) == name
