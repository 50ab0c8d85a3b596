"""``acclimate plan``: shows how a model would be split over ranks; reads only its configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from acclimate.llm.commands.request import (
    MOST_RANKS,
    add_dtype_option,
    add_model_argument,
    add_remote_code_option,
    count,
)

if TYPE_CHECKING:
    import torch

    from acclimate.llm.split import Plan, Split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate plan``."""
    add_model_argument(parser, required=True)
    parser.add_argument(
        "--num_accelerators", "--tp", dest="tp", metavar="N", default="2", help="the number of ranks"
    )
    add_dtype_option(parser)
    parser.add_argument("--json", action="store_true", help="print every parameter as JSON")
    add_remote_code_option(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    size = count("num_accelerators", args.tp, MOST_RANKS)
    from acclimate.llm.loading.loaded_model import require_transformers

    require_transformers()  # before any other import of it
    from acclimate.llm.loading.deferred_model import empty_model
    from acclimate.llm.quiet import quiet_transformers
    from acclimate.llm.split import make_plan

    with quiet_transformers():
        model, name = empty_model(args.model, args.dtype, trust_remote_code=args.trust_remote_code)
        plan = make_plan(model, size)
    report = describe(model, plan, name)
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _show(report)
    return 0


# -- the report --------------------------------------------------------------------------------------


def describe(model: torch.nn.Module, plan: Plan, name: str) -> dict[str, Any]:
    """Returns a plan as plain values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    in_order = [plan.splits[name] for name in tensors if name in plan.splits and name not in plan.shared]
    parameters: list[dict[str, Any]] = [
        {
            "name": split.name,
            "shape": list(split.shape),
            "kind": split.kind,
            "dim": split.dim,
            "source": plan.source.get(split.name.rpartition(".")[0]),
            "ranges": [[list(span) for span in part] for part in split.parts],
            "bytes": [_shard_bytes(split, rank, tensors) for rank in range(plan.size)],
        }
        for split in in_order
    ]
    return {
        "model": name,
        "class": type(model).__name__,
        "ranks": plan.size,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "bytes": sum(prod(split.shape) * tensors[split.name].dtype.itemsize for split in in_order),
        "bytes_per_rank": [
            sum(parameter["bytes"][rank] for parameter in parameters) for rank in range(plan.size)
        ],
        "parameters": parameters,
        "tied": dict(plan.shared),
        "kept_whole": dict(plan.whole),
    }


def _shard_bytes(split: Split, rank: int, tensors: Mapping[str, torch.Tensor]) -> int:
    return prod(split.shard_shape(rank)) * tensors[split.name].dtype.itemsize


@dataclass
class _Node:
    """A module of the tree."""

    children: dict[str, _Node] = field(default_factory=lambda: defaultdict(_Node))
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def signature(self) -> Any:
        """Equal for modules that are split alike."""
        own = tuple((name, str({**parameter, "name": ""})) for name, parameter in self.parameters.items())
        return own, tuple((name, child.signature()) for name, child in self.children.items())

    def bytes_of(self, rank: int) -> int:
        own: int = sum(parameter["bytes"][rank] for parameter in self.parameters.values())
        return own + sum(child.bytes_of(rank) for child in self.children.values())


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.tree import Tree

    root = _Node()
    for parameter in report["parameters"]:
        node = root
        *path, leaf = parameter["name"].split(".")
        for part in path:
            node = node.children[part]
        node.parameters[leaf] = parameter
    ranks = range(report["ranks"])
    title = (
        f"[bold]{escape(report['model'])}[/] ({report['class']}, {report['dtype']}, "
        f"{_size(report['bytes'])}) on {len(ranks)} rank{'s'[: len(ranks) != 1]}"
    )
    tree = Tree(title)
    _grow(tree, root, ranks)
    console = Console(highlight=False)
    console.print(tree)
    for name, first in report["tied"].items():
        console.print(f"tied: {escape(name)} is {escape(first)}")
    for name, reason in report["kept_whole"].items():
        console.print(f"whole: {escape(name)}: {escape(reason)}")
    for rank in ranks:
        share = report["bytes_per_rank"][rank] / max(report["bytes"], 1)
        console.print(f"rank {rank}: {_size(report['bytes_per_rank'][rank])}, {share:.0%} of the model")


def _grow(tree: Any, node: _Node, ranks: Sequence[int]) -> None:
    from rich.markup import escape

    for name, parameter in node.parameters.items():
        shape = " x ".join(map(str, parameter["shape"])) or "1"
        tree.add(f"{escape(name)}  {shape}  {_split_text(parameter)}")
    names = list(node.children)
    while names:
        alike = _alike(node, names)
        child = node.children[names[0]]
        del names[: len(alike)]
        label = alike[0] if len(alike) == 1 else f"{alike[0]} … {alike[-1]}, {len(alike)} alike"
        sizes = {_size(child.bytes_of(rank)) for rank in ranks}
        per = "per rank and layer" if len(alike) > 1 else "per rank"
        branch = tree.add(f"[bold]{escape(label)}[/]  [dim]{' or '.join(sorted(sizes))} {per}[/]")
        _grow(branch, child, ranks)


def _alike(node: _Node, names: Sequence[str]) -> list[str]:
    """Returns the longest prefix of numbered modules that are split alike."""
    first = node.children[names[0]].signature()
    alike = [names[0]]
    for name in names[1:]:
        if not (name.isdigit() and alike[-1].isdigit() and node.children[name].signature() == first):
            break
        alike.append(name)
    return alike


def _split_text(parameter: Mapping[str, Any]) -> str:
    if parameter["kind"] == "replicated":
        return "[dim]on every rank[/]"
    lengths = [sum(stop - start for start, stop in part) for part in parameter["ranges"]]
    shares = str(lengths[0]) if len(set(lengths)) == 1 else ", ".join(map(str, lengths))
    whole = parameter["shape"][parameter["dim"]]
    text = f"[green]{parameter['kind']}[/]  {shares} of {whole}" + (" each" if len(set(lengths)) == 1 else "")
    return text + ("" if sum(lengths) == whole else "  [yellow]shared by ranks[/]")


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} bytes"
