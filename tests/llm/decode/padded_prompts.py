"""Prompts with padding that other tests use too."""

from __future__ import annotations

import torch


def padded_batch() -> dict[str, torch.Tensor]:
    """Three prompts, of which two are padded on the left."""
    ids = torch.arange(3, 12).repeat(3, 1) + torch.tensor([[0], [40], [80]])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}
