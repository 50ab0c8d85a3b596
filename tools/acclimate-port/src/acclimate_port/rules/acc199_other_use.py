"""The rule ACC199, for a use of `torch.cuda` that no other rule handles."""

from __future__ import annotations

import libcst as cst

from acclimate_port.rules.base import Example, Finding, Rule, cuda_name, is_read
from acclimate_port.source_file import SourceFile


class OtherUse(Rule):
    """Any other use of ``torch.cuda``."""

    code = "ACC199"
    name = "other-use"
    summary = "a use of `torch.cuda` that no other rule handles"
    explanation = "The use is reported and left, so that the report is complete."
    examples = (Example("import torch\n\nshape = torch.cuda.CUDAGraph\n", None, None),)
    nodes = (cst.Attribute, cst.Name)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not is_read(file, node):
            return None
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
