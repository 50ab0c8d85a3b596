"""The rule ACC302, for `x.is_cuda`."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.cuda_only import chooses_for_library
from acclimate_port.conditions.device_counts import ends_without
from acclimate_port.conditions.host_answers import kinds_apart
from acclimate_port.new_code.edits import Part
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.acc301_cuda_method import is_torch_object
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, is_assigned
from acclimate_port.rules.comparison_edits import HOST_CHANGES, host_test
from acclimate_port.source.tree import called_name, walk
from acclimate_port.source_file import SourceFile

_OWN_OBJECTS = re.compile(
    r"^(self|cls|args|opt|opts|options|cfg|config|conf|hparams|hps|FLAGS|params|flags)$"
)


class IsCuda(Rule[cst.Attribute]):
    """``x.is_cuda``."""

    code = "ACC302"
    name = "is-cuda"
    summary = "`x.is_cuda`"
    explanation = """\
`x.is_cuda` becomes a comparison of the device type with `"cpu"`, since it must stay false on a CPU; if the program would
otherwise end (`assert x.is_cuda`), it becomes `get_accelerator().on_accelerator(x)`, which is true there. Both are unsafe.
An attribute
`is_cuda` of `self` or of a program's options is left, and so is a test that guards CUDA kernels, as in
[ACC204](ACC204.md). In code that TorchScript compiles, both targets compare the device type."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x: torch.Tensor):\n    assert x.is_cuda\n",
            f"{IMPORTS}\ndef f(x: torch.Tensor):\n    assert get_accelerator().on_accelerator(x)\n",
            f"{WITH_HELPER}def f(x: torch.Tensor):\n    assert x.device.type == accelerator_type()\n",
        ),
        Example(
            "import torch\n\n\ndef f(x: torch.Tensor):\n    return x.half() if x.is_cuda else x\n",
            'import torch\n\n\ndef f(x: torch.Tensor):\n    return x.half() if (x.device.type != "cpu") else x\n',
            'import torch\n\n\ndef f(x: torch.Tensor):\n    return x.half() if (x.device.type != "cpu") else x\n',
        ),
        Example("def f(args):\n    return args.is_cuda\n", None, None),
    )
    nodes = (cst.Attribute,)

    def check(self, file: SourceFile, node: cst.Attribute) -> Finding | None:
        if node.attr.value != "is_cuda":
            return None
        if file.tree.qualified(node) is not None:
            return None
        parent = file.tree.parent(node)
        own = isinstance(node.value, cst.Name) and _OWN_OBJECTS.match(node.value.value)
        if is_assigned(file, node) or own or (isinstance(parent, cst.Call) and parent.func is node):
            return self.exempt(file, node, "an attribute that the program defines")
        if _is_something_else(file, node):
            return self.left(file, node, "`isinstance` beside it names a class that is not a tensor")
        if (library := chooses_for_library(file, node)) is not None:
            return self.left(file, node, library)
        if isinstance(parent, cst.FormattedStringExpression):
            return self.exempt(file, node, "it is part of a message")
        unsafe = "" if is_torch_object(file, node.value) else "it may not be a tensor"
        value = file.span(node.value)
        if ends_without(file, node) and not file.torchscript.holds(node):
            if isinstance(file.target, AcclimateTarget):
                parts: tuple[Part, ...] = (f"{file.target.accelerator}.on_accelerator(", value, ")")
            else:
                parts = (value, f".device.type == {file.target.device_type}")
            unsafe = unsafe or HOST_CHANGES
        else:
            unsafe = unsafe or "a tensor may also be on a device without memory, such as meta"
            kinds = kinds_apart(file, node)
            parts = ("(", value, f".device.type {host_test(file.quote(node), kinds)})")
        if node.lpar:
            parts = ("(", *parts, ")")
        return self.becomes(file, node, *parts, unsafe=unsafe)


def _is_something_else(file: SourceFile, question: cst.Attribute) -> bool:
    """Whether the code shows that ``x`` is not a tensor: ``isinstance(x, Data) and x.is_cuda``."""
    at = file.tree.parent(question)
    held = file.tree.source(question.value)
    while isinstance(at, cst.BooleanOperation):
        for descendant in walk(at):
            if (
                not isinstance(descendant, cst.Call)
                or called_name(descendant) != "isinstance"
                or len(descendant.args) != 2
            ):
                continue
            if file.tree.source(descendant.args[0].value) == held:
                return (
                    re.search(r"Tensor|Parameter|Storage", file.tree.source(descendant.args[1].value)) is None
                )
        at = file.tree.parent(at)
    return False
