"""Python and C++ know the same instruction sets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from acclimate import ops
from acclimate.ops import simd


def test_python_and_cpp_have_the_same_sets_in_the_same_order_with_the_same_numbers() -> None:
    header = (Path(ops.__file__).parent / "csrc/isa.h").read_text()
    lists = [re.findall(r"\bX\((\w+), (\d+),", text) for text in header.split("#define ACCLIMATE_ISAS")[1:]]
    numbers = [
        [(name, str(isa.number)) for name, isa in simd._OF_MACHINE.get(machine, simd._PLAIN).items()]
        for machine in ("x86_64", "aarch64", "riscv64")
    ]
    assert lists == numbers


@pytest.mark.parametrize(
    ("flags", "usable"),
    [
        ("avx2 f16c", ("plain",)),  # kernels for AVX2 use FMA, which a virtual machine may hide
        ("avx2 f16c fma", ("plain", "avx2")),
        ("avx2 f16c fma avx512f avx512bw avx512dq avx512_bf16", ("plain", "avx2")),
        ("avx512f avx512bw avx512dq avx512vl avx512_bf16", ("plain",)),
        (
            "avx2 f16c fma avx512f avx512bw avx512dq avx512vl avx512_bf16",
            ("plain", "avx2", "avx512", "avx512_bf16"),
        ),
    ],
)
def test_a_processor_runs_a_set_only_with_all_that_the_set_and_those_before_it_need(
    flags: str, usable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simd, "_cpuinfo", lambda: {"flags": flags})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert simd.usable_isas.__wrapped__() == usable
