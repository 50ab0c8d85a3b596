"""The optimizers' native ops: the same bits on every instruction set and without a compiler, whole graphs in
torch.compile, and DeepSpeed's functions on top."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, FLOATS, Case, give_gradients, parameters
from torch import Tensor

import acclimate.ops
from acclimate import get_accelerator
from acclimate.errors import InvalidEnvironmentError, InvalidOptimizerArgumentError
from acclimate.ops import CPUAdam, simd
from acclimate.ops.optimizers.adagrad import adagrad_
from acclimate.ops.optimizers.adam import adam_
from acclimate.ops.optimizers.builders import (
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedLambBuilder,
)
from acclimate.ops.optimizers.lion import lion_
from fresh_process import FreshProcesses
from quick_parameters import quick

SIZES = (1, 15, 64, 65, 130, 4097)
SOURCES = Path(acclimate.ops.__file__).parent / "optimizers"


class Op:
    """An op with settings that use all of it."""

    def __init__(self, builder: Any, name: str, plain: Callable[..., None], states: int, **settings: Any):
        self.name, self.plain, self.states, self.settings = name, plain, states, settings
        self._builder = builder

    def native(self) -> Callable[..., None]:
        self._builder().load()
        op: Callable[..., None] = getattr(torch.ops.acclimate, self.name).default
        return op


ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "bias_correction": True}
OPS = {
    "adamw": Op(CPUAdamBuilder, "adam_", adam_, 2, **ADAM, weight_decay=0.1, decoupled=True),
    "adam": Op(CPUAdamBuilder, "adam_", adam_, 2, **ADAM, weight_decay=0.1, decoupled=False, maximize=True,
               grad_scale=0.5),
    "adam beta1 0.2": Op(CPUAdamBuilder, "adam_", adam_, 2, **{**ADAM, "beta1": 0.2}, weight_decay=0.0,
                         decoupled=True),
    "lion": Op(CPULionBuilder, "lion_", lion_, 1, lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1),
    "adagrad": Op(CPUAdagradBuilder, "adagrad_", adagrad_, 1, lr=1e-2, lr_decay=0.1, weight_decay=0.1,
                  eps=1e-10, grad_scale=0.5),
}  # fmt: skip
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
ISAS = tuple(simd.usable_isas())
some_ops = pytest.mark.parametrize("op", quick(OPS, "adamw"))
each_isa = pytest.mark.parametrize("isa", quick(ISAS, ISAS[0], ISAS[-1]))
"""Quick for plain code and for the best instruction set of this machine."""
one_op = pytest.mark.parametrize("op", quick(OPS, "lion"))


def arguments(
    op: Op, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 4, scale: float = 1.0
) -> list[list[Tensor]]:
    """Parameters, gradients, states, steps and outputs; dtypes for all of these but the steps."""
    generator = torch.Generator().manual_seed(11)

    def tensors(dtype: torch.dtype, scale: float) -> list[Tensor]:
        return [(torch.randn(size, generator=generator) * scale).to(dtype) for size in SIZES]

    states = [[t.abs() for t in tensors(dtypes[2], 0.1)] for _ in range(op.states)]
    steps = [torch.tensor(float(i // 3)) for i in range(len(SIZES))]
    outputs = [torch.zeros(size, dtype=dtypes[3]) for size in SIZES]
    return [tensors(dtypes[0], scale), tensors(dtypes[1], scale), *states, steps, outputs]


def copies(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def same_bits(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


# -- instruction sets --------------------------------------------------------------------------------


@some_ops
@each_isa
def test_every_instruction_set_gives_the_bits_of_plain_torch(op: Op, isa: str) -> None:
    native = op.native()
    for dtypes in itertools.product(FLOATS, FLOATS, FLOATS, FLOATS):
        expected = arguments(op, dtypes)
        found = copies(expected)
        op.plain(*expected, **op.settings)
        native(*found, **op.settings, isa=simd.isa_number(isa))
        assert same_bits(found, expected), dtypes


@each_op
@each_isa
def test_denormal_and_overflowing_values_are_converted_alike(op: Op, isa: str) -> None:
    native = op.native()
    for dtype, scale in itertools.product(FLOATS, (1e-41, 1e-39, 6e-8, 1e4)):
        expected = arguments(op, (torch.float32, torch.float32, dtype, dtype), scale)
        found = copies(expected)
        op.plain(*expected, **op.settings)
        native(*found, **op.settings, isa=simd.isa_number(isa))
        assert same_bits(found, expected), (dtype, scale)


@each_isa
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_every_16_bit_value_survives_a_pass_and_every_rounding_is_torch_s(
    isa: str, dtype: torch.dtype
) -> None:
    CPULionBuilder().load()
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = torch.cat([every.float() * (1 + i * 2.0**-12) for i in range(-9, 10)])
    # With a rate of 0 a step of Lion only reads, widens, narrows and writes.
    for params, outputs in ((every.clone(), torch.empty_like(every, dtype=torch.float32)),
                            (wide.clone(), torch.empty_like(wide, dtype=dtype))):  # fmt: skip
        zeros, step = torch.zeros_like(params), torch.tensor(0.0)
        torch.ops.acclimate.lion_([params], [zeros], [zeros.clone()], [step], [outputs], lr=0.0, beta1=0.9,
                                  beta2=0.9, weight_decay=0.0, isa=simd.isa_number(isa))  # fmt: skip
        torch.testing.assert_close(outputs, params.to(outputs.dtype), rtol=0, atol=0, equal_nan=True)


def test_the_number_of_threads_changes_no_bit() -> None:
    native = OPS["adamw"].native()
    before = torch.get_num_threads()
    size = 300_001
    base = [[torch.randn(size)], [torch.randn(size)], [torch.zeros(size)], [torch.zeros(size)],
            [torch.tensor(0.0)], []]  # fmt: skip
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            lists = copies(base)
            native(*lists, **OPS["adamw"].settings)
            results.append(lists)
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_the_variable_chooses_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(simd.VARIABLE, "plain")
    assert simd.chosen_isa() == 1
    monkeypatch.delenv(simd.VARIABLE)
    assert simd.chosen_isa() == simd.BEST
    monkeypatch.setenv(simd.VARIABLE, "avx1024")
    with pytest.raises(InvalidEnvironmentError, match=r'one of plain.*"avx1024" is unknown'):
        CPUAdam(parameters())
    lacking = "neon" if platform.machine() == "x86_64" else "avx2"
    monkeypatch.setenv(simd.VARIABLE, lacking)
    with pytest.raises(InvalidEnvironmentError, match=f"{lacking}, which this machine cannot run"):
        CPUAdam(parameters())


def test_an_instruction_set_that_is_not_here_is_refused_natively_too() -> None:
    op = OPS["lion"]
    lacking = 5 if platform.machine() == "x86_64" else 2
    with pytest.raises(RuntimeError, match="cannot run the instruction set"):
        op.native()(*arguments(op), **op.settings, isa=lacking)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "lion", "adagrad"])
def test_the_source_compiles_for_64_bit_arm(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no aarch64-linux-gnu-g++ on PATH")
    include = Path(torch.__file__).parent / "include"
    result = subprocess.run(
        [compiler, "-std=c++20", "-O1", "-fPIC", "-Wall", "-Werror", *CPUAdamBuilder().cxx_args(),
         "-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(include), "-c",
         str(SOURCES / "csrc" / f"{name}.cpp"), "-o", str(tmp_path / "op.o")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "lion", "lamb"])
def test_the_cuda_source_compiles(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on PATH")
    include = Path(torch.__file__).parent / "include"
    result = subprocess.run(
        [compiler, "-std=c++20", "-O1", "-DUSE_CUDA", "-fmad=false", "--expt-relaxed-constexpr",
         "-Xcompiler=-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(include),
         "-arch=sm_80", "-c", str(SOURCES / "csrc" / f"{name}.cu"), "-o", str(tmp_path / "op.o")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


# -- without a compiler ------------------------------------------------------------------------------

STEPS = """
import logging, torch
warned = []
class Keep(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())
logging.getLogger("acclimate").addHandler(Keep())
from acclimate.ops import CPUAdagrad, CPUAdam, CPULion
torch.manual_seed(0)
total = []
for kind in (CPUAdam, CPUAdagrad, CPULion, CPUAdam):
    p = torch.nn.Parameter(torch.randn(1003))
    optimizer = kind([p], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        p.grad = torch.randn(1003)
        optimizer.step()
    total.append(p.detach().double().sum().item())
tell(total=total, warned=[line for line in warned if "plain torch" in line])
"""


def test_without_a_compiler_results_are_the_same_bits_and_each_op_warns_once(
    fresh: FreshProcesses, tmp_path: Path
) -> None:
    native = fresh.run(STEPS)
    assert native.returncode == 0, native.stderr
    bare = fresh.run(
        STEPS, env={"PATH": str(tmp_path), "CXX": "", "ACCLIMATE_CACHE": str(tmp_path / "cache")}
    )
    assert bare.returncode == 0, bare.stderr
    assert bare.told["total"] == native.told["total"]
    assert native.told["warned"] == []
    assert [line.split('"')[1] for line in bare.told["warned"]] == ["cpu_adam", "cpu_adagrad", "cpu_lion"]


# -- torch.compile -----------------------------------------------------------------------------------


@one_op
def test_torch_compile_keeps_the_op_in_one_whole_graph(op: Op) -> None:
    native = op.native()

    def step(*lists: list[Tensor]) -> list[Tensor]:
        doubled = [gradient * 2 for gradient in lists[1]]
        native(lists[0], doubled, *lists[2:], **op.settings)
        return [parameter + 1 for parameter in lists[0]]

    expected = arguments(op)
    found = copies(expected)
    eager = step(*expected)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*found)
    assert same_bits(found[:-1], expected[:-1])
    assert same_bits([compiled], [eager])


@pytest.mark.parametrize("case", quick({case.name: case for case in CASES}, "CPUAdam", "FusedLion"))
def test_a_whole_step_compiles_to_one_graph(case: Case) -> None:
    if case.name == "FusedLamb":
        pytest.skip("FusedLamb reads norms on the host")
    ours, eager = parameters([(7,), (64,)]), parameters([(7,), (64,)])
    mine, reference = case.ours(ours, lr=1e-2), case.ours(eager, lr=1e-2)
    step = torch.compile(mine.step, fullgraph=True, backend="aot_eager")
    for index in range(3):
        give_gradients(ours, eager, seed=index)
        step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))


@one_op
def test_torch_s_checks_of_an_op_s_registration_pass(op: Op) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.native(), tuple(arguments(op)), op.settings, test_utils=checks)


# -- DeepSpeed's functions ---------------------------------------------------------------------------


def test_the_accelerator_gives_builders_whose_modules_have_deepspeeds_functions() -> None:
    expected = {
        "CPUAdamBuilder": {"create_adam", "adam_update", "adam_update_copy", "adam_rollback", "destroy_adam"},
        "CPUAdagradBuilder": {"create_adagrad", "adagrad_update", "destroy_adagrad"},
        "CPULionBuilder": {"create_lion", "lion_update", "destroy_lion"},
        "FusedAdamBuilder": {"multi_tensor_adam"},
        "FusedLionBuilder": {"multi_tensor_lion"},
    }
    for name, functions in expected.items():
        builder = get_accelerator().create_op_builder(name)
        assert builder is not None, name
        module = builder.load()
        assert functions <= set(dir(module)), name
    assert "lamb" in dir(FusedLambBuilder().module())


def test_the_sequence_of_deepspeeds_cpu_adam_gives_adamw() -> None:
    ours, theirs = parameters([(100,), (65,)]), parameters([(100,), (65,)])
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    module = CPUAdamBuilder().load()
    assert module.create_adam(7, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, True) == 0
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in ours]
    for step in range(1, 5):
        give_gradients(ours, theirs, seed=step)
        for p, (m, v) in zip(ours, moments, strict=True):
            module.adam_update(7, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, p.data, p.grad.data, m, v)
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=3e-6)
    before = ours[0].detach().clone()
    p, (m, v) = ours[0], moments[0]
    module.adam_update(7, 5, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, p.data, p.grad.data, m, v)
    module.adam_rollback(7, 5, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, p.data, p.grad.data, m, v)
    torch.testing.assert_close(p.detach(), before, rtol=1e-5, atol=1e-6)
    copied = torch.zeros(100, dtype=torch.bfloat16)
    module.adam_update_copy(7, 5, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, p.data, p.grad.data, m, v, copied)
    assert torch.equal(copied, p.detach().bfloat16())
    assert module.destroy_adam(7) == 0
    with pytest.raises(InvalidOptimizerArgumentError, match="no Adam optimizer number 7"):
        module.adam_update(7, 6, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, p.data, p.grad.data, m, v)


def test_the_sequence_of_deepspeeds_fused_adam_and_lion_steps_a_group() -> None:
    lists = arguments(OPS["adamw"])
    expected = copies(lists)
    expected[4] = [torch.tensor(2.0) for _ in SIZES]
    settings = {**OPS["adamw"].settings, "weight_decay": 0.1}
    adam_(*expected[:5], [], **settings)
    params, grads, m, v = lists[:4]
    noop = torch.zeros(1, dtype=torch.int32)
    CPUAdamBuilder().load().multi_tensor_adam(
        65536, noop, [grads, params, m, v], 1e-3, 0.9, 0.999, 1e-8, 3, 1, 1, 0.1
    )
    assert same_bits([params, m, v], [expected[0], expected[2], expected[3]])
    lists = arguments(OPS["lion"])
    expected = copies(lists)
    lion_(*expected[:4], [], lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
    params, grads, m = lists[:3]
    CPULionBuilder().load().multi_tensor_lion(65536, noop, [grads, params, m], 1e-3, 0.9, 0.99, 3, 0.1)
    assert same_bits([params, m], [expected[0], expected[2]])


def test_deepspeeds_lamb_gives_its_formula() -> None:
    p, g, m = torch.randn(50), torch.randn(50), torch.zeros(50)
    v, copied = torch.zeros(50), torch.empty(50, dtype=torch.float16)
    expected_m, expected_v = 0.1 * g / 2, 0.001 * (g / 2) ** 2
    u = expected_m / (expected_v.sqrt() + 1e-8) + 0.01 * p
    ratio = (p.norm() / u.norm()).clamp(0.01, 10.0)
    expected = p - 1e-2 * (1 - 0.999) ** 0.5 / (1 - 0.9) * ratio * u
    module = FusedLambBuilder().module()
    found = module.lamb(p, copied, m, v, g, 1e-2, 0.9, 0.999, 10.0, 0.01, 1e-8, 2.0, 1, 1, 1, 0.01)
    torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, ratio.reshape(1), rtol=1e-5, atol=0)
    assert torch.equal(copied, p.half())


def test_deepspeeds_own_optimizers_run_on_these_modules(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Its names can be imported without it, once another test has imported acclimate.compat.deepspeed.
    if not list(importlib.metadata.distributions(name="deepspeed")):
        pytest.skip("DeepSpeed is not installed")
    from deepspeed.ops.adagrad import cpu_adagrad
    from deepspeed.ops.adam import cpu_adam, fused_adam
    from deepspeed.ops.lion import cpu_lion, fused_lion

    caplog.set_level(logging.INFO, logger="acclimate")
    monkeypatch.setattr(cpu_adam, "CPUAdamBuilder", CPUAdamBuilder)
    monkeypatch.setattr(cpu_adagrad, "CPUAdagradBuilder", CPUAdagradBuilder)
    monkeypatch.setattr(cpu_lion, "CPULionBuilder", CPULionBuilder)
    monkeypatch.setattr(fused_adam, "FusedAdamBuilder", CPUAdamBuilder)
    monkeypatch.setattr(fused_lion, "FusedLionBuilder", CPULionBuilder)
    peers = {
        "CPUAdam": cpu_adam.DeepSpeedCPUAdam,
        "CPUAdagrad": cpu_adagrad.DeepSpeedCPUAdagrad,
        "CPULion": cpu_lion.DeepSpeedCPULion,
        "FusedAdam": fused_adam.FusedAdam,
        "FusedLion": fused_lion.FusedLion,
    }
    for case in CASES:
        if case.name not in peers:
            continue
        # One parameter: DeepSpeed's fused optimizers count only the last one's steps.
        ours, theirs = parameters([(1003,)]), parameters([(1003,)])
        mine, peer = case.ours(ours, lr=1e-2), peers[case.name](theirs, lr=1e-2)
        for step in range(3):
            give_gradients(ours, theirs, seed=step)
            mine.step()
            peer.step()
        assert torch.equal(ours[0], theirs[0]), case.name
