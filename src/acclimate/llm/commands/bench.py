"""``acclimate bench``: measures a model's speed, and compares it with this machine's memory bandwidth."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate.errors import GenerationOptionError, excerpt
from acclimate.llm.commands.request import (
    MOST_RANKS,
    add_loading_options,
    add_model_argument,
    count,
    import_transformers,
    messages,
    model_options,
    rank_arguments,
)
from acclimate.llm.loading.packer import check_cache_dtype, check_format

if TYPE_CHECKING:
    from acclimate.llm.loading.loaded_model import LoadedModel

_MOST_TOKENS = 1 << 20
_MOST_SEQUENCES = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate bench``."""
    add_model_argument(parser, required=False)
    add_loading_options(parser)
    parser.add_argument("--num_accelerators", metavar="N", default="1", help="number of processes")
    parser.add_argument("--prompt_tokens", metavar="N", default="512", help="prompt tokens of all sequences")
    parser.add_argument("--new_tokens", metavar="N", default="32", help="tokens to generate per sequence")
    parser.add_argument("--sequences", metavar="N", default="8", help="batch size of the second measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to a file")
    parser.add_argument("--as_rank", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    ranks = count("num_accelerators", args.num_accelerators, MOST_RANKS)
    prompt_tokens = count("prompt_tokens", args.prompt_tokens, _MOST_TOKENS)
    new_tokens = count("new_tokens", args.new_tokens, _MOST_TOKENS)
    sequences = count("sequences", args.sequences, _MOST_SEQUENCES)
    check_format(args.quantize)
    check_cache_dtype(args.kv_cache_dtype)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise GenerationOptionError(
            f"--json cannot write to '{excerpt(str(args.json))}': there is no such folder"
        )
    measure = partial(_measure_and_show, args, sequences, prompt_tokens, new_tokens)
    if args.as_rank:
        from acclimate.llm.commands.on_ranks import run_as_rank

        return run_as_rank("bench", measure, _say_interrupted)
    if ranks > 1:
        from acclimate.llm.commands.on_ranks import start_ranks

        return start_ranks("bench", rank_arguments(args, "model", "--as_rank"), ranks)
    import_transformers()
    from acclimate.llm.kernels.torch_threads import limit_torch_threads

    limit_torch_threads()
    measure(rank=0)
    return 0


def _say_interrupted(interruption: BaseException) -> None:
    sys.stderr.write("acclimate bench: interrupted\n")


def _measure_and_show(
    args: argparse.Namespace, sequences: int, prompt_tokens: int, new_tokens: int, rank: int
) -> None:
    loaded = _load(args, prompt_tokens + new_tokens + 1, rank)
    report = _measure(loaded, args.quantize, sequences, prompt_tokens, new_tokens)
    if rank == 0:
        _show(report)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _load(args: argparse.Namespace, tokens: int, rank: int) -> LoadedModel:
    """Loads the model; raises :class:`GenerationOptionError` if its context has room for fewer tokens."""
    from acclimate.llm.loading.load import load_split_model

    with messages(logging.INFO if rank == 0 else logging.ERROR):
        loaded = load_split_model(**model_options(args))
        context = loaded.context_length
        with loaded.ranks.all_or_none():
            if context is not None and context < tokens:
                raise GenerationOptionError(
                    f"the model's context of {context} tokens is too short for {args.prompt_tokens} prompt "
                    f"tokens and {args.new_tokens} new tokens; choose fewer with --prompt_tokens and "
                    "--new_tokens"
                )
    return loaded


def _measure(
    loaded: LoadedModel, quantize: str | None, sequences: int, prompt_tokens: int, new_tokens: int
) -> dict[str, Any]:
    """Returns the figures of all ranks."""
    import torch

    from acclimate.llm.commands.benchmark import ReadBandwidth, describe_weights, measure_speed
    from acclimate.llm.decode.loop import step_kind

    ranks = loaded.ranks
    weights = describe_weights(loaded.module)
    before = loaded.accelerator.max_memory_allocated()
    bandwidth = ReadBandwidth(loaded)
    # Several sequences share the prompt's tokens: reading whole prompts would take most of the time.
    one = measure_speed(loaded, 1, prompt_tokens, new_tokens, between=bandwidth.measure)
    several = measure_speed(loaded, sequences, max(prompt_tokens // sequences, 1), new_tokens)
    # The memory that the bandwidth is measured on was there all the time, and is not the model's.
    peak = max(ranks.exchange(max(before, loaded.accelerator.max_memory_allocated() - bandwidth.nbytes)))
    read_bytes_per_second = sum(ranks.exchange(bandwidth.bytes_per_second))
    read = sum(ranks.exchange(weights.bytes_per_token))
    return {
        "model": loaded.name,
        "accelerator": loaded.accelerator.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weights": loaded.weights,
        "quantize": quantize,
        "kv_cache_dtype": loaded.module.kv_cache_dtype,
        "ranks": ranks.size,
        "threads_per_rank": torch.get_num_threads(),
        "parameters": loaded.parameters,
        "load_seconds": loaded.load_seconds,
        "compile_seconds": loaded.compile_seconds,
        "peak_memory_bytes": peak,
        "speeds": [
            asdict(speed) | {"prefill_tokens_per_second": speed.prefill_tokens_per_second}
            for speed in (one, several)
        ],
        "bytes_per_token": read,
        "read_bytes_per_second": read_bytes_per_second,
        "share_of_limit": one.decode_tokens_per_second * read / read_bytes_per_second,
        "step": step_kind(loaded.module),
        "kernels": weights.kernels,
        "bytes_by_kernel": weights.bytes_by_kernel,
        "stayed_dense": weights.stayed,
    }


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    dtype = report["dtype"]
    weights = dtype if report["weights"] == dtype else f"{report['weights']} in {dtype}"
    several = f", {report['ranks']} ranks" if report["ranks"] > 1 else ""
    console.print(
        f"[bold]{report['model']}[/]: {report['parameters'] / 1e6:,.1f} M parameters, "
        f"{weights}, {report['accelerator']}{several}, "
        f"{report['threads_per_rank']} thread{'s' if report['threads_per_rank'] > 1 else ''}"
    )
    console.print(_speeds(report))
    limit = report["read_bytes_per_second"] / report["bytes_per_token"]
    console.print(
        f"A token reads {report['bytes_per_token'] / 1e6:,.0f} MB of weights. The memory bandwidth is "
        f"{report['read_bytes_per_second'] / 1e9:.1f} GB/s, so the limit of one sequence is {limit:,.1f} "
        f"tokens/s; the model reached {report['share_of_limit']:.0%} of it."
    )
    step = {
        "native": "one call of native code",
        "plain": "plain torch, without the model's modules",
        "transformers": "the model's own modules, in transformers' loop",
    }[report["step"]]
    console.print(f"Each token is computed by {step}.")
    console.print(
        (f"Compiled in {report['compile_seconds']:.1f} s; l" if report["compile_seconds"] else "L")
        + f"oaded in {report['load_seconds']:.1f} s; peak memory {report['peak_memory_bytes'] / 1e9:.2f} GB"
        + (" per rank." if report["ranks"] > 1 else ".")
    )
    console.print(_kernels(report))
    stayed = report["stayed_dense"]
    for name, reason in list(stayed.items())[:8]:
        console.print(f"{name} stays dense: {reason}", soft_wrap=False)
    if len(stayed) > 8:
        console.print(f"and {len(stayed) - 8} more stay dense")


def _speeds(report: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table("sequences", "prompt", "first token", "prefill", "decode", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for speed in report["speeds"]:
        table.add_row(
            str(speed["batch"]),
            f"{speed['prompt_tokens']} tokens",
            f"{speed['first_token_seconds']:.3f} s",
            f"{speed['prefill_tokens_per_second']:,.0f} tokens/s",
            f"{speed['decode_tokens_per_second']:,.1f} tokens/s",
        )
    return table


def _kernels(report: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table("weights", "matrices", "MB", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, matrices in report["kernels"].items():
        table.add_row(name, str(matrices), f"{report['bytes_by_kernel'][name] / 1e6:,.1f}")
    return table
