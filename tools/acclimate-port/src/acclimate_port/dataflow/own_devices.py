"""Code of other libraries that is bound to a device which a program cannot choose by the name of another one.

Some runtimes get the memory of tensors, or the device that a tensor is on. Some functions choose CUDA or the
CPU themselves where they get no device, so what they make meets a model on another device.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import libcst as cst

from acclimate_port.dataflow.receivers import LIGHTNING, library_named, uses_lightning
from acclimate_port.dataflow.uses import class_around
from acclimate_port.source.cuda_packages import NEEDED, OPERATORS, QUERIES, RUNTIMES
from acclimate_port.source.device_choosers import BY_IMPORT
from acclimate_port.source.float64 import REASON, Float64, float64
from acclimate_port.source.torch_cuda import STREAMS
from acclimate_port.source.tree import (
    base_names,
    called_name,
    dotted,
    keyword,
    modules_of,
    packages_of,
    string_value,
    walk,
)
from acclimate_port.source_file import SourceFile, cuda_name, is_assigned, kept

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
    flag: str = ""
    """The flag by which alone it chooses CUDA."""


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
    "bert_score.score": _Choice(12, gives_model=False),
    "torch._inductor.utils.print_performance": _Choice(5, gives_model=False),
    "torch._inductor.utils.timed": _Choice(3, gives_model=False),
    "torch._inductor.utils.do_bench_using_profiling": _Choice(30, gives_model=False),
    "torch.autograd.profiler.emit_nvtx": _Choice(30, gives_model=False),
    "torch.autograd.profiler.profile": _Choice(30, gives_model=False, flag="use_cuda"),
    **dict.fromkeys(
        [
            *(f"ignite.distributed.{name}" for name in ("device", "auto_model", "auto_dataloader")),
            *(f"ray.train.torch.{name}" for name in ("get_device", "prepare_model", "prepare_data_loader")),
            "composer.Trainer",
        ],
        _Choice(30, gives_model=False),
    ),
    "catalyst.dl.SupervisedRunner": _Choice(1, gives_model=False, word="engine"),
    **{
        f"{package}.{name}": _Choice(30, gives_model=False)
        for package in ("stable_baselines3", "sb3_contrib")
        for name in ("A2C", "DDPG", "DQN", "PPO", "SAC", "TD3", "QRDQN", "TQC", "TRPO", "MaskablePPO")
    },
    "lightning.Fabric": _LIGHTNING,
    "lightning.fabric.Fabric": _LIGHTNING,
    "lightning_fabric.Fabric": _LIGHTNING,
    "lightning.Trainer": _LIGHTNING,
    "lightning.pytorch.Trainer": _LIGHTNING,
    "pytorch_lightning.Trainer": _LIGHTNING,
    "pytorch_lightning.Trainer.from_argparse_args": _LIGHTNING,
    "lightning.pytorch.cli.LightningCLI": _LIGHTNING,
    "pytorch_lightning.cli.LightningCLI": _LIGHTNING,
    "pytorch_lightning.utilities.cli.LightningCLI": _LIGHTNING,
}
_OWN_CHOICE = ("auto", "gpu", "cuda")
"""Arguments by which such a function chooses CUDA or the CPU too."""


def bound_elsewhere(file: SourceFile, node: cst.CSTNode) -> str:
    """Why a device is unsafe that other code of the file does not follow; ``""`` if there is none."""
    if found := _memory_given(file):
        line, library = found
        return f"line {line} gives memory on the device, or its name, to {library}"
    function = file.tree.function(node)
    for call, name in choosing(file):
        around = file.tree.function(call)
        is_trainer = name.partition(".")[0] in LIGHTNING
        if around is function or function is None or around is None or is_trainer:
            line = file.tree.line(file.span(call).start)
            return f"`{name}` in line {line} chooses CUDA or the CPU by itself"
    for call in _numbered(file):
        if file.tree.function(call) is function:
            line = file.tree.line(file.span(call).start)
            return f"line {line} gives the number of a device to code that was not given"
    return ""


_FOR_CATALYST = re.compile(r"(Runner|Callback|Experiment)$")
_FOR_LIGHTNING = re.compile(r"Lightning|^Callback$")


def moved_by_lightning(file: SourceFile, node: cst.CSTNode) -> str:
    """Why code of a class that Lightning moves chooses no device by itself; ``""`` if it is in none.

    Code of the module, in a file with such a class, may be its device.
    """
    own = class_around(file, node)
    is_of_catalyst = "catalyst" in file.tree.imported_packages and own is not None
    if is_of_catalyst and own is not None and any(_FOR_CATALYST.search(name) for name in base_names(own)):
        return f"catalyst chooses the device of `{own.name.value}`"
    if not uses_lightning(file):
        return ""
    held = [own] if own is not None else []
    if file.tree.function(node) is None and own is None:
        held = [*file.values.classes.values()]
    for one in held:
        names = base_names(one)
        if any(_FOR_LIGHTNING.search(name) or name == "Metric" for name in names):
            return (
                f"Lightning chooses the device of `{one.name.value}`, and knows no accelerators but its own"
            )
    return ""


def given_by_base(file: SourceFile, node: cst.CSTNode) -> str:
    """Why code of a class computes where a base class of another library chooses; ``""`` if it does not.

    The class reads ``self.device``, and no class of the file sets it.
    """
    own = class_around(file, node)
    library = (
        next((one for base in own.bases if (one := library_named(file, base.value))), None) if own else None
    )
    if own is None or library is None:
        return ""
    place = file.span(own)
    of_self = [one for one in file.attributes.get("device", ()) if dotted(one.value) == "self"]
    is_set = any(isinstance(file.tree.parent(one), (cst.AssignTarget, cst.AnnAssign)) for one in of_self)
    read = next((one for one in of_self if place.start <= file.span(one).start < place.end), None)
    if read is None or is_set:
        return ""
    line = file.tree.line(file.span(read).start)
    return f"a base class of `{own.name.value}` that was not given chooses the device of line {line}"


def computes_elsewhere(file: SourceFile) -> str:
    """Why the file runs with CUDA or on a CPU alone, by what it imports; ``""`` if it does not."""
    for statement in file.tree.imports:
        is_needed = file.tree.function(statement) is None and not any(
            isinstance(one, (cst.Try, cst.If)) for one in file.tree.ancestors(statement)
        )
        package = next((one for one in packages_of(statement) if one in NEEDED), "")
        if package and is_needed and package not in file.survey.modules:
            return f"the file imports `{package}`, which only NVIDIA GPUs run"
        if any(one[:2] == ["numba", "cuda"] for one in _modules_named(statement)):
            return "the file has kernels of numba for CUDA"
        if package_of_server := next((one for one in packages_of(statement) if one == _TRITON_SERVER), ""):
            return f"NVIDIA's server runs the file (`{package_of_server}`), on its GPUs or on a CPU"
    if chosen := chosen_by_import(file):
        package = next(one for one in packages_of(chosen[0]) if one in BY_IMPORT)
        return f"{package} chooses the device itself, and knows none but CUDA's and Apple's"
    if "ray" in file.tree.imported_packages and (asked := _asking_for_gpus(file)) is not None:
        line = file.tree.line(file.span(asked).start)
        return f"line {line} asks Ray for GPUs, which may be NVIDIA's alone"
    if (call := _made_on_host_alone(file)) is not None:
        line = file.tree.line(file.span(call).start)
        return f"line {line} gives an old class of tensors a device, and torch takes none there but a CPU"
    if (call := next(iter(operator_calls(file)), None)) is not None:
        line = file.tree.line(file.span(call).start)
        return f"line {line} computes with operators that run on a CPU and with CUDA alone"
    if (registered := next(iter(kernels_registered(file)), None)) is not None:
        line = file.tree.line(file.span(registered).start)
        return f"line {line} registers a kernel for CUDA, and other devices have none"
    if (text := next(iter(words_expected(file)), None)) is not None:
        line = file.tree.line(file.span(text).start)
        return f"line {line} looks for words that torch says of CUDA alone"
    return ""


@kept
def chosen_by_import(file: SourceFile) -> list[cst.Import | cst.ImportFrom]:
    """The imports of libraries that choose the device of all that a program computes with them."""
    found = []
    for statement in file.tree.imports if not file.tree.imported_packages.isdisjoint(BY_IMPORT) else ():
        package = next((one for one in packages_of(statement) if one in BY_IMPORT), "")
        is_optional = any(isinstance(one, (cst.Try, cst.If)) for one in file.tree.ancestors(statement))
        is_needed = file.tree.function(statement) is None and not is_optional
        if package and is_needed and package not in file.survey.modules and not _is_told(file, package):
            found.append(statement)
    return found


def _is_told(file: SourceFile, package: str) -> bool:
    """Whether a program tells a library its device: ``flair.device = device``."""
    reads = (one for one in file.attributes.get("device", ()) if is_assigned(file, one))
    return any(file.tree.qualified(one) == f"{package}.device" for one in reads)


_OF_ERRORS = re.compile(r"\bCUDA (out of memory|error)|\bcuDNN error|\bCUBLAS_|\bCUDA_ERROR")
_OF_TENSORS = re.compile(r"\bdevice=\\?['\"]cuda")
_SAID = ("CUDA", "cuDNN", "CUBLAS", "device=")


@kept
def words_expected(file: SourceFile) -> list[cst.CSTNode]:
    """The words that a program looks for in an error of CUDA, or a test in the text of a tensor."""
    if not any(word in file.tree.text for word in _SAID):
        return []
    found: list[cst.CSTNode] = []
    for text in file.tree.of_type(cst.SimpleString):
        at, value = file.tree.parent(text), string_value(text) or ""
        is_searched = isinstance(at, (cst.Comparison, cst.ComparisonTarget))
        is_compared = file.tree.around(text, cst.Comparison) is not None
        if (is_searched and _OF_ERRORS.search(value)) or (is_compared and _OF_TENSORS.search(value)):
            found.append(text)
    return found


_REGISTER = {"custom_op", "impl", "register_kernel"}


@kept
def kernels_registered(file: SourceFile) -> list[cst.Call]:
    """The calls that give an operator of the program's own a kernel for CUDA, which no other device has."""
    if _REGISTER.isdisjoint(file.names):
        return []
    found = []
    for call in file.tree.of_type(cst.Call):
        name, words = called_name(call), [string_value(one.value) for one in call.args]
        kinds = keyword(call, "device_types")
        is_one = name == "custom_op" and kinds is not None and "cuda" in file.tree.source(kinds)
        is_one = is_one or (name == "impl" and "CUDA" in words)
        if is_one or (name == "register_kernel" and "cuda" in words):
            found.append(call)
    return found


