"""Compiles every kernel in Triton for a GPU that need not be here: only the last step of a launch needs one.

Triton's interpreter accepts what its compiler refuses, such as a variable with another type in one branch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from acclimate.llm.decode import triton_pointwise
from acclimate.llm.decode.description import ACTIVATIONS
from acclimate.llm.kernels import triton_attention, triton_linear, triton_products
from acclimate.llm.kernels.formats import WEIGHT_FORMATS

HOPPER = GPUTarget("cuda", 90, 32)
FLOATS = ("eps", "value_eps", "scale", "softcap")
NUMBERS = {
    "place": "*i64", "starts": "*i64", "chosen": "*i64", "data": "*u8", "own": "*fp32", "other": "*fp32",
    "factors": "*fp32", "largest": "*fp32", "sums": "*fp32", "mixed": "*fp32", "table": "*fp32",
}  # fmt: skip
INTEGERS = {
    "size", "value_size", "n", "k", "rows", "groups", "blocks", "group_bytes", "heads", "key_heads", "width",
    "grouped", "window", "n0", "n1", "n2", "n3",
}  # fmt: skip


def compile_kernel(kernel: Any, warps: int, constants: dict[str, Any]) -> None:
    """Compiles a kernel whose other tensors are in bfloat16."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in FLOATS:
            return "fp32"
        is_integer = name in INTEGERS or name.endswith(("_row", "_begin", "_batch", "_head", "_token"))
        return NUMBERS.get(name, "i32" if is_integer else "*bf16")

    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, places)
    triton.compile(source, target=HOPPER, options={"num_warps": warps})


def linear() -> None:
    """Products in every format, each with one shape, and in one format with all shapes."""
    shapes = [(1, 10, 10), (1, 1000, 10), (1, 10, 1000), (4, 10, 10)]
    for index, kind in enumerate(WEIGHT_FORMATS.values()):
        for rows, groups, blocks in shapes if kind.name == "int8" else [shapes[index % 4]]:
            shape = triton_linear._shape(rows, groups, blocks)
            of_format = triton_linear._constants(kind.number)
            others = {"HAS_BIAS": index % 2 == 0, "HAS_EXPERTS": rows == 1 and index % 3 == 0, "ROWS": rows}
            constants = of_format | others | {"TOGETHER": shape["TOGETHER"]}
            compile_kernel(triton_linear._kernel, shape["num_warps"], constants)


def pointwise() -> None:
    """Norms, heads and activations with options that take every path."""
    for option in (False, True):
        norm = {
            "IS_LAYER": option, "HAS_WEIGHT": True, "HAS_BIAS": option, "ADDS_ONE": option,
            "ROUNDS_FIRST": not option,
        }  # fmt: skip
        compile_kernel(triton_pointwise._norm_kernel, 4, norm | {"HAS_ADDED": option, "COLUMNS": 1024})
        for first in (False, True):
            heads = {
                "HAS_FACTORS": option, "SIZE": 128, "VALUE_SIZE": 64, "NORMALIZES": True, "ROTATES": True,
                "ROTATES_FIRST": first, "INTERLEAVED": option, "ROUNDS_PRODUCTS": first,
                "NORMALIZES_VALUES": option,
            }  # fmt: skip
            compile_kernel(triton_pointwise._heads_kernel, 1, norm | heads)
    neither = norm | heads | {"NORMALIZES": False, "ROTATES": False}
    compile_kernel(triton_pointwise._heads_kernel, 1, neither)
    for activation in ACTIVATIONS:
        options = {"ACTIVATION": activation, "HAS_GATE": activation != "gelu", "COLUMNS": 1024}
        compile_kernel(triton_pointwise._gate_kernel, 4, options)


def attention() -> None:
    """Both kernels of attention, with and without their options."""
    for option in (False, True):
        sizes = {"PARTS": 16, "GROUP": 16, "VALUE_SIZE": 64}
        options = {"HAS_CAP": option, "HAS_WINDOW": option, "SIZE": 128, "TILE": 16}
        compile_kernel(triton_attention._partial_kernel, 4, options | sizes)
        compile_kernel(triton_attention._join_kernel, 4, {"HAS_SINKS": option} | sizes)


def products() -> None:
    """Products of one row and of several, with and without biases."""
    for rows, biases in ((1, 0), (1, 5), (8, 0), (8, 2)):
        shape = triton_products._shape(rows, 4096, torch.bfloat16)
        warps = shape.pop("num_warps")
        compile_kernel(triton_products._kernel, warps, shape | {"BIASES": biases, "IS_ROW": rows == 1})


if __name__ == "__main__":
    {"linear": linear, "pointwise": pointwise, "attention": attention, "products": products}[sys.argv[1]]()
