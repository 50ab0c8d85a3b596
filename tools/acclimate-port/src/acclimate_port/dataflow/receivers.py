"""The libraries that get a device's name: torch and what is built on it, or others with their own names."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from acclimate_port.source.tree import called_name
from acclimate_port.source_file import SourceFile

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
_PLAIN_CALLS = {"argparse", "click", "typer", "dataclasses", "os", "pytest", "functools", "pydantic", "attr"}
_DEPTH = 3


@dataclass(frozen=True)
class Receiver:
    """A library that is not known to take the names of torch's devices."""

    text: str
    may_be_torchs: bool


def foreign_receiver(file: SourceFile, value: cst.CSTNode, depth: int = _DEPTH) -> Receiver | None:
    """The library that gets a value, directly or through a name, if it is not torch or built on it."""
    holder = file.tree.parent(value)
    if isinstance(holder, (cst.IfExp, cst.BooleanOperation, cst.NamedExpr)):
        return foreign_receiver(file, holder, depth)
    if isinstance(holder, cst.Arg):
        call = file.tree.parent(holder)
        return _library(file, call) if isinstance(call, cst.Call) else None
    targets = holder.targets if isinstance(holder, cst.Assign) else []
    names = [target.target for target in targets if isinstance(target.target, (cst.Name, cst.Attribute))]
    if isinstance(holder, cst.AnnAssign) and isinstance(holder.target, cst.Name):
        names.append(holder.target)
    for name in names if depth else []:
        for use in file.tree.reads(name):
            if found := foreign_receiver(file, use, depth - 1):
                return found
    return None


def _library(file: SourceFile, call: cst.Call) -> Receiver | None:
    full = next(iter(file.tree.may_be(call.func)), "")
    package = full.partition(".")[0]
    if not package or package in _OF_TORCH | _PLAIN_CALLS or package in file.survey.modules:
        return None
    if called_name(call) in ("print", "dict") or full.startswith("."):
        return None
    if package in _OF_OTHERS:
        return Receiver(f"`{package}` has its own names of devices", may_be_torchs=False)
    return Receiver(f"nothing shows that `{package}` takes the names of torch's devices", may_be_torchs=True)
