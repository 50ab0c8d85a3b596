"""The table of weight formats is the only place that knows them, in C++, in Python and on the page."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import gguf
import pytest
import torch
from weights import make

from acclimate.errors import WeightError
from acclimate.llm.kernels import PackedWeight, builder, layout, operators
from acclimate.llm.kernels.formats import (
    GGUF_FORMATS,
    TABLE,
    WEIGHT_FORMATS,
    Field,
    WeightFormat,
    format_of_number,
    read_table,
)
from acclimate.llm.kernels.layout import Parts
from acclimate.llm.loading import packer
from acclimate.ops import simd

PAGE = Path(__file__).parents[3] / "docs" / "ops.md"
MADE_UP = "WEIGHT_FORMAT(q6_0, .bits = 6, .offset = 32, .scales = Scales::block, .gguf_bytes = 26)\n"

each_format = pytest.mark.parametrize("kind", WEIGHT_FORMATS.values(), ids=WEIGHT_FORMATS)


@pytest.mark.parametrize("added", ["", MADE_UP], ids=["as it is", "with a made-up format"])
def test_c_plus_plus_and_python_make_the_same_formats_of_the_table(added: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs c++ on PATH")
    for header in TABLE.parent.glob("*.h"):
        shutil.copy(header, tmp_path)
    text = TABLE.read_text().replace("\n#undef", f"{added}\n#undef", 1)
    (tmp_path / TABLE.name).write_text(text)
    source, program = Path(__file__).with_name("print_formats.cpp"), tmp_path / "print"
    subprocess.run([compiler, "-std=c++20", f"-I{tmp_path}", str(source), "-o", str(program)], check=True)
    told = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = read_table(text)
    assert ("q6_0" in found) == bool(added)
    assert told.splitlines() == [
        f"{kind.name} {kind.number} {kind.bits} {kind.offset} {kind.columns} {kind.gguf_bytes} "
        f"{kind.gguf_halves} {kind.group_bytes(300)} {kind.group_bytes(512)}"
        for kind in found.values()
    ]


@pytest.mark.parametrize(
    "line",
    [
        "WEIGHT_FORMAT(q6_0, .bits=6, .offset = 32, .scales = Scales::block)",
        "WEIGHT_FORMAT(q6_0, .bits = 6, .offset = 32,",
        "SCALES(rows, FIELD(scale, f32, 0), FIELD(low, f32, 0))",
        "int bits = 4;",
    ],
)
def test_a_line_of_the_table_that_python_cannot_read_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="is no entry: '"):
        read_table(f"{TABLE.read_text()}\n{line}\n")


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_a_block_has_the_values_and_bytes_that_gguf_gives_it(name: str) -> None:
    kind = WEIGHT_FORMATS[name]
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert (kind.columns, kind.gguf_bytes) == sizes


def random_parts(kind: WeightFormat, rows: int, columns: int) -> Parts:
    def field_values(field: Field, parts: int) -> torch.Tensor:
        if field.dtype.is_floating_point:
            return torch.randn(rows, parts).to(field.dtype)
        limits = torch.iinfo(field.dtype)
        # Of an exponent, those around which published weights are.
        first, last = (118, 124) if field.name == "exponent" else (limits.min, limits.max + 1)
        return torch.randint(first, last, (rows, parts), dtype=field.dtype)

    codes = torch.randint(0, 1 << kind.bits, (rows, columns), dtype=torch.uint8)
    return Parts(codes, {f.name: field_values(f, f.parts(columns)) for f in kind.fields})


@each_format
def test_packing_loses_no_code_and_no_scale(kind: WeightFormat) -> None:
    parts = random_parts(kind, 37, 768)
    data = layout.pack(parts, kind)
    assert data.shape == (3, kind.group_bytes(768))
    found = layout.unpack(data, kind, 768).rows(slice(37))
    assert torch.equal(found.codes, parts.codes)
    assert found.fields.keys() == parts.fields.keys()
    for name, values in parts.fields.items():
        assert torch.equal(found.fields[name], values), name


@each_format
@pytest.mark.parametrize("isa", simd.usable_isas())
def test_every_format_has_a_kernel_in_each_instruction_set(kind: WeightFormat, isa: str) -> None:
    parts = random_parts(kind, 37, 768)
    weight = PackedWeight(kind.name, layout.pack(parts, kind), (37, 768))
    x = torch.randn(20, 768).bfloat16()
    torch.ops.acclimate.inference_use_isa(simd.isa_number(isa))
    try:
        values, few, many = weight.dequantize(), weight.linear(x[:3]), weight.linear(x)
    finally:
        torch.ops.acclimate.inference_use_isa(simd.BEST)
    assert torch.equal(values, operators._values(weight.data, kind.number, 37, 768, torch.float32))
    assert torch.equal(values, parts.values(kind))
    # Inputs are rounded to 8 bits, and results to bfloat16.
    bound = 5e-3 * x.double().norm(dim=-1, keepdim=True) * values.double().norm(dim=1)
    exact = x.double() @ values.double().T
    assert bool(((few.double() - exact[:3]).abs() <= bound[:3]).all())
    assert bool(((many.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("number", [len(WEIGHT_FORMATS) + 1, -1, 2**32, 2**32 + 1, -(2**63)])
def test_a_number_of_no_format_is_refused_in_python_and_in_native_code(number: int) -> None:
    builder.load("cpu")
    weight, _ = make("int8", 20, 64)
    with pytest.raises(RuntimeError, match="no weight format with the number"):
        torch.ops.acclimate.packed_linear(torch.randn(2, 64), weight.data, None, number, 20, 64)
    with pytest.raises(RuntimeError, match="GGUF has no blocks of the weight format"):
        torch.ops.acclimate.packed_from_gguf(torch.zeros(34, dtype=torch.uint8), number, 1, 32)
    with pytest.raises(WeightError, match="no weight format with the number"):
        format_of_number(number)


def test_what_a_user_can_choose_is_in_the_table() -> None:
    assert all(not WEIGHT_FORMATS[name].is_gguf for name in packer.FORMATS)


def page_line(kind: WeightFormat) -> str:
    """A format's row of the table in docs/ops.md."""
    stored = kind.bits + sum(8 * f.dtype.itemsize / f.columns for f in kind.fields if f.columns)
    shared = min(f.columns or 1 << 30 for f in kind.fields)
    names = {field.name for field in kind.fields}
    scale = "scale and zero" if "zero" in names else "scale and minimum" if "low" in str(names) else "scale"
    part = f"{shared} columns" if shared < 1 << 30 else "row"
    block = f"{kind.name.upper()}: {kind.columns} values, {kind.gguf_bytes} bytes" if kind.is_gguf else ""
    return f"| `{kind.name}` | {kind.bits} | {stored:g} | {scale} for each {part} | {block} |"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text("utf-8").splitlines()
    expected = [page_line(kind) for kind in WEIGHT_FORMATS.values()]
    first = page.index(expected[0]) if expected[0] in page else 0
    assert page[first : first + len(expected)] == expected
