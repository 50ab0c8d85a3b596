"""Trains a small GPT on text, on whatever accelerator this machine has.

    python examples/train_gpt.py                                # on the source of Python's standard library
    python examples/train_gpt.py --data my_texts/ --steps 5000 --dtype float16
    torchrun --nproc-per-node 2 examples/train_gpt.py --parallel fsdp2 --resume
    acclimate run --num_accelerators 4 examples/train_gpt.py --parallel tp+ddp

No line names hardware: all differences come from ``get_accelerator()``. Ctrl-C and SIGTERM end the run after
the current step, with a checkpoint. ``--resume`` continues from the last one, with the same losses.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from acclimate import Accelerator, AcclimateError, get_accelerator
from acclimate.ops import CPUAdam, FusedAdam
from checkpoint import CheckpointError, Checkpoints, State, collect, restore
from corpus import VOCABULARY, TextError, Windows, read_text, split
from gpt import GPT, GPTConfig
from progress import Display, Metrics, Row, draw_curve, summary
from ranks import (
    RANK,
    WAYS,
    WORLD_SIZE,
    any_rank,
    from_rank_0,
    gradient_sync,
    join_ranks,
    leave_ranks,
    mean_over_ranks,
    ranks_of_a_copy,
    spread,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused_adam": FusedAdam,
    "cpu_adam": CPUAdam,
}


class TrainingError(RuntimeError):
    """The run cannot begin or continue."""


class Trainer:
    """One run: the model, its data, and the number of steps done."""

    def __init__(self, args: argparse.Namespace, acc: Accelerator) -> None:
        self.args = args
        self.acc = acc
        self.dtype = choose_dtype(acc, args.dtype)
        text = read_text(args.data)
        self.training, self.validation = split(text, args.context, args.seed)
        self.config = GPTConfig(args.layers, args.heads, args.width, args.context, VOCABULARY, args.dropout)
        # The losses depend on these, besides the shape of the model; a resumed run reports what has changed.
        names = ("steps", "batch", "lr", "warmup", "weight_decay", "clip", "seed", "optimizer")
        self.settings = {name: getattr(args, name) for name in names}
        self.settings |= {"dtype": str(self.dtype), "text": f"{len(text)} bytes, crc {zlib.crc32(text):08x}"}

        torch.manual_seed(args.seed)  # the same weights on all ranks, whatever their accelerator
        self.spread = spread(GPT(self.config).to(acc.current_device_name()), acc, args.parallel, args.tp)
        self.model, self.copy, self.copies = self.spread.module, self.spread.copy, self.spread.copies
        torch.manual_seed(args.seed + self.copy)  # different dropout for each copy
        acc.manual_seed(args.seed + self.copy)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = OPTIMIZERS[args.optimizer](groups, lr=args.lr, betas=(0.9, 0.95))
        self.scaler = acc.amp.GradScaler(enabled=self.dtype == torch.float16)
        self.checkpoints = Checkpoints(args.out / "checkpoints", args.keep)
        self.steps_done = 0

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> Row:
        """Trains on one batch; returns its figures.

        Raises:
            TrainingError: the loss or the gradient is infinite or NaN. The weights are unchanged.
        """
        args, number = self.args, self.steps_done + 1
        began = time.perf_counter()
        rate = learning_rate(self.steps_done, args)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        share = args.batch // (self.copies * args.accumulate)
        total = torch.zeros((), device=self.acc.current_device_name())
        for part in range(args.accumulate):
            first = self.steps_done * args.batch + (part * self.copies + self.copy) * share
            # Ranks exchange gradients once per step, in the last part.
            with gradient_sync(self.model, part == args.accumulate - 1):
                loss = self.loss(self.training, first, share) / args.accumulate
                self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm_value = self.spread.clip_grad_norm(args.clip)
        loss_value = mean_over_ranks(total)
        if not math.isfinite(loss_value):
            raise TrainingError(self.diverged(f"The loss of step {number} is {loss_value}"))
        if math.isfinite(norm_value):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.scaler.is_enabled() and self.scaler.get_scale() > 1.0:
            # Overflow in float16. All ranks have the same norm, so all skip this step, sharded or not.
            self.scaler.update(self.scaler.get_scale() / 2)
        else:
            raise TrainingError(self.diverged(f"The gradient of step {number} has a norm of {norm_value}"))
        self.optimizer.zero_grad()
        self.steps_done = number
        return {
            "step": number,
            "loss": loss_value,
            "norm": norm_value if math.isfinite(norm_value) else None,
            "lr": rate,
            "tokens_per_s": args.batch * args.context / (time.perf_counter() - began),
            "memory": self.acc.max_memory_allocated(),
        }

    def loss(self, windows: Windows, first: int, count: int) -> Tensor:
        """Mean cross-entropy over some samples, in nats per token."""
        device = self.acc.current_device_name()
        tokens, targets = (
            self.acc.pin_memory(window).to(device, non_blocking=True)
            for window in windows.batch(first, count)
        )
        with self.acc.amp.autocast(enabled=self.dtype != torch.float32, dtype=self.dtype):
            logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the first windows of the validation text, the same ones each time."""
        self.model.eval()
        share = self.args.batch // (self.copies * self.args.accumulate)
        count = self.args.validation_batches * self.args.accumulate
        losses = [
            self.loss(self.validation, (part * self.copies + self.copy) * share, share)
            for part in range(count)
        ]
        return mean_over_ranks(torch.stack(losses).mean())

    def diverged(self, what: str) -> str:
        """An error message, with what to do about it."""
        left = self.checkpoints.newest_first()
        return (
            f"{what}: the run has diverged. Try a smaller --lr than {self.args.lr:g}, a longer --warmup, or "
            "--dtype float32" + (f"; --resume continues from {left[0].name}." if left else ".")
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint; all ranks must call it.

        Raises:
            CheckpointError: it cannot be written; raised on rank 0. The run can continue.
        """
        state = collect(self.acc, self.spread, self.optimizer)
        state |= {
            "step": self.steps_done,
            "scaler": self.scaler.state_dict(),
            "config": asdict(self.config),
            "settings": self.settings,
        }
        if RANK == 0:
            self.checkpoints.save(self.steps_done, state)

    def resume(self, say: Callable[[str], None]) -> None:
        """Continues from the newest intact checkpoint, which rank 0 finds; from step 0 if there is none.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest is of another model.
        """
        weights: State = {}

        def find() -> State | None:
            found = self.checkpoints.load_newest(say)
            if found is None:
                return None
            path, state = found
            weights.update(model=state.pop("model"), optimizer=state.pop("optimizer"))
            return {"path": str(path), **state}

        state = from_rank_0(find)
        if state is None:
            say(f"no checkpoint in {self.checkpoints.folder} yet: beginning at step 0")
            return
        shape = {name: value for name, value in asdict(self.config).items() if name != "dropout"}
        other = {name: state["config"][name] for name in shape if state["config"][name] != shape[name]}
        if other:
            raise CheckpointError(
                f"{state['path']} is of a model with "
                + ", ".join(f"{name} {value} (here {shape[name]})" for name, value in other.items())
                + ". Give this run the same settings, or another --out."
            )
        same_ranks = restore(self.acc, self.spread, self.optimizer, {**state, **weights})
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.steps_done = state["step"]
        say(f"resuming from {state['path']}, step {self.steps_done}")
        changed = [
            f"{name} {state['settings'][name]} -> {value}"
            for name, value in self.settings.items()
            if state["settings"][name] != value
        ]
        if not same_ranks:
            changed.append(f"ranks {len(state['random'])} -> {WORLD_SIZE}, so random numbers differ")
        if changed:
            say(f"not the same as before, so the curve may differ: {'; '.join(changed)}")


def choose_dtype(acc: Accelerator, name: str) -> torch.dtype:
    """The requested dtype; for ``auto`` the first of :data:`DTYPES` that the accelerator supports.

    Raises:
        TrainingError: the accelerator does not compute in it.
    """
    offered = acc.supported_dtypes()
    if name == "auto":
        return next(dtype for dtype in DTYPES.values() if dtype in offered)
    if DTYPES[name] not in offered:
        names = ", ".join(known for known, dtype in DTYPES.items() if dtype in offered)
        raise TrainingError(
            f"{acc.get_device_name()} does not compute in {name}. --dtype can be {names} here."
        )
    return DTYPES[name]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    warm = min(1.0, (step + 1) / args.warmup)
    done = max(0, step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done))))


# -- the run -----------------------------------------------------------------------------------------


def train(args: argparse.Namespace, acc: Accelerator, display: Display) -> int:
    """Trains with the settings in ``args``.

    Returns:
        0, or 128 + the number of the signal that ended the run early.
    """
    received = catch_signals()
    trainer = Trainer(args, acc)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    dtype = str(trainer.dtype).removeprefix("torch.")
    display.say(
        f"{acc.name}: {acc.get_device_name()} | {dtype} | "
        f"{parameters / 1e6:.1f} M parameters | {len(trainer.training.tokens) / 1e6:.1f} MB of text | "
        + (f"{WORLD_SIZE} ranks, {args.parallel}" if WORLD_SIZE > 1 else "1 rank")
    )
    if args.resume:
        trainer.resume(display.say)
    elif from_rank_0(lambda: bool(trainer.checkpoints.newest_first())):
        raise TrainingError(f"{args.out} holds a run. Continue it with --resume, or give another --out.")
    args.out.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(args.out / "metrics.jsonl", trainer.steps_done)
    ended_by, unsaved = 0, None
    with display:
        while trainer.steps_done < args.steps and not ended_by:
            row = trainer.step()
            done, is_last = trainer.steps_done, trainer.steps_done == args.steps
            if done % args.validate_every == 0 or is_last:
                row["validation_loss"] = trainer.validate()
            keep = done % args.log_every == 0 or done == 1 or is_last
            display.show(row, keep)
            if RANK == 0 and (trouble := metrics.add(row)) and keep:
                display.say(f"{metrics.path} cannot be written ({trouble}); its rows are kept in memory.")
            ended_by = any_rank(received[-1] if received else 0, acc.current_device_name())
            if done % args.checkpoint_every == 0 or is_last or ended_by:
                try:
                    trainer.save()
                    unsaved = None
                except CheckpointError as error:
                    unsaved = error
                    display.say(f"{error} The run continues, and tries again later.")
    if RANK == 0 and metrics.rows:
        display.say(summary(metrics.rows))
        title = f"{parameters / 1e6:.1f} M parameters on {acc.get_device_name()}, {dtype}"
        display.say(draw_curve(metrics.rows, args.out / "loss.png", title))
    if unsaved is not None:
        raise unsaved
    if ended_by:
        name = signal.Signals(ended_by).name
        display.say(f"{name}: checkpoint of step {trainer.steps_done} written; --resume continues from it.")
    return 128 + ended_by if ended_by else 0


def catch_signals() -> list[int]:
    """A list to which SIGTERM and SIGINT add their numbers, instead of ending the process at once."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def main() -> int:
    """Runs the command line; returns the exit code."""
    args = parse(sys.argv[1:])
    display = Display(Console(quiet=RANK != 0), args.steps)
    try:
        acc = get_accelerator()
        join_ranks(acc)
        status = train(args, acc, display)
    except (AcclimateError, CheckpointError, TextError, TrainingError) as error:
        sys.stderr.write(f"train_gpt.py: {f'rank {RANK}: ' if WORLD_SIZE > 1 else ''}{error}\n")
        return 1
    leave_ranks()
    return status


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line; exits if it is invalid."""
    parser = argparse.ArgumentParser(
        description="Trains a small GPT on text, on whatever accelerator this machine has.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="a text file, or a folder of them; none: Python's standard library")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="folder for checkpoints, metrics, plot")
    add("--resume", action="store_true", help="continue from the last checkpoint in --out, if there is one")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="dtype to compute in")
    add(
        "--parallel",
        choices=WAYS,
        default="ddp",
        help="data parallel, sharded, tensor parallel, or tensor parallel combined with one of the others",
    )
    add("--tp", type=positive, help="ranks that share a copy of the model; tp: all by default, tp+…: 2")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="torch's AdamW, or one of acclimate.ops")
    add("--layers", type=positive, default=6)
    add("--heads", type=positive, default=6)
    add("--width", type=positive, default=192)
    add("--context", type=positive, default=256, help="tokens (bytes) per sample")
    add("--dropout", type=not_negative, default=0.0)
    add("--steps", type=positive, default=400)
    add("--batch", type=positive, default=16, help="samples per step, over all ranks together")
    add("--accumulate", type=positive, default=1, help="gradient accumulation: parts of a rank's batch")
    add("--lr", type=not_negative, default=2e-3)
    add("--warmup", type=positive, default=40, help="steps")
    add("--weight-decay", type=not_negative, default=0.1)
    add("--clip", type=not_negative, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0)
    add("--validate-every", type=positive, default=50, help="steps")
    add("--validation-batches", type=positive, default=4)
    add("--checkpoint-every", type=positive, default=100, help="steps")
    add("--keep", type=positive, default=2, help="number of checkpoints to keep")
    add("--log-every", type=positive, default=10, help="steps")
    args = parser.parse_args(arguments)
    if args.width % (2 * args.heads) != 0:
        parser.error(f"--width {args.width} must be a multiple of twice --heads {args.heads}")
    if args.dropout >= 1:
        parser.error(f"--dropout {args.dropout:g} must be below 1")
    sharers = ranks_of_a_copy(args.parallel, args.tp)
    if WORLD_SIZE % sharers != 0:
        parser.error(f"{WORLD_SIZE} ranks cannot be divided into groups of --tp {sharers}")
    copies = WORLD_SIZE // sharers
    if args.parallel == "tp" and copies > 1:
        parser.error(
            f"--parallel tp on {WORLD_SIZE} ranks needs --tp {WORLD_SIZE}; tp+ddp and tp+fsdp2 do not"
        )
    if args.batch % (copies * args.accumulate) != 0:
        dealt = f"{copies} {'copies of the model' if sharers > 1 else 'ranks'}"
        parser.error(f"--batch {args.batch} cannot be divided among {dealt} in {args.accumulate} parts")
    return args


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def not_negative(text: str) -> float:
    """A number of at least 0."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")


if __name__ == "__main__":
    sys.exit(main())
