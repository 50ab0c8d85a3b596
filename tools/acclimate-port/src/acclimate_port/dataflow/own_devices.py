"""Code of other libraries that is bound to a device which a program cannot choose by the name of another one.

Some runtimes get the memory of tensors, or the device that a tensor is on. Some functions choose CUDA or the
CPU themselves where they get no device, so what they make meets a model on another device.
"""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst

from acclimate_port.dataflow.receivers import library_named
from acclimate_port.source.cuda_packages import QUERIES, RUNTIMES
from acclimate_port.source.torch_cuda import STREAMS
from acclimate_port.source.tree import dotted, keyword, packages_of, string_value, walk
from acclimate_port.source_file import SourceFile, cuda_name, kept

_GET_MEMORY = {name: text for name, text in RUNTIMES.items() if text not in QUERIES} | {
    "onnxruntime": "ONNX Runtime"
}
"""Packages that compute with the memory of torch's tensors."""
_MEMORY = ("data_ptr", "__cuda_array_interface__")
_TAKE_MEMORY = ("execute_v2", "execute_async_v2", "execute_async_v3", "set_tensor_address")
"""Methods of TensorRT that get the addresses of tensors."""
_TAKE_DEVICE = (
    *("bind_input", "bind_output", "bind_ortvalue_input", "ortvalue_from_numpy"),
    "ortvalue_from_shape_and_type",
)
"""Functions of ONNX Runtime that get the name of a device."""


class _Choice(NamedTuple):
    """A function that chooses CUDA or the CPU itself if it gets no device."""

    position: int
    """The position of the device among its arguments."""
    gives_model: bool
    """Whether its result may be moved afterwards."""
    word: str = "device"
    """The name of that argument."""


_LIGHTNING = _Choice(0, gives_model=False, word="accelerator")
"""Lightning knows no devices but those of CUDA, Apple and TPUs, also by ``accelerator="auto"``."""


_NUMBERS = ("device_id", "device_index", "gpu_id", "gpu", "gpu_index", "local_rank")
"""Arguments that are the number of a device."""
_CHOOSE = {
    "torchsummary.summary": _Choice(3, gives_model=False),
    "torchsummary.torchsummary.summary": _Choice(3, gives_model=False),
    "torchsummary.summary_string": _Choice(3, gives_model=False),
    "clip.load": _Choice(1, gives_model=True),
    "whisper.load_model": _Choice(1, gives_model=True),
    "realesrgan.RealESRGANer": _Choice(8, gives_model=False),
    "gfpgan.GFPGANer": _Choice(5, gives_model=False),
    "stable_baselines3.common.utils.get_device": _Choice(0, gives_model=True),
    "lightning.Fabric": _LIGHTNING,
    "lightning.fabric.Fabric": _LIGHTNING,
    "lightning_fabric.Fabric": _LIGHTNING,
    "lightning.Trainer": _LIGHTNING,
    "lightning.pytorch.Trainer": _LIGHTNING,
    "pytorch_lightning.Trainer": _LIGHTNING,
}
_OWN_CHOICE = ("auto", "gpu", "cuda")
"""Arguments by which such a function chooses CUDA or the CPU too."""


def bound_elsewhere(file: SourceFile, node: cst.CSTNode) -> str:
    """Why a device is unsafe that other code of the file does not follow; ``""`` if there is none."""
    if found := _memory_given(file):
        line, library = found
        return f"line {line} gives memory on the device, or its name, to {library}"
    function = file.tree.function(node)
    for call, name in _choosing(file):
        around = file.tree.function(call)
        if around is function or function is None or around is None:
            line = file.tree.line(file.span(call).start)
            return f"`{name}` in line {line} chooses CUDA or the CPU by itself"
    for call in _numbered(file):
        if file.tree.function(call) is function:
            line = file.tree.line(file.span(call).start)
            return f"line {line} gives the number of a device to code that was not given"
    return ""


@kept
def _numbered(file: SourceFile) -> list[cst.Call]:
    """The calls of other libraries that get the number of a device, which may choose CUDA's by it."""
    found = []
    for call in file.tree.of_type(cst.Call):
        given = [one for word in _NUMBERS if (one := keyword(call, word)) is not None]
        is_given = any(dotted(one.value) != "None" for one in given)
        if is_given and library_named(file, call.func) is not None:
            found.append(call)
    return found


