"""Products, values and slices of weights of every format, against float64 and gguf's own code."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from weights import DENSE, FORMATS, gguf_blocks, make, whole_columns

from acclimate import get_accelerator
from acclimate.errors import WeightError
from acclimate.host.topology import processor_limit
from acclimate.llm.kernels import GGUF_FORMATS, PackedWeight, builder, operators
from acclimate.llm.kernels.formats import OWN_FORMATS
from acclimate.ops import simd
from fresh_process import FreshProcesses
from quick_parameters import quick

each_format = pytest.mark.parametrize("kind", FORMATS)
each_gguf_format = pytest.mark.parametrize("kind", GGUF_FORMATS)

ISAS = simd.usable_isas()
each_isa = pytest.mark.parametrize("isa", quick(ISAS, ISAS[0], ISAS[-1]), indirect=True)

FLOAT_BOUND = 3e-7  # relative to |x| |w|, norms of an input and a weight row
BYTE = torch.zeros(1, dtype=torch.uint8)
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def of_rounded_inputs(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The most that products change when each 32 inputs become 8 bits with one scale: half a step each."""
    blocks = -(-x.shape[-1] // 32)
    padding = (0, blocks * 32 - x.shape[-1])
    x, values = (
        torch.nn.functional.pad(matrix.abs(), padding).view(*matrix.shape[:-1], blocks, 32)
        for matrix in (x, values)
    )
    return x.amax(-1) / 254 @ values.sum(-1).T


def check_product(
    weight: PackedWeight, values: torch.Tensor, x: torch.Tensor, **options: torch.Tensor
) -> None:
    y = weight.linear(x, **options)
    exact = x.double() @ values.double().T
    if "bias" in options:
        exact = exact + options["bias"].double()
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    norms = x.double().norm(dim=-1, keepdim=True) * values.double().norm(dim=1)
    bound = FLOAT_BOUND * norms
    if weight.format != "dense":
        bound = bound + 1.001 * of_rounded_inputs(x.double(), values.double())
    bound = bound + ROUNDING[x.dtype] * (exact.abs() + bound) + 1e-12
    assert bool(((y.double() - exact).abs() <= bound).all()), (weight.format, weight.shape, x.shape)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    builder.load("cpu")
    torch.ops.acclimate.inference_use_isa(simd.isa_number(request.param))
    yield request.param
    torch.ops.acclimate.inference_use_isa(simd.BEST)


@each_format
@each_isa
def test_every_instruction_set_multiplies_within_the_bound(kind: str, isa: str) -> None:
    weight, values = make(kind, 77, whole_columns(kind, 523))
    for rows in (1, 2, 5, 16):
        check_product(weight, values, torch.randn(rows, weight.shape[1]))
    check_product(weight, values, torch.randn(3, weight.shape[1]).bfloat16())


@each_format
@each_isa
def test_many_rows_in_bf16_are_within_the_bound(kind: str, isa: str) -> None:
    weight, values = make(kind, 77, whole_columns(kind, 523))
    bias = torch.randn(77).bfloat16()
    for rows in (17, 300):
        check_product(weight, values, torch.randn(rows, weight.shape[1]).bfloat16(), bias=bias)


@each_isa
@pytest.mark.parametrize("dtype", DENSE.values(), ids=str)
@pytest.mark.parametrize("k", [70, 1024])
def test_a_row_has_the_same_bits_beside_however_many_others(k: int, dtype: torch.dtype, isa: str) -> None:
    weight = PackedWeight.dense(torch.randn(37, k).to(dtype))
    x = torch.randn(16, k).to(dtype)
    whole = weight.linear(x)
    for rows in (2, 3, 4, 6, 8, 10, 14):  # one row alone is added up in another order
        assert torch.equal(weight.linear(x[:rows]), whole[:rows])


@given(
    st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 600), st.integers(0, 20),
    st.sampled_from(list(DENSE.values())), st.booleans(), st.booleans(),
)  # fmt: skip
@example("q8_0", 1, 1, 17, torch.float16, True, True)
def test_products_of_any_shape_dtype_and_strides_are_within_the_bound(
    kind: str, n: int, k: int, rows: int, dtype: torch.dtype, is_strided: bool, has_bias: bool
) -> None:
    weight, values = make(kind, n, whole_columns(kind, k), seed=n)
    k = weight.shape[1]
    x = torch.randn(k, rows).t().to(dtype) if is_strided else torch.randn(rows, k).to(dtype)
    check_product(weight, values, x, **({"bias": torch.randn(n).to(dtype)} if has_bias else {}))