_TRITON_SERVER = "triton_python_backend_utils"
_OLD_CLASS = re.compile(r"torch\.(Float|Long|Int|Byte|Double|Half|Bool|Short|Char|BFloat16)?Tensor$")


@kept
def _made_on_host_alone(file: SourceFile) -> cst.Call | None:
    """The first call such as ``torch.LongTensor(x, device=device)``, which fails on other devices."""
    for call in file.tree.of_type(cst.Call):
        if isinstance(call.func, cst.Attribute) and call.func.attr.value.endswith("Tensor"):
            device = keyword(call, "device")
            is_host = device is None or (string_value(device.value) or "").partition(":")[0] == "cpu"
            if not is_host and _OLD_CLASS.match(file.tree.qualified(call.func) or ""):
                return call
    return None


def _asking_for_gpus(file: SourceFile) -> cst.Call | None:
    """The first call by which a program asks Ray for GPUs for its workers: ``@ray.remote(num_gpus=1)``."""
    asking = (one for one in file.tree.of_type(cst.Call) if keyword(one, "num_gpus") is not None)
    return next(asking, None)


def _modules_named(statement: cst.Import | cst.ImportFrom) -> list[list[str]]:
    """The parts of the names of the modules that a statement may import."""
    names = modules_of(statement)
    if isinstance(statement, cst.ImportFrom):
        module = dotted(statement.module) if statement.module is not None else ""
        held = [] if isinstance(statement.names, cst.ImportStar) else statement.names
        names = [module, *(f"{module}.{dotted(one.name)}" for one in held)]
    return [one.split(".") for one in names if one]


