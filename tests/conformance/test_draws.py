"""The checks of random numbers draw from every operator that torch marks as a draw."""

from __future__ import annotations

import torch

from acclimate.conformance.checks.random.states import kinds_of_draws

_NO_KINDS_OF_THEIR_OWN = {
    # Variants of a kind that is drawn: the operator that is not in place, or what a device calls inside.
    "cauchy", "exponential", "geometric", "log_normal", "uniform", "rrelu_with_noise", "rrelu_with_noise_",
    "rrelu_with_noise_functional", "_fused_dropout", "gru", "lstm", "rnn_relu", "rnn_tanh", "_cudnn_rnn",
    "miopen_rnn",
    # A backward pass, or attention of one vendor.
    "_efficient_attention_forward", "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace", "_standard_gamma",
}  # fmt: skip


def _draws_of_torch() -> set[str]:
    found = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags:
                found.add(name)
    return found


def test_every_operator_that_torch_marks_as_a_draw_is_drawn_from_or_named_as_a_variant() -> None:
    drawn = set(kinds_of_draws("cpu"))
    attention = {name for name in _draws_of_torch() if name.startswith("_scaled_dot_product")}
    assert _draws_of_torch() - attention - drawn <= _NO_KINDS_OF_THEIR_OWN
