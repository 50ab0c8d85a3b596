"""The operators of a decoder's native step, which only native code implements.

:mod:`acclimate.llm.decode.native` writes the numbers that ``csrc/decode_program.h`` reads.
"""

from __future__ import annotations

from acclimate.ops import registry

_SCHEMAS = (
    "decode_start(Tensor program) -> int",
    "decode_step(int number, Tensor cache, Tensor tokens, Tensor starts, int place, Tensor(a!) logits, "
    "Tensor(b!) best, Tensor(c!) largest, int threads) -> bool",
    "decode_can_prefill(int number) -> bool",
    "decode_end(int number) -> ()",
)


def define() -> None:
    """Defines the operators, once per process."""
    registry.define(_SCHEMAS)