@each_gguf_format
def test_values_have_the_bits_of_gguf_s_own(kind: str) -> None:
    blocks, expected = gguf_blocks(kind, 37, 768)
    weight = PackedWeight.from_gguf(blocks, kind.upper(), (37, 768))
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.dequantize(slice(5, 36, 2)), expected[5:36:2])
    assert torch.equal(weight.dequantize(dtype=torch.bfloat16), expected.bfloat16())
    ids = torch.tensor([[36, 0], [17, 17]])
    assert torch.equal(weight.rows(ids), expected[ids])


@each_gguf_format
def test_native_packing_and_plain_torch_give_the_same_bytes(kind: str) -> None:
    blocks, _ = gguf_blocks(kind, 37, 768)
    weight = PackedWeight.from_gguf(blocks, kind, (37, 768))
    assert torch.equal(weight.data, operators._from_gguf(blocks, weight.number, 37, 768))
    for dtype in DENSE.values():
        plain = operators._values(weight.data, weight.number, 37, 768, dtype)
        assert torch.equal(weight.dequantize(dtype=dtype), plain)


@each_format
def test_infinite_and_nan_inputs_give_what_torch_gives(kind: str) -> None:
    weight, values = make(kind, 20, 256)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(3, 256)
        x[1, 7] = bad
        y, expected = weight.linear(x), x @ values.T
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf() * y.sign(), expected.isinf() * expected.sign())


@each_format
@pytest.mark.parametrize("rows", [7, 40])
def test_infinite_and_nan_inputs_change_no_bit_of_other_rows(kind: str, rows: int) -> None:
    weight, _ = make(kind, 20, 256)
    x = torch.randn(rows, 256)
    expected = weight.linear(x)
    bad = torch.tensor([1, 2, 6])
    x[bad, torch.tensor([7, 100, 255])] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    y = weight.linear(x)
    others = torch.ones(rows, dtype=torch.bool).index_fill(0, bad, False)
    assert torch.equal(y[others], expected[others])
    assert not y[bad].isfinite().any()


@each_format
def test_extreme_inputs_stay_finite(kind: str) -> None:
    weight, values = make(kind, 20, 256)
    for scale in (0.0, 1e-42, 1e-30, 1e30):
        x = torch.randn(2, 256) * scale
        error = (weight.linear(x).double() - x.double() @ values.double().T).abs().max()
        assert error <= 4e-3 * x.double().norm() * values.double().norm() + 1e-37


def test_a_dense_weight_is_the_models_own_memory() -> None:
    tensor = torch.randn(40, 32)
    assert PackedWeight.dense(tensor).data.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("rows", [1, 40])
def test_no_rows_no_columns_and_more_rows_than_the_kernel_takes(rows: int) -> None:
    for kind in (*DENSE, *OWN_FORMATS):
        weight, values = make(kind, 33, 64)
        check_product(weight, values, torch.randn(0, 64))
        check_product(weight, values, torch.randn(2, rows, 64))
    empty = PackedWeight.dense(torch.empty(5, 0))
    assert torch.equal(empty.linear(torch.empty(rows, 0)), torch.zeros(rows, 5))


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows_give_the_bits_of_few_with_a_kernel_and_torchs_values_beside_tiles(
    dtype: torch.dtype, has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "multiplies_many_rows", lambda device_type: not has_tiles)
    for kind in ("int8", "q4_k", "q6_k"):
        weight, values = make(kind, 300, 256)
        x = torch.randn(555, 256).to(dtype)  # more than are prepared at a time
        check_product(weight, values, x)
        few = torch.cat([weight.linear(rows) for rows in x.split(16)])
        assert torch.equal(weight.linear(x), few) is not has_tiles


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.008), ("int4", 0.085), ("int5", 0.042)])
def test_quantising_keeps_most_of_a_weight(kind: str, bound: float) -> None:
    weight = torch.randn(64, 640) * 0.03
    weight[3] = 0
    weight[:, 7] *= 4  # an outlier in each row
    packed = PackedWeight.quantize(weight, kind)
    error = (packed.dequantize() - weight).norm() / weight.norm()
    assert error < bound * 2.5
    plain = torch.randn(64, 640) * 0.03
    assert (PackedWeight.quantize(plain, kind).dequantize() - plain).norm() / plain.norm() < bound
    assert not packed.dequantize()[3].any()


