"""A compiled graph reads and writes what the same code does uncompiled: when it runs, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from aio_files import content_of, random_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acclimate.errors import (
    AsyncIOFileNotFoundError,
    AsyncIOSettingError,
    ClosedHandleError,
    ShortFileError,
)
from acclimate.ops import AsyncIOHandle
from quick_parameters import quick

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(params=quick(("eager", "aot_eager", "inductor"), "aot_eager"))
def compile_whole(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Compile]:
    """Compiles to one graph, or raises."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend=request.param)
    torch._dynamo.reset()


@pytest.fixture
def handle() -> Iterator[AsyncIOHandle]:
    with AsyncIOHandle(block_size=65536, queue_depth=8) as handle:
        yield handle


# -- the same as uncompiled --------------------------------------------------------------------------


def test_a_write_nobody_reads_has_the_value_of_its_place(
    compile_whole: Compile, handle: AsyncIOHandle, tmp_path: Path
) -> None:
    before, after, alone = (str(tmp_path / name) for name in ("before", "after", "alone"))

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        handle.sync_pwrite(y, before)
        y.add_(1)
        handle.write(y, after)
        handle.pwrite(torch.full((3,), 7.0), alone, atomic=True)
        return y * 0

    x = torch.arange(5000.0)
    assert torch.equal(compile_whole(step)(x), torch.zeros(5000))
    assert Path(before).read_bytes() == content_of(x * 2)
    assert Path(after).read_bytes() == content_of(x * 2 + 1)
    assert Path(alone).read_bytes() == content_of(torch.full((3,), 7.0))


def test_a_graph_that_returns_nothing_still_writes(
    compile_whole: Compile, handle: AsyncIOHandle, tmp_path: Path
) -> None:
    step = compile_whole(lambda x: handle.sync_pwrite(x + 1, tmp_path / "x") and None)
    for value in (1.0, 2.0):
        assert step(torch.full((10,), value)) is None
        assert (tmp_path / "x").read_bytes() == content_of(torch.full((10,), value + 1))


def test_a_read_comes_after_what_used_the_old_value_and_before_what_uses_the_new(
    compile_whole: Compile, handle: AsyncIOHandle, tmp_path: Path
) -> None:
    stored = torch.arange(4000, dtype=torch.float32)
    handle.write(stored, tmp_path / "x")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        old = x + 1
        count = handle.sync_pread(x[1000:3000], tmp_path / "x", 4000)
        return old, x * 2, count

    x = torch.full((4000,), -1.0)
    old, doubled, count = compile_whole(step)(x)
    expected = torch.full((4000,), -1.0)
    expected[1000:3000] = stored[1000:3000]
    assert torch.equal(old, torch.zeros(4000))
    assert torch.equal(x, expected)  # also what the caller sees
    assert torch.equal(doubled, expected * 2)
    assert count == 1


def test_transfers_of_several_handles_keep_their_order(compile_whole: Compile, tmp_path: Path) -> None:
    path = str(tmp_path / "x")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch.empty_like(x), torch.empty_like(x)
        one.write(x + 1, path)
        two.read(first, path)
        one.write(x + 2, path)
        two.read(second, path)
        one.write(x + 3, path)
        return first, second

    with AsyncIOHandle(queue_depth=2) as one, AsyncIOHandle(queue_depth=2) as two:
        x = torch.randn(3000)
        first, second = compile_whole(step)(x)
    assert torch.equal(first, x + 1)
    assert torch.equal(second, x + 2)
    assert Path(path).read_bytes() == content_of(x + 3)


def test_a_training_step_reads_its_weight_and_writes_its_activation(
    compile_whole: Compile, handle: AsyncIOHandle, tmp_path: Path
) -> None:
    stored, x = torch.randn(100), torch.randn(100)
    handle.write(stored, tmp_path / "weight")

    def loss(weight: torch.Tensor) -> torch.Tensor:
        handle.read(weight, tmp_path / "weight")
        activation = (weight * x).tanh()
        handle.write(activation, tmp_path / "activation")
        return activation.sum()

    weight = torch.nn.Parameter(torch.zeros(100))
    compile_whole(loss)(weight).backward()
    activation = (stored * x).tanh()
    written = torch.frombuffer(bytearray((tmp_path / "activation").read_bytes()), dtype=torch.float32)
    torch.testing.assert_close(written, activation)
    assert torch.equal(weight.detach(), stored)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, x * (1 - activation**2))


_SIZE = 64
_steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "add", "multiply", "copy"]),
        st.integers(0, 2),  # which tensor
        st.integers(0, 2),  # which file, or other tensor
        st.sampled_from([0, 4, 128]),  # file offset
    ),
    min_size=2,
    max_size=10,
)