@kept
def operator_calls(file: SourceFile) -> list[cst.Call]:
    """The calls of packages whose operators run on a CPU and with CUDA alone."""
    if not any(name.partition(".")[0] in file.tree.imported_packages for name in OPERATORS):
        return []
    found = []
    for call in file.tree.of_type(cst.Call):
        full = next(iter(file.tree.may_be(call.func)), "")
        if any(f"{full}.".startswith(f"{name}.") for name in OPERATORS):
            found.append(call)
    return found


@kept
def numbers_of_64_bits(file: SourceFile) -> Float64:
    """Where the file brings numbers of 64 bits to the device."""
    return float64(file.tree.text)


def computes_in_64_bits(file: SourceFile, device: cst.CSTNode, *, may_be_host: bool) -> str:
    """Why a device may be one of Apple's, which has no numbers of 64 bits, while the host has them.

    Args:
        file: the file.
        device: what gives the device, or asks for it.
        may_be_host: whether the program takes the host where there is no CUDA.
    """
    found = numbers_of_64_bits(file)
    line = file.tree.line(file.span(device).start)
    if not may_be_host and line not in found.lines:
        return ""
    first = line if line in found.lines else min(found.on_device.values(), default=0)
    return REASON.format(place=f"line {first}") if first else ""


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
def choosing(file: SourceFile) -> list[tuple[cst.Call, str]]:
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
    if choice is _LIGHTNING:  # whatever it gets, it knows no other accelerators
        return choice.word in given and string_value(given[choice.word]) == "cpu"
    if choice.flag and (choice.flag not in given or dotted(given[choice.flag]) == "False"):
        return True
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
