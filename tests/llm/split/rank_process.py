"""One rank of a process group that compares split models with whole ones; rank_group.py starts it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from architectures import inputs, meta_model, tiny_model
from splitting import generate, own_parameters

from acclimate.errors import PlanError
from acclimate.llm.split import apply_plan, make_plan


def row(name: str, size: int, changes: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """What one architecture gives on this rank."""
    model = tiny_model(name, **changes)
    try:
        plan = make_plan(meta_model(name, **changes), size)
    except PlanError as error:
        return {"name": name, "refused": str(error)}
    with torch.no_grad():
        logits = model(**inputs(name, 2)).logits
    text = generate(model, name)
    total = own_parameters(model)
    part = apply_plan(model, plan, group)
    with torch.no_grad():
        error = float((part(**inputs(name, 2)).logits - logits).abs().max())
    padded = any(any(change.expands) for change in plan.modules.values())
    return {
        "name": name,
        "error": error,
        "scale": float(logits.abs().max()),
        "same_text": torch.equal(generate(part, name), text),
        "distinct": len(set(text[0, -12:].tolist())),
        "share": own_parameters(part) / total,
        "padded": padded,
    }


def main() -> None:
    """Reads lines ``[name, changes]``; writes one row for each, on rank 0 the worst of all ranks."""
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    group = dist.group.WORLD
    for line in sys.stdin:
        name, changes = json.loads(line)
        try:
            found = row(name, size, changes, group)
        except Exception as error:
            found = {
                "name": name,
                "failed": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, found)
        if rank == 0:
            bad = next((answer for answer in everything if "failed" in answer or "refused" in answer), None)
            if bad is None:
                bad = {
                    **everything[0],
                    "error": max(answer["error"] for answer in everything),
                    "same_text": all(answer["same_text"] for answer in everything),
                    "share": max(answer["share"] for answer in everything),
                }
            sys.stdout.write(json.dumps(bad) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
