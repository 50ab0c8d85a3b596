"""Loads a model in float32 if its values do not fit into float16, which nobody asked for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from acclimate.errors import LogitsError
from acclimate.llm.quiet import quiet_transformers
from acclimate.llm.ranks import ModelRanks, is_lost_rank

if TYPE_CHECKING:
    import torch

    from acclimate.accelerator import Accelerator

logger = logging.getLogger("acclimate.llm")

_TOKENS = 11

_T = TypeVar("_T")


def load_in_finite_dtype(
    load: Callable[[torch.dtype], _T],
    dtype: torch.dtype,
    accelerator: Accelerator,
    ranks: ModelRanks,
    *,
    is_asked_for: bool,
) -> _T:
    """Returns what ``load`` returns: for a dtype, or for float32 if logits are not finite in float16.

    float16 is chosen for an accelerator without bfloat16. Most models are made in bfloat16 or float32, which
    have a larger range: their values may be infinite in float16. A dtype that the user asked for is kept.
    """
    import torch

    made: Any = load(dtype)
    if is_asked_for or dtype != torch.float16 or torch.float32 not in accelerator.supported_dtypes():
        return made  # type: ignore[no-any-return]
    if all(ranks.exchange(_has_finite_logits(made.module))):
        return made  # type: ignore[no-any-return]
    if ranks.is_first:
        logger.warning(
            "%s does not compute in bfloat16, and the model's logits are not finite in float16, so the model "
            "runs in float32; dtype float32 chooses this at once",
            accelerator.name,
        )
    del made  # two models may not fit into the memory
    gc.collect()
    accelerator.empty_cache()
    return load(torch.float32)


def _has_finite_logits(model: Any) -> bool:
    """Whether a model's logits after a few tokens are finite; true if it does not run on tokens alone."""
    import torch

    from acclimate.llm.decode.finite_logits import check_logits

    try:
        table = model.get_input_embeddings().weight
        first = model.config.get_text_config().bos_token_id
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, len(table), (1, _TOKENS), generator=random)
        if isinstance(first, int) and 0 <= first < len(table):
            tokens[0, 0] = first  # the largest values are often this token's
        given = {"input_ids": tokens.to(table.device)}
        if model.config.is_encoder_decoder:
            given["decoder_input_ids"] = given["input_ids"]
        with torch.inference_mode(), quiet_transformers():
            check_logits(model(**given, use_cache=False).logits[0].amax(-1), model.dtype)
    except LogitsError:
        return False
    except Exception as error:  # of any type; generate reports what is wrong with the model
        if is_lost_rank(error):
            raise
        logger.debug("the model's logits in float16 are not known: %s", error)
    return True
