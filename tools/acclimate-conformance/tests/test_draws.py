"""The checks of random numbers draw from every operator that torch marks as a draw."""

from __future__ import annotations

import pytest
import torch

from acclimate_conformance.checks.assertions import BrokenPromiseError
from acclimate_conformance.checks.random.distributions import _CONTINUOUS, _COUNT, _require_distribution
from acclimate_conformance.checks.random.states import kinds_of_draws

_NO_KINDS_OF_THEIR_OWN = {
    # What a device calls inside of a kind that is drawn, and layers that draw with dropout.
    "_fused_dropout", "gru", "lstm", "rnn_relu", "rnn_tanh", "_cudnn_rnn", "miopen_rnn", "rrelu_with_noise",
    "_cudnn_init_dropout_state", "_lstm_mps",
    # Called "gamma" and "dirichlet" there.
    "_standard_gamma", "_sample_dirichlet",
    # They draw nothing themselves, whatever their tag says.
    "_fused_sdp_choice", "_nested_tensor_softmax_with_shape",
    # Dropout inside one kernel for attention.
    "scaled_dot_product_attention", "_fill_mem_eff_dropout_mask",
}  # fmt: skip


def _draws_of_torch() -> set[str]:
    found = set()
    for name in torch._C._dispatch_get_all_op_names():  # dir(torch.ops.aten) has only those that were used
        space, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if space != "aten":
            continue
        function = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if function is not None and torch.Tag.nondeterministic_seeded in function.tags:
            found.add(packet)
    return found


def _is_attention(operator: str) -> bool:
    return operator.startswith("_") and "attention" in operator


def _kind(operator: str) -> str:
    """The operator without what only says where the result is written."""
    return operator.removesuffix("_functional").removesuffix("_")


def test_every_operator_that_torch_marks_as_a_draw_is_drawn_from_or_named_as_a_variant() -> None:
    drawn = {_kind(name) for name in kinds_of_draws("cpu")}
    marked = {_kind(name) for name in _draws_of_torch() if not _is_attention(name)}
    assert len(marked) > 20
    assert marked - drawn <= _NO_KINDS_OF_THEIR_OWN


def _drawn_with_one_infinite(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    draw, share = _CONTINUOUS[name]
    drawn = draw(torch.zeros(_COUNT, dtype=dtype)).double()
    drawn[5] = float("inf")
    _require_distribution(name, drawn, share, torch.finfo(dtype))


def test_a_number_too_large_for_a_dtype_may_be_drawn_only_from_a_distribution_that_has_such() -> None:
    _drawn_with_one_infinite("cauchy_(1, 2)", torch.float16)
    with pytest.raises(BrokenPromiseError, match="not finite"):
        _drawn_with_one_infinite("cauchy_(1, 2)", torch.float32)
    with pytest.raises(BrokenPromiseError, match="not finite"):
        _drawn_with_one_infinite("exponential_(4)", torch.float16)
