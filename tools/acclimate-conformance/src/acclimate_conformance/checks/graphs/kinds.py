"""Checks of graphs by kind: of inputs, of results, of reads, of threads, and what a graph holds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from acclimate.accelerator import Accelerator, RecordedGraph
from acclimate_conformance.checks.assertions import (
    MIB,
    NotOfferedError,
    equal,
    in_thread,
    is_host,
    refused,
    require,
    require_close,
)
from acclimate_conformance.checks.check import check
from acclimate_conformance.checks.graphs.replays import new_graph, warm_up
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
            require(equal(results[what], expected), f"after replay {turn}, {what} does not follow its inputs")


@check(
    "capture_to_graph", "is_current_stream_capturing",
    promise="Within a capture, numbers of any dtype cannot be read back, in any of torch's ways.",
)  # fmt: skip
def every_kind_of_read_is_refused(accelerator: Accelerator) -> None:
    new_graph(accelerator)
    device = accelerator.current_device_name()
    kinds = (torch.float32, torch.int64, torch.int32, torch.bool)
    tensors = {str(kind): torch.ones(3, device=device).to(kind) for kind in kinds}
    reads: dict[str, Callable[[torch.Tensor], object]] = {
        "item()": lambda tensor: tensor[0].item(),
        "bool()": lambda tensor: bool(tensor.any()),
        "int()": lambda tensor: int(tensor[1]),
        "tolist()": lambda tensor: tensor.tolist(),
        "equal()": lambda tensor: torch.equal(tensor, tensor.clone()),
    }
    accelerator.synchronize()
    for name, tensor in tensors.items():
        for how, read in reads.items():
            graph = new_graph(accelerator)
            with (
                refused(f"{how} of {name} during a capture", RuntimeError),
                accelerator.capture_to_graph(graph),
            ):
                read(tensor)


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
            "a replay in another thread than the capture's is wrong",
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
        require(held < _HELD // 2, f"after reset() {held} bytes of a graph's results stay allocated")