@given(steps=_steps)
@settings(
    max_examples=settings.default.max_examples // 6,  # each compiles a graph
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_any_program_does_to_tensors_and_files_what_it_does_uncompiled(
    tmp_path: Path, handle: AsyncIOHandle, steps: list[tuple[str, int, int, int]]
) -> None:
    def run(tensors: list[torch.Tensor], files: list[str]) -> None:
        for kind, index, other, offset in steps:
            match kind:
                case "write":
                    handle.sync_pwrite(tensors[index], files[other], offset)
                case "read":
                    handle.sync_pread(tensors[index], files[other], offset)
                case "add":
                    tensors[index].add_(tensors[other])
                case "multiply":
                    tensors[index] = tensors[index] * 3
                case _:
                    tensors[index].copy_(tensors[other])

    ends = []
    for name in ("plain", "compiled"):
        torch._dynamo.reset()
        tensors = [random_bytes(_SIZE, seed) for seed in range(3)]
        files = [str(tmp_path / f"{name}{number}") for number in range(3)]
        for path in files:
            Path(path).write_bytes(bytes(range(256)))
        chosen = torch.compile(run, fullgraph=True, backend="aot_eager") if name == "compiled" else run
        chosen(tensors, files)
        ends.append(([content_of(tensor) for tensor in tensors], [Path(path).read_bytes() for path in files]))
    assert ends[0] == ends[1]


# -- one graph ---------------------------------------------------------------------------------------


def test_one_graph_serves_all_offsets(handle: AsyncIOHandle, tmp_path: Path) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(
        lambda x, offset: handle.sync_pwrite(x, tmp_path / "x", offset), fullgraph=True, backend=keep
    )
    for number in range(12):
        step(torch.full((2,), float(number)), 8 * number)
    assert len(graphs) <= 2  # the first, and the one for any offset
    assert (tmp_path / "x").read_bytes() == content_of(torch.arange(12.0).repeat_interleave(2))


@pytest.mark.parametrize("kind", [str, Path, lambda path: bytes(path)], ids=["str", "Path", "bytes"])
def test_a_graph_takes_every_kind_of_name(
    handle: AsyncIOHandle, tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    name = kind(tmp_path / "é")
    torch.compile(lambda x: handle.write(x, name), fullgraph=True, backend="eager")(torch.ones(4))
    assert (tmp_path / "é").read_bytes() == content_of(torch.ones(4))


def test_the_operators_keep_what_torch_asks_of_operators(handle: AsyncIOHandle, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    handle.write(torch.ones(8), path)
    order, number = torch.zeros((), dtype=torch.int64), handle._number
    checks = {
        torch.ops.acclimate.aio_write.default: (order, torch.ones(8), number, path, 0),
        torch.ops.acclimate.aio_read.default: (order, torch.zeros(8), number, path, 0),
    }
    for operator, arguments in checks.items():
        results = torch.library.opcheck(operator, arguments)
        assert set(results.values()) == {"SUCCESS"}


# -- errors ------------------------------------------------------------------------------------------


def test_errors_come_when_the_graph_runs_as_they_do_uncompiled(
    compile_whole: Compile, handle: AsyncIOHandle, tmp_path: Path
) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(AsyncIOFileNotFoundError, match="none") as caught:
        compile_whole(lambda x: handle.read(x, tmp_path / "none"))(torch.ones(4))
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(ShortFileError, match="ends at offset 4"):
        compile_whole(lambda x: handle.sync_pread(x, tmp_path / "short"))(torch.ones(4))
    with pytest.raises(AsyncIOSettingError, match="not contiguous"):
        compile_whole(lambda x: handle.write(x[::2], tmp_path / "x"))(torch.ones(4))
    with pytest.raises(AsyncIOSettingError, match="file_offset must be 0, not 4"):
        compile_whole(lambda x: handle.pwrite(x, tmp_path / "x", file_offset=4, atomic=True))(torch.ones(4))


def test_a_graph_says_that_its_handle_is_closed_or_gone(tmp_path: Path) -> None:
    torch._dynamo.reset()
    handle = AsyncIOHandle(queue_depth=1)
    step = torch.compile(lambda x: handle.write(x, tmp_path / "x"), fullgraph=True, backend="aot_eager")
    step(torch.ones(4))
    handle.close()
    with pytest.raises(ClosedHandleError, match="closed"):
        step(torch.ones(4))
    gone = AsyncIOHandle(queue_depth=1)._number
    with pytest.raises(ClosedHandleError, match="closed"):
        torch.ops.acclimate.aio_write(
            torch.zeros((), dtype=torch.int64), torch.ones(4), gone, str(tmp_path / "x"), 0
        )


# -- between graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["async_pread", "async_pwrite"])
def test_one_graph_with_a_transfer_not_waited_for_is_refused_with_the_reason(
    handle: AsyncIOHandle, tmp_path: Path, method: str
) -> None:
    torch._dynamo.reset()
    name = str(tmp_path / "x")
    step = torch.compile(lambda x: getattr(handle, method)(x, name), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run between graphs, as a tensor that changes"):
        step(torch.ones(4))
    assert not (tmp_path / "x").exists()


def test_transfers_not_waited_for_run_between_two_graphs(handle: AsyncIOHandle, tmp_path: Path) -> None:
    path = tmp_path / "x"

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        y = x * 2
        handle.async_pwrite(y, str(path))
        count = handle.wait()
        handle.sync_pread(out, str(path))
        return out + count

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager")
    for turn in range(3):
        x, out = torch.full((5000,), float(turn)), torch.zeros(5000)
        assert torch.equal(compiled(x, out), 2 * x + 1)
        assert path.read_bytes() == content_of(2 * x)
