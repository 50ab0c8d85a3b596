"""The rule ACC199, for a use of `torch.cuda` that no other rule handles."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.rules.base import Example, Finding, Rule, cuda_name, is_read
from acclimate_port.source.tree import string_value, walk
from acclimate_port.source_file import SourceFile

_NAMES = {
    "CUDAExecutionProvider": "ONNX Runtime has another provider for each vendor",
    "TensorrtExecutionProvider": "ONNX Runtime has another provider for each vendor",
    "CUDA_DEVICE_MAX_CONNECTIONS": "only CUDA reads this variable",
    "nvidia-smi": "the command knows NVIDIA's GPUs alone",
}
"""The first words of strings that mean CUDA to something else than torch, and why they stay."""
_PRINT = {
    "print",
    "info",
    "debug",
    "warning",
    "error",
    "log",
    "write",
    "format",
    "RuntimeError",
    "ValueError",
}
_ERROR = re.compile(r"\bCUDA\b.*(out of memory|error)|cuda(_| )?oom", re.IGNORECASE)


def _is_used(file: SourceFile, text: cst.CSTNode) -> bool:
    """Whether a string is a value, and no docstring or part of a message."""
    at = file.tree.parent(text)
    given = file.tree.given_to(text)
    return not isinstance(at, (cst.Expr, cst.ConcatenatedString)) and (
        given is None or given.name not in _PRINT
    )


class OtherUse(Rule[cst.Attribute | cst.Name | cst.SimpleString]):
    """Any other use of ``torch.cuda``."""

    code = "ACC199"
    name = "other-use"
    summary = "a use of `torch.cuda` that no other rule handles"
    explanation = """\
The use is reported and left, so that the report is complete. So are the version of CUDA (`torch.version.cuda`) and a
condition on the text of CUDA's error (`"CUDA out of memory" in str(e)`), with the code that it decides about, ONNX
Runtime's `"CUDAExecutionProvider"`, the variable `CUDA_DEVICE_MAX_CONNECTIONS` and the command `nvidia-smi`."""
    examples = (Example("import torch\n\nshape = torch.cuda.CUDAGraph\n", None, None),)
    nodes = (cst.Attribute, cst.Name, cst.SimpleString)

    def check(self, file: SourceFile, node: cst.Attribute | cst.Name | cst.SimpleString) -> Finding | None:
        if isinstance(node, cst.SimpleString):
            given = file.tree.given_to(node)
            if given is not None and given.name == "skipif" and "torch.cuda." in (string_value(node) or ""):
                return self.left(file, node, "the condition is a text, which no rule converts")
            text = string_value(node) or ""
            if (stays := _NAMES.get(text.partition(" ")[0])) is not None and _is_used(file, node):
                return self.left(file, node, stays)
            return self._text_of_error(file, node)
        if not is_read(file, node):
            return None
        if file.tree.qualified(node) == "torch.version.cuda":
            return self.left(file, node, "it is the version of CUDA, which other devices do not have")
        name = cuda_name(file, node)
        if name is None:
            if isinstance(node, cst.Name) and file.tree.may_be_cuda(node):
                return self.left(
                    file,
                    node,
                    f"`{node.value}` comes from torch.cuda in one branch and from elsewhere in another",
                )
            return None
        parent = file.tree.parent(node)
        if isinstance(parent, cst.Attribute) and cuda_name(file, parent) is not None:
            return None
        return self.left(
            file, node, f"no rule converts this use of torch.cuda.{name}".replace("cuda. ", "cuda ")
        )

    def _text_of_error(self, file: SourceFile, node: cst.SimpleString) -> Finding | None:
        """A condition on the text of an error: ``"CUDA out of memory" in str(e)``."""
        if not _ERROR.search(string_value(node) or ""):
            return None
        for below, around in file.tree.upwards(node):
            if isinstance(around, (cst.If, cst.IfExp, cst.While, cst.Assert)):
                if below is not around.test:
                    return None
                reason = "other devices' errors have other texts; torch.OutOfMemoryError means all of them"
                texts = (one for one in walk(below) if _ERROR.search(string_value(one) or ""))
                return self.left(file, below, reason, tuple(texts))
            if isinstance(around, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                return None
        return None
