"""The rule ACC602, for native extensions for CUDA: their builds, and calls of their functions."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.source.tree import called_name, string_value, walk
from acclimate_port.source_file import SourceFile

_BUILDS = "torch.utils.cpp_extension."
_SOURCE = re.compile(r"\.cuh?$")
_MODULE = re.compile(r"_cuda(_(lib|kernels?|binding|backend|impl|ext))?$")


class NativeExtension(Rule[cst.Call]):
    """``CUDAExtension(…)``, ``quant_cuda.matmul(…)``."""

    code = "ACC602"
    name = "native-extension"
    summary = (
        'native extensions for CUDA: `CUDAExtension(…)`, `load(…, sources=["op.cu"])`, `quant_cuda.matmul(…)`'
    )
    explanation = """\
Kernels in CUDA's language need another implementation for other accelerators. The rule reports where they are built and
where a module that is named after CUDA is called, so that a port which leaves them does not look complete."""
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
        module = _module(file, node)
        if module is not None:
            return self.left(file, node, f"`{module}` is a native extension for CUDA", (node.func,))
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
    """The imported module named after CUDA whose function a call runs."""
    for full in file.tree.may_be(call.func):
        parts = full.split(".")
        found = next((part for part in parts[:-1] if _MODULE.search(part)), None)
        if found is not None and parts[0] != "torch" and parts[0] not in file.survey.modules:
            return found
    return None
