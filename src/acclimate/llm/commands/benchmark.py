"""Measures the speed of a loaded model, and the bandwidth at which this machine reads memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from acclimate.host import huge_pages
from acclimate.llm.decode.description import Experts
from acclimate.llm.decode.loop import lean_decoder
from acclimate.llm.decode.modules import packed_stacks
from acclimate.llm.loading.packed_modules import FewRowLinear, PackedModule

if TYPE_CHECKING:
    import torch

    from acclimate.llm.loading.loaded_model import LoadedModel

_READ_BYTES = 256 << 20
_READS = 4
_ROUNDS = 3


@dataclass(frozen=True)
class Speed:
    """The tokens per second that the model reads and generates, over all sequences."""

    batch: int
    prompt_tokens: int
    first_token_seconds: float
    """From the prompt to the first token."""
    decode_tokens_per_second: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.batch * self.prompt_tokens / self.first_token_seconds


@dataclass(frozen=True)
class Weights:
    """The weights that one step of one sequence reads on this rank, by kernel."""

    kernels: dict[str, int]
    """The number of matrices for each kernel."""
    bytes_by_kernel: dict[str, int]
    stayed: dict[str, str]
    """The names of matrices that stayed dense, each with the reason."""

    @property
    def bytes_per_token(self) -> int:
        """The bytes of all weights that a step reads."""
        return sum(self.bytes_by_kernel.values())


def measure_speed(
    loaded: LoadedModel,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    between: Callable[[], None] = lambda: None,
) -> Speed:
    """Generates greedily from random tokens; returns medians of three runs after a warm-up run.

    `between` is called before each of the three runs and after the last.
    """
    import torch

    module = loaded.module
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, loaded.tokens, (batch, prompt_tokens), generator=random)
    ids = ids.to(loaded.accelerator.current_device_name())
    config = module.generation_config
    before = config.eos_token_id, config.pad_token_id
    config.eos_token_id, config.pad_token_id = None, 0  # no sequence ends early

    def run(tokens: int) -> tuple[float, float]:
        """Returns the seconds until the first token, and from it to the last."""
        times = _TokenTimes()
        start = time.perf_counter()
        with torch.inference_mode():
            module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                streamer=times,
            )
        _, first, *others = times.at  # before them the prompt
        return first - start, others[-1] - first

    try:
        run(2)
        rounds = []
        for _ in range(_ROUNDS):
            between()
            rounds.append(run(1 + new_tokens))
        between()
    finally:
        config.eos_token_id, config.pad_token_id = before
    first, rest = (median(seconds) for seconds in zip(*rounds, strict=True))
    return Speed(batch, prompt_tokens, first, batch * new_tokens / rest)


class _TokenTimes:
    """A streamer that records when it gets the prompt and each token, on the host."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing: the last token has come."""


class ReadBandwidth:
    """Measures how fast all threads of this process read memory, at several moments.

    Other programs, and other guests of a virtual machine, use the same memory: its bandwidth changes within
    seconds. It is measured between the runs that it is compared with, and the median counts. On the host the
    memory is on huge pages, as quantised weights are: others can be read at half the speed.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        import torch

        self._accelerator = loaded.accelerator
        self._values = torch.empty(_READ_BYTES // 4, device=loaded.accelerator.current_device_name())
        huge_pages.request(self._values)
        self._values.fill_(1.0)
        self._found: list[float] = []

    @property
    def nbytes(self) -> int:
        """The bytes that are read, which are no part of a model's memory."""
        return self._values.nbytes

    @property
    def bytes_per_second(self) -> float:
        """The median of all moments."""
        return median(self._found)

    def measure(self) -> None:
        """Reads the memory four times; the fastest counts."""
        self._found.append(self.nbytes / min(self._read() for _ in range(_READS)))

    def _read(self) -> float:
        start = time.perf_counter()
        self._values.sum()
        self._accelerator.synchronize()
        return time.perf_counter() - start


def describe_weights(model: Any) -> Weights:
    """Returns the weights that a model's step reads, and their kernels."""
    from torch import nn

    kernels: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    head = model.get_output_embeddings()
    used = _used_experts(model)
    for module in [*([head] if head is not None else []), *model.modules()]:
        for name, stack in packed_stacks(module).items():
            kernels[stack.format] += 1
            sizes[stack.format] += int(stack.nbytes * used.get((id(module), name), 1.0))
        kernel, weight = _kernel(module)
        if isinstance(module, nn.Embedding) or weight is None or id(weight) in seen:
            continue  # of an embedding, a step reads one row
        seen.add(id(weight))
        kernels[kernel] += 1
        sizes[kernel] += weight.nbytes
    shares = {
        id(parameter): used.get((id(module), name), 1.0)
        for module in model.modules()
        for name, parameter in module._parameters.items()
    }
    # A step reads one row of each, unless it is tied to the output head.
    seen |= {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        if id(parameter) not in seen:
            kernel = "torch" if parameter.dim() > 1 else "norms and biases"
            if shares[id(parameter)] < 1.0:
                kernel = f"{str(parameter.dtype).removeprefix('torch.')} by rows"
            kernels[kernel] += 1
            sizes[kernel] += int(parameter.nbytes * shares[id(parameter)])
    packing = getattr(model, "packing", None)
    return Weights(dict(kernels), dict(sizes), dict(packing.dense) if packing is not None else {})


def _used_experts(model: Any) -> dict[tuple[int, str], float]:
    """Returns the share of each weight of experts that a token uses, by module and name."""
    lean = lean_decoder(model)
    found = {}
    for layer in () if lean is None else lean.decoder.layers:
        if isinstance(layer.mlp, Experts):
            for stack in (layer.mlp.inner, layer.mlp.down):
                count = getattr(stack.module, stack.name).shape[0]
                found[id(stack.module), stack.name] = layer.mlp.router.used / count
    return found


def _kernel(module: Any) -> tuple[str, Any]:
    """Returns the name of the kernel that uses a module's weight, and the weight."""
    if isinstance(module, PackedModule):
        return module.packed.format, module.packed
    if isinstance(module, FewRowLinear):
        return f"{str(module.weight.dtype).removeprefix('torch.')} by rows", module.weight
    return "", None
