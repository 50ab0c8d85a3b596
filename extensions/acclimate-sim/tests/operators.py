"""torch's own operator tests, run on sim and on the host: how many operators give the same results.

    ACCLIMATE_ACCELERATOR=sim python tests/operators.py [--samples N] [NAME…]

The operators and their inputs are those of ``torch.testing._internal.common_methods_invocations.op_db``,
which torch tests its own devices with. Results have to be on sim, and equal to the host's within torch's
tolerances.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from acclimate import get_accelerator

HOST, SIM = "cpu", "sim:0"
UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operators whose values mean nothing: only dtype, shape and strides are compared."""


@dataclass
class Tally:
    """How many operators passed one direction, and why the others did not."""

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.passed + len(self.failed)

    def add(self, name: str, reason: str | None) -> None:
        if reason is None:
            self.passed += 1
        else:
            self.failed[name] = reason


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def compare(op: Any, count: int, backward: bool) -> str | None:
    """Why an operator's results differ from the host's, or None."""
    reset()
    try:
        samples_on_sim = op.sample_inputs(SIM, main_dtype(op), requires_grad=backward)
        for on_sim in itertools.islice(samples_on_sim, count):
            parts = (on_sim.input, on_sim.args, on_sim.kwargs)
            value, args, kwargs = (tree_map(to_host, part) for part in parts)
            on_host = SampleInput(value, args=args, kwargs=kwargs)
            choose = on_sim.output_process_fn_grad if backward else None
            expected, found = (run(op, sample, choose) for sample in (on_host, on_sim))
            wants_host = on_sim.kwargs.get("device") == HOST  # some make a host tensor like a device's
            device = HOST if wants_host else SIM
            if reason := difference(expected, found, device, values=op.name not in UNINITIALISED):
                return reason
    except Exception as error:  # an operator may fail in any way, and the others are to be run
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return None


def to_host(value: Any) -> Any:
    """The same on the host: a tensor with its strides and all of its storage, or a device's name."""
    if not isinstance(value, torch.Tensor):
        return HOST if str(value) == SIM else value
    if value.device.type == "cpu" or value.layout != torch.strided:
        return value.detach().cpu().requires_grad_(value.requires_grad)
    host = torch.empty(0, dtype=value.dtype)
    host.set_(value.untyped_storage().cpu(), value.storage_offset(), value.shape, value.stride())
    host = host.conj() if value.is_conj() else host
    return host.requires_grad_(value.requires_grad)


def main_dtype(op: Any) -> torch.dtype:
    dtypes = op.supported_dtypes("cpu")
    preferred = (torch.float32, torch.complex64, torch.int64, torch.bool, *dtypes)
    return next(dtype for dtype in preferred if dtype in dtypes)


def run(op: Any, sample: Any, choose: Any | None) -> list[Any]:
    """An operator's results; with ``choose``, which says which have gradients, the inputs' gradients too."""
    reset()
    results = op(sample.input, *sample.args, **sample.kwargs)
    if choose is None:
        return tree_leaves(results)
    results = tree_leaves(choose(results))
    wanted = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if needs_grad(leaf)]
    outputs = [leaf for leaf in results if needs_grad(leaf)]
    if not wanted or not outputs:
        return results
    grads = [torch.ones_like(output) for output in outputs]
    return [*results, *torch.autograd.grad(outputs, wanted, grads, allow_unused=True)]


def needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def difference(expected: list[Any], found: list[Any], where: str, values: bool) -> str | None:
    if len(expected) != len(found):
        return f"{len(found)} results instead of {len(expected)}"
    for host, device in zip(expected, found, strict=True):
        if not isinstance(host, torch.Tensor):
            if host != device and not (isinstance(host, torch.device) or host != host):
                return f"{device} instead of {host}"
            continue
        if str(device.device) != where:
            return f"a result is on {device.device}"
        if (device.shape, device.stride(), device.dtype) != (host.shape, host.stride(), host.dtype):
            return f"{device.dtype} {tuple(device.shape)} {device.stride()} instead of the host's"
        if not values:
            continue
        try:
            torch.testing.assert_close(device.cpu(), host, equal_nan=True)
        except AssertionError as error:
            return str(error).splitlines()[0]
    return None


def reset() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def tally(names: list[str], samples: int, once: bool) -> tuple[Tally, Tally]:
    """Runs all operators, or those of the given names: forward, and backward where torch has one.

    With ``once``, an operator whose results and gradients are equal is not run again without gradients.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    forward, backward = Tally(), Tally()
    for op in chosen(names):
        name, is_equal = full_name(op), False
        if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu"):
            reason = compare(op, samples, backward=True)
            backward.add(name, reason)
            is_equal = reason is None
        forward.add(name, None if once and is_equal else compare(op, samples, backward=False))
    return forward, backward


def chosen(names: list[str]) -> Iterator[Any]:
    """The operators that the host has; a few are for one vendor's GPUs only."""
    named = (op for op in op_db if not names or full_name(op) in names or op.name in names)
    return (op for op in named if op.supported_dtypes("cpu") and not op.name.startswith("jiterator"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs torch's operator tests on sim.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=8, help="inputs tried of each operator")
    parser.add_argument("--once", action="store_true", help="run forward without gradients only if needed")
    options = parser.parse_args()
    assert get_accelerator().name == "sim", "Set ACCLIMATE_ACCELERATOR=sim."
    start = time.monotonic()
    forward, backward = tally(options.names, options.samples, options.once)
    for direction, result in (("forward", forward), ("backward", backward)):
        for name, reason in result.failed.items():
            sys.stdout.write(f"{direction} {name}: {reason}\n")
    sys.stdout.write(
        f"torch {torch.__version__}: forward {forward.passed} of {forward.total} operators equal to the "
        f"host's, backward {backward.passed} of {backward.total}; {time.monotonic() - start:.0f} s\n"
    )


if __name__ == "__main__":
    main()
