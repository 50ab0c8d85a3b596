"""The rule ACC602, for native extensions for CUDA: their builds, and calls of their functions."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.source.cuda_packages import CUDA_PACKAGES
from acclimate_port.source.tree import called_name, string_value, walk
from acclimate_port.source_file import SourceFile

_BUILDS = "torch.utils.cpp_extension."
_SOURCE = re.compile(r"\.cuh?$")
_MODULE = re.compile(r"\w+cuda(_(lib|kernels?|binding|backend|impl|ext|ops?))?$")
_FLAG = re.compile(r"(^|_)(use|uses|is|has|no|with|to|on)_?cuda", re.IGNORECASE)
_ENGINE = re.compile(r"_cuda_engine$")


class NativeExtension(Rule[cst.Call]):
    """``CUDAExtension(…)``, ``quant_cuda.matmul(…)``."""

    code = "ACC602"
    name = "native-extension"
    summary = (
        'native extensions for CUDA: `CUDAExtension(…)`, `load(…, sources=["op.cu"])`, `quant_cuda.matmul(…)`'
    )
    explanation = """\
Kernels in CUDA's language need another implementation for other accelerators. The rule reports where they are built and
where a module that is named after CUDA is called, also one that a function of the program gives, packages that only NVIDIA
GPUs run (`transformer_engine.pytorch.fp8_autocast()`), and engines of TensorRT, so that a port which leaves them does not
look complete."""
    examples = (
        Example("import quant_cuda\n\n\ndef f(x, y):\n    return quant_cuda.matmul(x, y)\n", None, None),
        Example(
            "from torch.utils.cpp_extension import load\n\n\ndef f():\n"
            '    return load(name="op", sources=["op.cpp", "op.cu"])\n',
            None,
            None,
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        if _builds_for_cuda(file, node):
            return self.left(file, node, "it builds a native extension for CUDA")
        if _ENGINE.search(called_name(node) or ""):
            return self.left(file, node, "only TensorRT has engines for CUDA", (node.func,))
        called = file.tree.qualified(node.func) or ""
        package = called.partition(".")[0]
        if package in CUDA_PACKAGES and called.rpartition(".")[0] not in file.survey.for_torch:
            reason = f"only NVIDIA GPUs run the package `{package}`"
            return self.left(file, node, reason, (node.func,), stands_alone=True)
        module = _module(file, node)
        if module is not None:
            return self.left(file, node, f"`{module}` is a module for CUDA", (node.func,))
        return None


def _builds_for_cuda(file: SourceFile, call: cst.Call) -> bool:
    name = called_name(call)
    if name == "CUDAExtension":
        return True
    if not (file.tree.qualified(call.func) or "").startswith(_BUILDS):
        return False
    texts = (string_value(part) or "" for part in walk(call))
    return any(_SOURCE.search(text) for text in texts) or any(
        argument.keyword is not None and argument.keyword.value in ("cuda_sources", "extra_cuda_cflags")
        for argument in call.args
    )


def _module(file: SourceFile, call: cst.Call) -> str | None:
    """The module named after CUDA whose function a call runs: it is imported, or a call gives it."""
    for full in file.tree.may_be(call.func):
        parts = full.split(".")[:-1]
        if parts[:1] == ["torch"]:
            continue
        found = next((one for one in parts if _is_for_cuda(one)), None)
        if found is not None and found not in file.survey.modules:
            return found
    held = call.func.value if isinstance(call.func, cst.Attribute) else None
    if isinstance(held, cst.Name) and _is_for_cuda(held.value):
        values = file.bound_values(held)
        is_given = bool(values) and all(isinstance(value, cst.Call) for value in values)
        return held.value if is_given and file.tree.qualified(held) is None else None
    return None


def _is_for_cuda(module: str) -> bool:
    """Whether a module is one for CUDA by its name, and no flag that says whether to use CUDA."""
    return _MODULE.search(module) is not None and not _FLAG.search(module)
