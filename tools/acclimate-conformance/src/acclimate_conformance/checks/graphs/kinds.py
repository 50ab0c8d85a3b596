"""Checks of graphs by kind: of inputs, of results, of reads, of threads, and what a graph holds."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate.errors import GraphCaptureError
from acclimate_conformance.checks.assertions import (
    MIB,
    NotOfferedError,
    equal,
    in_thread,
    is_host,
    refused,
    require,
    require_close,
    several_devices,
)
from acclimate_conformance.checks.capturing import new_graph, warm_up
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.memory.allocations import release, require_figures

_HELD = 16 * MIB
_LENGTH = 4096


@check(
    "capture_to_graph", "replay_graph",
    promise="A replay reads inputs of any dtype and layout again, and fills results of any layout.",
)  # fmt: skip
def every_kind_of_input_is_read_again(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    base = torch.zeros(2, 4, 6, 6)
    values = {
        "a single number": torch.tensor(0.0), "an integer": torch.tensor(0), "integers": torch.zeros(5).int(),
        "truth values": torch.zeros(5, dtype=torch.bool), "a truth value": torch.tensor(False),
        "a matrix": torch.zeros(3, 4), "images": base, "one element": torch.zeros(1),
    }  # fmt: skip
    inputs = {what: tensor.to(device) for what, tensor in values.items()}
    views = {
        "a column": inputs["a matrix"][:, 1], "a transposed view": inputs["a matrix"].t(),
        "every second row": inputs["a matrix"][::2],
        "a parameter": torch.nn.Parameter(inputs["images"][0, 0]),
        "a view of one element": inputs["images"][1, 2, 3, 4],
    }  # fmt: skip

    own = _own_operator()

    def work(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = {what: tensor.detach() + 1 for what, tensor in given.items()}
        results |= {f"{what}, scaled": tensor.detach() * 3 for what, tensor in given.items()}
        images = given["images"]
        return results | {
            "a transposed result": given["a matrix"].t() + 1,
            "a result with channels last": images.contiguous(memory_format=torch.channels_last) * 2,
            "an expanded result": given["one element"].expand(3) + given["a single number"],
            "a permuted result": images.permute(2, 0, 3, 1) - 1,
            "a selection": torch.where(given["a truth value"], given["one element"], -given["one element"]),
            "a single result": given["a matrix"].sum(),
            "a result of an operator of the program's": own(given["a matrix"], 3.0),
        }

    given = inputs | views
    graph = new_graph(accelerator)
    warm_up(accelerator, lambda: work(given))
    with accelerator.capture_to_graph(graph):
        results = work(given)
    for turn in (1, 2, 3):
        for number, tensor in enumerate(inputs.values()):
            fresh = torch.arange(tensor.numel()).reshape(tensor.shape) % 11 + turn * (number + 2)
            tensor.copy_(fresh % 2 if tensor.dtype == torch.bool else fresh)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        wanted = work({what: tensor.detach().cpu() for what, tensor in given.items()})
        for what, expected in wanted.items():
            require(
                equal(results[what], expected),
                f"after call {turn} of replay_graph(), {what} does not follow its inputs",
            )


@functools.cache
def _own_operator() -> Callable[[torch.Tensor, float], torch.Tensor]:
    """An operator that a program adds to torch, of any device."""
    library = torch.library.Library("acclimate_conformance", "FRAGMENT")
    library.define("scaled(Tensor x, float by) -> Tensor")
    library.impl("scaled", lambda x, by: x * by + 1, "CompositeExplicitAutograd")
    _libraries.append(library)
    found: Callable[[torch.Tensor, float], torch.Tensor] = torch.ops.acclimate_conformance.scaled
    return found


_libraries: list[torch.library.Library] = []
"""Their operators are gone with them."""


@check(
    "capture_to_graph", "replay_graph",
    promise="A replay repeats every kind of write: in place, to views, given results and lists of tensors.",
)  # fmt: skip
def every_kind_of_write_is_repeated(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    wanted, found = _written_to(torch.device("cpu")), _written_to(torch.device(device))

    def work(tensors: dict[str, torch.Tensor]) -> None:
        for what, write in _WRITES.items():
            write(tensors[what], tensors["given"], tensors["places"])

    graph = new_graph(accelerator)
    warm_up(accelerator, lambda: work(found))
    with accelerator.capture_to_graph(graph):
        work(found)
    start = _written_to(torch.device("cpu"))
    for what, tensor in start.items():
        found[what].copy_(tensor)
        wanted[what].copy_(tensor)
    for turn in (1, 2, 3):
        for tensors in (wanted, found):
            tensors["given"].copy_(torch.arange(6.0) + turn)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        work(wanted)
        for what, tensor in wanted.items():
            require(
                torch.allclose(found[what].cpu(), tensor, rtol=1e-4, atol=1e-4),
                f"replay_graph(), call {turn}, of {what} gives {found[what].flatten()[:6].tolist()}, not "
                f"{tensor.flatten()[:6].tolist()}",
            )


_Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
_WRITES: dict[str, _Write] = {
    "an addition in place": lambda x, given, places: x.add_(given),
    "an assignment to a column": lambda x, given, places: x[:, 1].copy_(given[:4]),
    "an assignment to every second row": lambda x, given, places: x[::2].fill_(0.5).add_(given),
    "an assignment of a number": lambda x, given, places: x.__setitem__((1, 2), given[3]),
    "index_add_": lambda x, given, places: x.index_add_(0, places, given.expand(3, 6)),
    "index_copy_": lambda x, given, places: x.index_copy_(0, places[:2], given.expand(2, 6)),
    "index_put_": lambda x, given, places: x.index_put_((places,), given.expand(3, 6), accumulate=True),
    "scatter_add_": lambda x, given, places: x[:1].scatter_add_(1, places[None], given[None, :3]),
    "masked_fill_": lambda x, given, places: x.masked_fill_(given > 4, 2.0),
    "a result given by out": lambda x, given, places: torch.mul(given.expand(4, 6), 3, out=x),
    "a product given by out": lambda x, given, places: torch.mm(x[:, :4].clone() / 8, x.clone() / 8, out=x),
    "a sum given by out": lambda x, given, places: torch.sum(given.expand(4, 6), 0, out=x[0]),
    "a transposed view": lambda x, given, places: x.t().mul_(0.5).add_(given[:, None]),
    "a part of its storage": lambda x, given, places: x.as_strided((3,), (2,), 1).add_(given[:3]),
    "an addition to a list": lambda x, given, places: torch._foreach_add_(list(x), 1.5),
    "an addition of lists": lambda x, given, places: torch._foreach_add_(list(x), [given] * 4, alpha=0.5),
    "a list that is scaled": lambda x, given, places: torch._foreach_mul_(list(x), [0.5, 2.0, 1.0, 0.25]),
    "a copy of lists": lambda x, given, places: torch._foreach_copy_(list(x), [given * 2, *[given] * 3]),
    "a list that is set to 0": lambda x, given, places: torch._foreach_zero_([x[0], x[2]]),
    "products of lists": lambda x, given, places: torch._foreach_addcmul_(
        list(x), [given] * 4, [given] * 4, 0.1
    ),
    "interpolated lists": lambda x, given, places: torch._foreach_lerp_(list(x), [given] * 4, 0.25),
    "new lists, copied": lambda x, given, places: torch._foreach_copy_(
        list(x), torch._foreach_mul([given] * 4, 2.0)
    ),
    "results of a split": lambda x, given, places: [part.add_(1) for part in x.split(2, 1)],
    "two results given by out": lambda x, given, places: torch.max(
        given.expand(4, 6), 0, out=(x[0], places.new_empty(6))
    ),
}  # fmt: skip


def _written_to(device: torch.device) -> dict[str, torch.Tensor]:
    """A matrix for each kind of write, and what is written to them."""
    start = torch.arange(24.0).reshape(4, 6) / 4
    tensors = {what: start.to(device, copy=True) for what in _WRITES}
    return tensors | {
        "given": torch.arange(6.0).to(device), "places": torch.tensor([2, 0, 3]).to(device),
    }  # fmt: skip


@check(
    "capture_to_graph", "replay_graph",
    promise="A recorded graph repeats work on each device, and copies between devices.",
)  # fmt: skip
def work_on_every_device_is_repeated(accelerator: Accelerator) -> None:
    names = several_devices(accelerator)
    graph = new_graph(accelerator)
    if not isinstance(graph, RecordedGraph):
        raise NotOfferedError("a driver's graph holds the work of one stream, of one device")
    given = {name: torch.ones(8, device=name) for name in names}
    added = {name: torch.zeros(8, device=name) for name in names}

    def work() -> dict[str, torch.Tensor]:
        results = {}
        for index, (name, tensor) in enumerate(given.items()):
            results[f"a result on {name}"] = tensor * 2
            added[name].add_(tensor)
            other = names[(index + 1) % len(names)]
            results[f"a copy from {name} to {other}"] = tensor.to(other) + 1
            with accelerator.device(name):
                results[f"a result on {name}, made current,"] = tensor - 3
        return results

    with accelerator.capture_to_graph(graph):
        results = work()
    for turn in (2, 3):
        for number, name in enumerate(names):
            given[name].fill_(10 * turn + number)
            added[name].zero_()
        accelerator.replay_graph(graph)
        for index in range(len(names)):
            accelerator.synchronize(index)
        sums = {f"an addition in place on {name}": (added[name], given[name].clone()) for name in names}
        for what, (found, wanted) in sums.items():
            require(equal(found, wanted), f"replay_graph() does not repeat {what}")
        seen = {what: tensor.clone() for what, tensor in results.items()}
        for what, wanted in work().items():
            require(equal(seen[what], wanted), f"replay_graph() does not repeat {what}")


@check(
    "capture_to_graph", "is_current_stream_capturing",
    promise="Within a capture, numbers of any dtype cannot be read back, in any of torch's ways.",
)  # fmt: skip
def every_kind_of_read_is_refused(accelerator: Accelerator) -> None:
    raises = GraphCaptureError if isinstance(new_graph(accelerator), RecordedGraph) else RuntimeError
    device = accelerator.current_device_name()
    kinds = (torch.float32, torch.int64, torch.int32, torch.bool)
    tensors = {str(kind): torch.ones(3, device=device).to(kind) for kind in kinds}
    accelerator.synchronize()
    for name, tensor in tensors.items():
        for how, read in {**_READS, **(_READS_OF_INTEGERS if name == "torch.int64" else {})}.items():
            graph = new_graph(accelerator)
            with refused(f"{how} of {name} during a capture", raises), accelerator.capture_to_graph(graph):
                read(tensor)
            told = accelerator.is_current_stream_capturing()
            require(told is False, f"is_current_stream_capturing() is {told} after {how} in a capture")


_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item()": lambda x: x[0].item(),
    "bool()": lambda x: bool(x.any()),
    "a condition": lambda x: 1 if x[0] else 2,
    "int()": lambda x: int(x[1]),
    "float()": lambda x: float(x[2]),
    "complex()": lambda x: complex(x[0]),
    "tolist()": lambda x: x.tolist(),
    "tolist() of a copy on the host": lambda x: x.cpu().tolist(),
    "equal()": lambda x: torch.equal(x, x.clone()),
    "allclose()": lambda x: torch.allclose(x.float(), x.float() + 1),
    "is_nonzero()": lambda x: torch.is_nonzero(x[0]),
    "in": lambda x: 1 in x,
    "repr()": repr,
    "format()": lambda x: f"{x[0]:.1f}" if x.is_floating_point() else f"{x[0]}",
    "max() of Python": lambda x: max(x[0], x[1]),
    "sorted()": lambda x: sorted(x, reverse=True),
    "numpy() of a copy on the host": lambda x: x.cpu().numpy(),
    "torch.testing.assert_close()": lambda x: torch.testing.assert_close(x, x + x),
}
"""Ways to read numbers back, each of which Python may go on from."""
_READS_OF_INTEGERS: dict[str, Callable[[torch.Tensor], object]] = {
    "range()": lambda x: range(x[0]),
    "an index of a list": lambda x: [1, 2, 3][x[0]],
    "lengths of tensor_split()": lambda x: x.tensor_split(x[:2].cpu()),
    "lengths of a packed sequence": lambda x: torch.nn.utils.rnn.pack_padded_sequence(
        x.float()[:, None, None], x[:1].cpu()
    ),
}


@check(
    "replay_graph", "capture_to_graph",
    promise="A graph that one thread captured is replayed by another, on the present inputs.",
)  # fmt: skip
def graphs_replay_in_any_thread(accelerator: Accelerator) -> None:
    graph = new_graph(accelerator)
    index = accelerator.current_device()
    ones = torch.ones(4, device=accelerator.current_device_name())
    warm_up(accelerator, lambda: ones * 3)
    with accelerator.capture_to_graph(graph):
        tripled = ones * 3

    def replay() -> None:
        with accelerator.device(index):
            accelerator.replay_graph(graph)
            accelerator.synchronize()

    for value, run in ((2.0, in_thread), (4.0, lambda function: function()), (5.0, in_thread)):
        ones.fill_(value)
        accelerator.synchronize()
        run(replay)
        require(
            equal(tripled, torch.full((4,), 3 * value)),
            "replay_graph() in another thread than the capture's is wrong",
        )


@check(
    "capture_to_graph", "replay_graph",
    promise="A replay changes no tensor that was made after the capture, and needs none that was dropped.",
)  # fmt: skip
def replays_keep_to_their_memory(accelerator: Accelerator) -> None:
    device = accelerator.current_device_name()
    given = torch.ones(_LENGTH, device=device)
    graph = new_graph(accelerator)

    def work() -> torch.Tensor:
        doubled = given * 2
        more = doubled + 1
        return more.exp() + doubled * more

    warm_up(accelerator, work)
    with accelerator.capture_to_graph(graph):
        result = work()
    later = [torch.full((_LENGTH,), 7.0, device=device) for _ in range(16)]
    for value in (0.5, 0.25):
        given.fill_(value)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        for tensor in later:
            require(
                equal(tensor, torch.full((_LENGTH,), 7.0)),
                "replay_graph() changes a tensor made after the capture",
            )
        doubled = torch.full((_LENGTH,), value) * 2
        wanted = (doubled + 1).exp() + doubled * (doubled + 1)
        require_close(result, wanted, torch.float32, "replay_graph(): a result of dropped tensors")


@check(
    "create_graph", "capture_to_graph", "memory_allocated",
    promise="reset() frees the tensors that a graph holds.",
)  # fmt: skip
def reset_frees_memory(accelerator: Accelerator) -> None:
    require_figures(accelerator)
    if is_host(accelerator):
        raise NotOfferedError("a host's figures are those of the whole process")
    ones = torch.ones(_HELD // 4, device=accelerator.current_device_name())
    graph = new_graph(accelerator)
    if not isinstance(graph, RecordedGraph):
        raise NotOfferedError("what a driver's graph holds is the driver's")
    release(accelerator)
    before = accelerator.memory_allocated()
    for _ in range(2):
        with accelerator.capture_to_graph(graph):
            result = ones + 1
        del result
        graph.reset()
        release(accelerator)
        held = accelerator.memory_allocated() - before
        require(held < _HELD // 2, f"after Graph.reset() {held} bytes of a graph's results stay allocated")
