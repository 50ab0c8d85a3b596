"""The libraries that get a device's name: torch and what is built on it, or others with their own names."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import libcst as cst

from acclimate_port.dataflow.sinks import takes_device
from acclimate_port.dataflow.uses import uses_of
from acclimate_port.source.cuda_packages import OWN_LAYERS, OWN_MODULES, OWN_OBJECTS
from acclimate_port.source.tree import called_name, dotted, last_name, modules_of, packages_of
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile, kept

_OF_TORCH = {
    *("torch", "torchvision", "torchaudio", "torchtext", "torchdata", "torchrl", "torchmetrics", "torchao"),
    *("torchtune", "torchtitan", "functorch", "torch_geometric", "torch_scatter", "torch_sparse", "ignite"),
    *("transformers", "diffusers", "accelerate", "peft", "trl", "safetensors", "timm", "optimum", "lm_eval"),
    *("deepspeed", "acclimate", "lightning", "lightning_fabric", "pytorch_lightning", "fairscale", "fairseq"),
    *("monai", "kornia", "botorch", "gpytorch", "pyro", "open_clip", "clip", "mmcv", "mmengine", "einops"),
    *("lpips", "piq", "huggingface_hub", "skorch", "flair", "stable_baselines3", "pytorch3d", "tensordict"),
    *("detectron2", "ultralytics", "segment_anything", "sentence_transformers", "nemo", "megatron"),
}
"""Packages that give a device's name to torch."""
_OF_OTHERS = {
    *("faster_whisper", "ctranslate2", "whisperx", "xgboost", "lightgbm", "catboost", "onnxruntime", "onnx"),
    *("sklearn", "spacy", "thinc", "tokenizers", "jax", "jaxlib", "tensorflow", "cupy", "cuml", "cudf"),
    *("numba", "llama_cpp", "paddle", "paddleocr", "mxnet", "openvino", "tensorrt", "warp", "taichi"),
    *("faiss", "nvidia", "cuda", "triton", "pycuda", "sherpa_onnx", "fastembed", "rapidocr"),
}
"""Packages with devices of their own, which do not know torch's names for other accelerators."""
_KNOWN = {*_OF_TORCH, *sys.stdlib_module_names, "click", "typer", "pytest", "pydantic", "attr"}
"""Packages that keep a device's name as it is, or give it to torch."""

_MODEL = re.compile(r"(^|_)(model|net|network|module)$")
"""Names of models, which are torch's also beside graphs of another library."""


@dataclass(frozen=True)
class Receiver:
    """A library that is not known to take the names of torch's devices."""

    text: str
    may_be_torchs: bool


@kept
def foreign_receiver(file: SourceFile, value: cst.CSTNode) -> Receiver | None:
    """The library that gets a value, directly or through names, if it is not torch or built on it.

    Of the libraries that get it in a function of the file, those count that have their own names of devices.
    """
    for use in uses_of(file, value, in_functions=False):
        if found := _receiver(file, use):
            return found
    for use in uses_of(file, value):
        if (found := _receiver(file, use)) and not found.may_be_torchs:
            return found
    return None


@kept
def uses_torch(file: SourceFile) -> bool:
    """Whether a file names torch, or imports a package that is built on it."""
    packages = {package for statement in file.tree.imports for package in packages_of(statement)}
    return "torch" in file.names or not _OF_TORCH.isdisjoint(packages)


def moves_for_others(file: SourceFile, device: cst.CSTNode) -> str:
    """Why a device may reach an object of another library: a move of what is not shown to be torch's.

    Such a file, or a module of the project that it imports, imports a library with objects of its own.
    """
    library = _objects_of(file)
    for use in uses_of(file, device) if library else ():
        given = file.tree.given_to(use)
        is_move = given is not None and called_name(given.call) == "to" and takes_device(given)
        if given is None or not is_move or not isinstance(given.call.func, cst.Attribute):
            continue
        moved = given.call.func.value
        is_model = library in OWN_OBJECTS and _MODEL.search(last_name(moved)) is not None
        is_torchs = file.values.of(moved).kind in (Kind.TENSOR, Kind.MODULE)
        if library_of_layers(file, moved) or not (is_model or is_torchs):
            line = file.tree.line(file.span(given.call).start)
            return f"line {line} may move an object of `{library}`, which does not run on every accelerator"
    return ""


def library_of_layers(file: SourceFile, moved: cst.CSTNode) -> str:
    """The library of sparse layers that a module may hold, in a file that imports one; or ``""``."""
    library = _objects_of(file)
    is_module = library in OWN_MODULES and file.values.of(moved).kind is not Kind.TENSOR
    return library if is_module else ""


@kept
def _objects_of(file: SourceFile) -> str:
    """The library whose objects a file may have."""
    for statement in file.tree.imports:
        is_optional = any(isinstance(one, (cst.Try, cst.If)) for one in file.tree.ancestors(statement))
        counting = OWN_OBJECTS if is_optional else (*OWN_OBJECTS, *OWN_LAYERS)
        modules = modules_of(statement)
        if found := next((one for one in packages_of(statement) if one in counting), ""):
            return found
        if isinstance(statement, cst.ImportFrom):
            module = dotted(statement.module) if statement.module is not None else ""
            held = [] if isinstance(statement.names, cst.ImportStar) else statement.names
            modules = [module, *(f"{module}.{dotted(one.name)}" for one in held)]
        for folder, name, library in file.survey.own_objects:
            for parts in (one.split(".") for one in modules):
                if parts[-1] == name and (len(parts) == 1 or not parts[-2] or parts[-2] == folder):
                    return library
    return ""


def _receiver(file: SourceFile, use: cst.CSTNode) -> Receiver | None:
    given = file.tree.given_to(use)
    if given is None:
        return None
    if given.name == "isinstance" and len(given.call.args) == 2:
        found = _library(file, given.call.args[1].value)
        return found if found is not None and not found.may_be_torchs else None
    return None if given.name in ("print", "dict") else _library(file, given.call.func)


def _library(file: SourceFile, named: cst.CSTNode) -> Receiver | None:
    """The library of a function or class."""
    full = next(iter(file.tree.may_be(named)), "")
    package = full.partition(".")[0]
    if not package or package in _KNOWN or (package in file.survey.modules and package not in _OF_OTHERS):
        return None
    if package in _OF_OTHERS:
        return Receiver(f"`{package}` has its own names of devices", may_be_torchs=False)
    return Receiver(f"nothing shows that `{package}` takes the names of torch's devices", may_be_torchs=True)
