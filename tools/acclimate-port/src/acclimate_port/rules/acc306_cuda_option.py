"""The rule ACC306, for options of CUDA's libraries: `torch.backends.cudnn.benchmark`, `allow_tf32`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.rules.base import Example, Finding, Rule, is_assigned
from acclimate_port.source_file import SourceFile

_LIBRARIES = ("torch.backends.cudnn", "torch.backends.cuda")
_FLAGS = {"allow_tf32", "benchmark", "deterministic", "fp32_precision"}
"""Options that a program reads to set them again later; each machine has them."""


class CudaOption(Rule[cst.Attribute]):
    """``torch.backends.cudnn.benchmark = True``."""

    code = "ACC306"
    name = "cuda-option"
    summary = "options of CUDA's libraries: `torch.backends.cudnn.benchmark`, `allow_tf32`"
    explanation = """\
Only CUDA reads the options of `torch.backends.cudnn` and `torch.backends.cuda`; elsewhere torch accepts and ignores them,
so an assignment stays and does not count as left, and so does a program that reads `allow_tf32`, `benchmark` or
`deterministic` to set it again. `torch.set_float32_matmul_precision("high")` is what `allow_tf32` does
on other devices. A program that asks these modules, such as `torch.backends.cudnn.version()`, is reported."""
    examples = (
        Example("import torch\n\ntorch.backends.cudnn.benchmark = True\n", None, None),
        Example("import torch\n\nprint(torch.backends.cudnn.version())\n", None, None),
    )
    nodes = (cst.Attribute,)

    def check(self, file: SourceFile, node: cst.Attribute) -> Finding | None:
        if not (file.tree.qualified(node) or "").startswith(_LIBRARIES):
            return None
        outer: cst.CSTNode = node
        inner: tuple[cst.CSTNode, ...] = ()
        while isinstance(above := file.tree.parent(outer), cst.Attribute) and above.value is outer:
            inner, outer = (*inner, outer), above
        if is_assigned(file, outer) or (isinstance(outer, cst.Attribute) and outer.attr.value in _FLAGS):
            return self.exempt(file, outer, "only CUDA reads this option", inner)
        return self.left(file, outer, "only CUDA has these libraries; test for the feature instead", inner)
