"""Loads a whole model, and decides for every way of loading which weights may be missing or superfluous."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import CorruptModelError, some_of
from acclimate.llm.files.folder import weight_totals
from acclimate.llm.files.model_limits import bounded_model
from acclimate.llm.quiet import explained_failures, quiet_transformers

if TYPE_CHECKING:
    import torch

# Buffers that earlier releases of transformers stored with the weights. Models compute them now. Each model's
# own list, `_keys_to_ignore_on_load_unexpected`, has only some of them.
_LEFTOVERS = re.compile(
    r"(?:^|\.)(?:"
    r"(?:attn|attention|self_attn|self_attention|crossattention)\.(?:bias|masked_bias)"  # the causal mask
    r"|rotary_emb\.(?:\w+\.)?(?:inv_freq|cos_cached|sin_cached|scale)"
    r"|rotary_pos_emb\.inv_freq"
    r"|position_ids|token_type_ids"
    r")$"
)


def check_report(folder: Path, report: Mapping[str, Any], ignore_extra: Iterable[str] = ()) -> None:
    """Checks what transformers reports after it has given a model the tensors of its files.

    transformers only warns: it fills parameters without weights with random numbers, and drops tensors that
    the model has no place for. ``report`` is what ``from_pretrained`` returns with ``output_loading_info``.

    Raises:
        CorruptModelError: a tensor is missing, superfluous or misshapen, or several do not fit together.
    """
    errors = report.get("conversion_errors") or {}
    if errors:
        name, text = next(iter(errors.items()))
        raise CorruptModelError(
            f"{folder} has tensors for {name} that do not fit together: {text.strip().splitlines()[-1]}"
        )
    if report["missing_keys"]:
        raise CorruptModelError(
            f"{folder} lacks weights its config asks for: {some_of(report['missing_keys'])}"
        )
    if report["mismatched_keys"]:
        name, found, wanted = sorted(report["mismatched_keys"], key=str)[0]
        more = len(report["mismatched_keys"]) - 1
        raise CorruptModelError(
            f"{folder} has weights of another shape than its config asks for: {name} is {list(found)}, not "
            f"{list(wanted)}" + (f", and {more} more" if more else "")
        )
    patterns = tuple(ignore_extra)
    extra = [
        name
        for name in map(str, report["unexpected_keys"])
        if not _LEFTOVERS.search(name) and not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    if extra:
        first = sorted(extra)[0]
        raise CorruptModelError(
            f"{folder} has weights that its config leaves out: {some_of(extra)}. If they are not needed, "
            f'pass --ignore_extra "{first}", or ignore_extra=["{first}"], in which * matches any text'
        )


def read_whole(folder: Path, dtype: torch.dtype, trust_remote_code: bool, ignore_extra: Iterable[str]) -> Any:
    """Returns a folder's whole model, as transformers loads it.

    Raises:
        CorruptModelError: a file is damaged, or its tensors are not those that the model needs.
        UnsupportedModelError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    totals = weight_totals(folder)
    with quiet_transformers(), explained_failures("load", f"the model in {folder}"):
        try:
            with bounded_model(totals):
                module, report = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # check_report names them
                    trust_remote_code=trust_remote_code,
                )
        except (pickle.UnpicklingError, EOFError) as error:  # torch's message advises weights_only=False
            raise CorruptModelError(
                f"the .bin files in {folder} are damaged, or hold something other than tensors"
            ) from error
    check_report(folder, report, ignore_extra)
    return module
