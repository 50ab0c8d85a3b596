"""One rank of a peer in :mod:`autotp`: splits tiny models and compares each with the whole one.

Run by the Python of the peer: ``autotp_peer.py RANK SIZE STORE PEER``; reads and writes lines as
``tests/llm/split/rank_process.py`` does, and uses nothing of acclimate.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "llm" / "split"))

import torch
import torch.distributed as dist
from architectures import tiny_model

PROMPT, NEW_TOKENS = 9, 12


def split_by_deepspeed(model: Any, size: int) -> Any:
    """Splits with DeepSpeed's AutoTP, which takes a model that is whole."""
    import deepspeed

    engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": size}, dtype=torch.float32)
    return engine.module


def split_by_transformers(model: Any, size: int) -> Any:
    """Splits with the plan that transformers publishes, which it does only while it loads."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        model.save_pretrained(folders[0])  # which only rank 0 does
        dist.barrier()
        split = type(model).from_pretrained(folders[0], dtype=torch.float32, tp_plan="auto").eval()
        dist.barrier()
        return split


WAYS = {"deepspeed": split_by_deepspeed, "transformers": split_by_transformers}


def whole(tensor: Any) -> torch.Tensor:
    """Returns a tensor that may be distributed as a plain one."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def own_parameters(model: Any) -> int:
    """Counts this rank's parameters besides embeddings and the output head."""
    head = model.get_output_embeddings()
    ends = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    ends += [head] if head is not None else []
    # DeepSpeed's modules keep their weights under another class, so names count too.
    names = ("embed", "wte", "wpe", "lm_head", "output_head")
    left_out = {id(p) for end in ends for p in end.parameters()}
    count = 0
    for name, p in model.named_parameters():
        if id(p) not in left_out and not any(layer_name in name for layer_name in names):
            count += (p.to_local() if hasattr(p, "to_local") else p).numel()
    return count


def row(name: str, size: int, peer: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What one architecture gives on this rank."""
    model: Any = tiny_model(name, **changes)
    tokens = torch.arange(2 * PROMPT).view(2, PROMPT) * 7 % 150 + 3

    def text(one: Any) -> list[int]:
        found: list[int] = one.generate(tokens[:1], max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        return found

    with torch.no_grad():
        logits = model(tokens).logits
        expected, total = text(model), own_parameters(model)
        split = WAYS[peer](copy.deepcopy(model), size)
        error = float((whole(split(tokens).logits) - logits).abs().max())
        same = text(split) == expected
    return {
        "name": name,
        "error": error,
        "same_text": same,
        "share": own_parameters(split) / total,
        "padded": False,
    }


def main() -> None:
    """Answers each line with one row, on rank 0 the worst of all ranks."""
    rank, size, store, peer = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ.setdefault("MASTER_PORT", "29544")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    for line in sys.stdin:
        name, changes = json.loads(line)
        try:
            found = row(name, size, peer, changes)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
            found = {"name": name, "failed": f"{type(error).__name__}: {error}"[:300]}
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, found)
        if rank == 0:
            worst = next((answer for answer in everything if "failed" in answer), None)
            worst = worst or {
                **everything[0],
                "error": max(answer["error"] for answer in everything),
                "same_text": all(answer["same_text"] for answer in everything),
                "share": max(answer["share"] for answer in everything),
            }
            told.write(json.dumps(worst) + "\n")
            told.flush()


if __name__ == "__main__":
    main()
