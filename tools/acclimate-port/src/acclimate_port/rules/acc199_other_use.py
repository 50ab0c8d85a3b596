"""The rule ACC199, for a use of `torch.cuda` that no other rule handles."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.rules.base import Example, Finding, Rule, cuda_name, is_read
from acclimate_port.source.tree import string_value, walk
from acclimate_port.source_file import SourceFile

_WORDS = (
    (re.compile(r"(CUDA|Tensorrt)ExecutionProvider$"), "ONNX Runtime has another provider for each vendor"),
    (re.compile(r"CUDA_DEVICE_MAX_CONNECTIONS$"), "only CUDA reads this variable"),
    (re.compile(r"([\w./]*/)?nvidia-smi\b"), "the command knows NVIDIA's GPUs alone"),
    (re.compile(r"import torch\b[\s\S]*\btorch\.cuda\."), "it is code in a text, which no rule converts"),
)
"""The beginnings of strings that mean CUDA to something else than torch, and why they stay."""
_OF_NCCL = re.compile(r"(TORCH_)?NCCL_[A-Z0-9_]+$")
_OF_PROFILER = re.compile(r"(self_)?cuda_(time(_total)?|memory_usage)$")
_OF_OTHERS = re.compile(r"(^|_)cuda_(devices?|gpus?|available|count)(_\w+)?$")
"""Names of functions that ask for CUDA's devices: Lightning's ``num_cuda_devices``."""
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


_TEXTS = (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)
_Text = cst.SimpleString | cst.FormattedString | cst.ConcatenatedString
_Checked = cst.Attribute | cst.Name | cst.Call | _Text


def _beginning(text: cst.CSTNode) -> str:
    """A text up to its first field: ``"nvidia-smi --query-gpu="`` of ``f"nvidia-smi --query-gpu={x}"``."""
    if isinstance(text, cst.ConcatenatedString):
        left = _beginning(text.left)
        is_whole = string_value(text.left) is not None
        return left + _beginning(text.right) if is_whole else left
    if (whole := string_value(text)) is not None:
        return whole
    first = text.parts[0] if isinstance(text, cst.FormattedString) and text.parts else None
    return first.value if isinstance(first, cst.FormattedStringText) else ""


def _is_used(file: SourceFile, text: cst.CSTNode) -> bool:
    """Whether a string is a value, and no docstring or part of a message."""
    at = file.tree.parent(text)
    given = file.tree.given_to(text)
    return not isinstance(at, (cst.Expr, cst.ConcatenatedString)) and (
        given is None or given.name not in _PRINT
    )


class OtherUse(Rule[_Checked]):
    """Any other use of ``torch.cuda``."""

    code = "ACC199"
    name = "other-use"
    summary = "a use of `torch.cuda` that no other rule handles"
    explanation = """\
The use is reported and left, so that the report is complete. So are the version of CUDA (`torch.version.cuda`) and a
condition on the text of CUDA's error (`"CUDA out of memory" in str(e)`), with the code that it decides about, ONNX
Runtime's `"CUDAExecutionProvider"`, the variable `CUDA_DEVICE_MAX_CONNECTIONS`, the command `nvidia-smi`, a program in a
text, private functions (`torch._C._cuda_…`) and functions of other packages that ask for CUDA's devices, such as Lightning's
`num_cuda_devices()`. Variables of NCCL and a profiler's key such as `"self_cuda_time_total"`, which torch reads for each
device, need no edit."""
    examples = (Example("import torch\n\nshape = torch.cuda.CUDAGraph\n", None, None),)
    nodes = (cst.Attribute, cst.Name, cst.Call, *_TEXTS)

    def check(self, file: SourceFile, node: _Checked) -> Finding | None:
        if isinstance(node, _TEXTS):
            return self._text(file, node)
        if isinstance(node, cst.Call):
            module, _, called = (file.tree.qualified(node.func) or "").rpartition(".")
            parts = module.split(".")
            package = parts[0]
            is_own = package in ("", "torch") or file.survey.modules.issuperset(parts)
            reason = f"`{package}` asks for CUDA's devices alone"
            return self.left(file, node, reason) if _OF_OTHERS.search(called) and not is_own else None
        if not is_read(file, node):
            return None
        full = file.tree.qualified(node) or ""
        if full == "torch.version.cuda":
            return self.left(file, node, "it is the version of CUDA, which other devices do not have")
        if full.startswith("torch._C._cuda"):
            return self.left(file, node, "it is a private function of torch for CUDA alone")
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

    def _text(self, file: SourceFile, node: _Text) -> Finding | None:
        """A text that names CUDA to something else than torch."""
        text = _beginning(node)
        given = file.tree.given_to(node)
        if given is not None and given.name == "skipif" and "torch.cuda." in text:
            return self.left(file, node, "the condition is a text, which no rule converts")
        if _is_used(file, node):
            if stays := next((reason for words, reason in _WORDS if words.match(text)), ""):
                return self.left(file, node, stays)
            if _OF_NCCL.match(text):
                return self.exempt(
                    file, node, "only NCCL reads this variable, which changes nothing elsewhere"
                )
            if given is not None and _OF_PROFILER.match(text):
                return self.exempt(file, node, "torch's profiler reads the key for each kind of device")
        return self._text_of_error(file, node) if isinstance(node, cst.SimpleString) else None

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