@kept
def _memory_given(file: SourceFile) -> tuple[int, str] | None:
    """The line in which a library gets a tensor's memory or device, and the library."""
    if (launched := _launched(file)) is not None:
        return file.tree.line(file.span(launched).start), "a kernel that gets a stream of CUDA"
    imported = (package for statement in file.tree.imports for package in packages_of(statement))
    library = next((_GET_MEMORY[one] for one in imported if one in _GET_MEMORY), "")
    if not library:
        return None
    read = [one for name in (*_MEMORY, *_TAKE_MEMORY) for one in file.attributes.get(name, ())]
    given: list[cst.CSTNode] = [one for one in read if file.tree.around(one, cst.Comparison) is None]
    for name in _TAKE_DEVICE:
        calls = (file.tree.parent(one) for one in file.attributes.get(name, ()))
        given += [call for call in calls if isinstance(call, cst.Call) and _names_device(call)]
    return (min(file.tree.line(file.span(one).start) for one in given), library) if given else None


def _launched(file: SourceFile) -> cst.Call | None:
    """The first call that gets a stream of CUDA and the memory of tensors: it starts a kernel."""
    if file.names.isdisjoint(STREAMS) or "data_ptr" not in file.names:
        return None
    for call in file.tree.of_type(cst.Call):
        parts = [part for argument in call.args for part in walk(argument.value)]
        has_memory = any(isinstance(one, cst.Attribute) and one.attr.value == "data_ptr" for one in parts)
        if has_memory and any(_is_stream(file, one) for one in parts):
            return call
    return None


def _is_stream(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether an expression is a stream of torch.cuda, directly or through a name."""
    held = file.bound_values(node) if isinstance(node, cst.Name) else [node]
    return any(isinstance(one, cst.Call) and cuda_name(file, one.func) in STREAMS for one in held)


def _names_device(call: cst.Call) -> bool:
    """Whether a call gets the device of a tensor: ``x.device.type``, ``str(x.device)``."""
    values = [argument.value for argument in call.args]
    values += [one.args[0].value for one in values if isinstance(one, cst.Call) and one.args]
    ends = (dotted(one).rpartition(".")[2] for one in values if isinstance(one, cst.Attribute))
    return any(end in ("type", "device", "index") for end in ends)


@kept
def _choosing(file: SourceFile) -> list[tuple[cst.Call, str]]:
    """The calls of functions that choose the device themselves, without a device, and their names."""
    packages = {package for statement in file.tree.imports for package in packages_of(statement)}
    own = {name.partition(".")[0] for name in _CHOOSE} & packages - file.survey.modules
    found = []
    for call in file.tree.of_type(cst.Call) if own else ():
        name = next((one for one in file.tree.may_be(call.func) if one in _CHOOSE), "")
        if name.partition(".")[0] not in own or _gets_device(call, _CHOOSE[name]):
            continue
        if not (_CHOOSE[name].gives_model and _is_moved(file, call)):
            found.append((call, name))
    return found


def _gets_device(call: cst.Call, choice: _Choice) -> bool:
    given = {one.keyword.value: one.value for one in call.args if one.keyword is not None}
    if choice.word in given and string_value(given[choice.word]) in _OWN_CHOICE:
        return False
    is_open = any(one.star for one in call.args)
    return choice.word in given or is_open or len(call.args) - len(given) > choice.position


def _is_moved(file: SourceFile, call: cst.Call) -> bool:
    """Whether the program moves what a call gives: ``model, _ = clip.load(name)``, ``model.to(device)``."""
    at = file.tree.parent(call)
    if isinstance(at, cst.Attribute):
        return at.attr.value in ("to", "cuda")
    if not isinstance(at, cst.Assign):
        return False
    target = at.targets[0].target
    first = target.elements[0].value if isinstance(target, cst.Tuple) else target
    reads = file.tree.reads(first) if isinstance(first, (cst.Name, cst.Attribute)) else []
    used = (file.tree.parent(one) for one in reads)
    return any(isinstance(one, cst.Attribute) and one.attr.value in ("to", "cuda") for one in used)