@each_format
def test_the_largest_results_are_those_of_the_whole_product(kind: str) -> None:
    weight, _ = make(kind, 1000, 256)
    x = torch.randn(3, 256)
    values, positions = weight.top(x, 5)
    expected = weight.linear(x).topk(5)
    assert torch.equal(values, expected.values)
    assert torch.equal(positions, expected.indices)


def test_of_equal_results_the_first_is_the_largest_and_nan_is_larger() -> None:
    weight = PackedWeight.dense(torch.ones(300, 4))
    assert weight.top(torch.ones(1, 4), 3)[1].tolist() == [[0, 1, 2]]
    rows = torch.ones(300, 4)
    rows[200] = torch.nan
    assert PackedWeight.dense(rows).top(torch.ones(1, 4))[1].item() == 200


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "q4_k"])
def test_the_number_of_threads_changes_no_bit(kind: str) -> None:
    weight, _ = make(kind, 3000, 512)
    x = torch.randn(3, 512)
    before = torch.get_num_threads()
    torch.ops.acclimate.inference_limit_threads(7)  # this machine may have fewer processors
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(weight.linear(x))
    finally:
        torch.set_num_threads(before)
        torch.ops.acclimate.inference_limit_threads(processor_limit())
    assert all(torch.equal(result, results[0]) for result in results)


def test_threads_may_multiply_at_once() -> None:
    weight, _ = make("q4_0", 2000, 512)
    x = torch.randn(2, 512)
    expected = weight.linear(x)
    wrong = []

    def work() -> None:
        for _ in range(50):
            if not torch.equal(weight.linear(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_FORK = """
import os, torch
from acclimate.llm.kernels import PackedWeight
torch.set_num_threads(2)
weight = PackedWeight.quantize(torch.randn(4000, 256), "int8")
x = torch.randn(1, 256)
expected = weight.linear(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(weight.linear(x), expected) and torch.equal(weight.linear(x), expected) else 1)
status = os.waitpid(child, 0)[1]
tell(status=status, same=torch.equal(weight.linear(x), expected))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own(fresh: FreshProcesses) -> None:
    told = fresh.check(_FORK).told
    assert told == {"status": 0, "same": True}


@pytest.mark.parametrize("kind", ["q4_k", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_compiled_code_keeps_the_product_in_its_graph(kind: str) -> None:
    weight, _ = make(kind, 20, 256)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return weight.linear(x).relu()

    x = torch.randn(2, 256)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_the_accelerator_finds_the_op_by_name() -> None:
    op_builder = get_accelerator().create_op_builder("InferenceBuilder")
    assert op_builder is not None
    assert op_builder.load().PackedWeight is PackedWeight


@pytest.mark.parametrize(
    ("make_wrong", "message"),
    [
        (lambda w: w.linear(torch.randn(2, 63)), r"takes inputs \[..., 64\], not \[2, 63\]"),
        (lambda w: w.linear(torch.ones(2, 64, dtype=torch.int32)), "not torch.int32"),
        (lambda w: w.linear(torch.tensor(1.0)), "takes inputs"),
        (lambda w: w.linear(torch.randn(2, 64), torch.randn(3)), r"takes a bias \[20\]"),
        (lambda w: w.linear(torch.randn(2, 64, device="meta")), "on meta and the weight on cpu"),
        (lambda w: w.top(torch.randn(2, 64), 21), "from 1 to 20"),
        (lambda w: PackedWeight.dense(torch.ones(3)), r"matrix, not of shape \[3\]"),
        (lambda w: PackedWeight.quantize(torch.ones(3, 3), "int3"), 'or "uint8", not to "int3"'),
        (lambda w: PackedWeight.quantize(torch.full((3, 3), torch.nan), "int4"), "infinite or NaN"),
        (lambda w: PackedWeight.from_gguf(BYTE, "IQ2_XS", (1, 256)), "IQ2_XS"),
        (lambda w: PackedWeight.from_gguf(BYTE, "Q4_K", (1, 32)), "multiple of 256"),
        (lambda w: PackedWeight.from_gguf(BYTE, "Q8_0", (1, 32)), "has 34 bytes"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(make_wrong: object, message: str) -> None:
    weight, _ = make("q8_0", 20, 64)
    with pytest.raises(WeightError, match=message):
        make_wrong(weight)  # type: ignore[operator]


def test_a_row_that_does_not_exist_is_refused() -> None:
    for kind in ("q8_0", "float32"):
        with pytest.raises((RuntimeError, IndexError)):
            make(kind, 20, 64)[0].rows(torch.tensor([20]))
