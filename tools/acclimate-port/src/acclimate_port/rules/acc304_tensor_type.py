"""The rule ACC304, for old tensor classes: `torch.cuda.FloatTensor`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.host_tensors import is_on_host
from acclimate_port.dataflow.tensor_classes import is_alias, tensor_classes, type_calls
from acclimate_port.new_code.edits import insert, replace
from acclimate_port.new_code.targets import AcclimateTarget, Missing
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, cuda_name, is_read
from acclimate_port.source.tree import called_name, has_unpacking, string_value
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile

DTYPES = {
    "FloatTensor": "float32", "HalfTensor": "float16", "DoubleTensor": "float64", "LongTensor": "int64",
    "IntTensor": "int32", "ShortTensor": "int16", "ByteTensor": "uint8", "CharTensor": "int8",
    "BoolTensor": "bool", "BFloat16Tensor": "bfloat16",
}  # fmt: skip

_MAY_MOVE = "a tensor that is on another GPU keeps its GPU, and after the edit moves to the current one"


class TensorType(Rule[cst.Call | cst.Attribute | cst.Name]):
    """``torch.cuda.FloatTensor``."""

    code = "ACC304"
    name = "tensor-type"
    summary = "old tensor classes: `torch.cuda.FloatTensor`"
    explanation = """\
`get_accelerator().FloatTensor` is the same class on CUDA, and makes tensors in the same ways elsewhere. torch has no
such classes for every device, so `--to torch` replaces a call with a list by `torch.tensor`, a call with sizes by
`torch.empty`, and a class that a name holds by a function; it leaves other uses. `x.type(torch.cuda.LongTensor)`
becomes `x.to(device, torch.int64)` if the file shows that `x` is on the host. A tensor that is on a GPU stays on that GPU,
so the edit of any other name keeps `x.device` if that is not the CPU, and the edit of another expression is unsafe.
`x.type(Tensor)` becomes `x.to(Tensor(0))`, which takes the dtype and device of an empty tensor; it is edited together with
the assignment of `Tensor`, and unsafe if `x` may be on a GPU. A `DoubleTensor` fails on hardware without
float64, such as Apple's."""
    examples = (
        Example(
            "import torch\n\n\ndef f(n):\n    return torch.cuda.FloatTensor([1.0]), torch.cuda.LongTensor(2, 3)\n",
            f"{IMPORTS}\ndef f(n):\n    return get_accelerator().FloatTensor([1.0]), get_accelerator().LongTensor(2, 3)\n",
            f"{WITH_HELPER}def f(n):\n"
            "    return torch.tensor([1.0], dtype=torch.float32, device=accelerator_type()), "
            "torch.empty(2, 3, dtype=torch.int64, device=accelerator_type())\n",
        ),
        Example(
            "import torch\n\nTensor = torch.cuda.FloatTensor if fast else torch.FloatTensor\n",
            f"{IMPORTS}Tensor = get_accelerator().FloatTensor if fast else torch.FloatTensor\n",
            f"{WITH_HELPER}Tensor = (lambda *data: torch.FloatTensor(*data).to(accelerator_type())) "
            "if fast else torch.FloatTensor\n",
        ),
        Example(
            "import torch\n\n\ndef f(x, y):\n    return x.type(torch.cuda.LongTensor)\n",
            f"{IMPORTS}\ndef f(x, y):\n"
            '    return x.to(x.device if x.device.type != "cpu" else get_accelerator().device_name(), torch.int64)\n',
            f"{WITH_HELPER}def f(x, y):\n"
            '    return x.to(x.device if x.device.type != "cpu" else accelerator_type(), torch.int64)\n',
        ),
        Example(
            "import torch\n\nTensor = torch.cuda.FloatTensor if fast else torch.FloatTensor\nx = images.type(Tensor)\n",
            f"{IMPORTS}Tensor = get_accelerator().FloatTensor if fast else torch.FloatTensor\n"
            "x = images.to(Tensor(0))\n",
            f"{WITH_HELPER}Tensor = (lambda *data: torch.FloatTensor(*data).to(accelerator_type())) "
            "if fast else torch.FloatTensor\nx = images.to(Tensor(0))\n",
        ),
    )
    nodes = (cst.Call, cst.Attribute, cst.Name)

    def check(self, file: SourceFile, node: cst.Call | cst.Attribute | cst.Name) -> Finding | None:
        if isinstance(node, cst.Call) and called_name(node) == "type" and len(node.args) == 1:
            return self._type_call(file, node)
        function = node.func if isinstance(node, cst.Call) else node
        name = cuda_name(file, function)
        if name not in DTYPES or not is_read(file, function) or file.tree.in_annotation(node):
            return None
        claims = (function,)
        if isinstance(file.target, AcclimateTarget):
            spelling = file.target.runtime(name)
            if not isinstance(spelling, Missing):
                uses = type_calls(file, function)
                if uses is None:
                    return self.left(file, node, "a function that needs a real tensor class gets it", claims)
                finding = self.convert(file, node, replace(file.span(function), spelling.text), claims=claims)
                finding.needs_applied_at = tuple(file.span(use.attr) for use in uses)
                return finding
        if not isinstance(node, cst.Call):
            parent = file.tree.parent(node)
            if isinstance(parent, cst.Call) and parent.func is node:
                return None
            uses = type_calls(file, node) if is_alias(file, node) else None
            if uses is None:
                return self.left(file, node, f"torch has no class like torch.cuda.{name} for every device")
            made = f"(lambda *data: {file.torch}.{name}(*data).to({file.target.device_type}))"
            finding = self.becomes(file, node, made, unsafe="a function replaces the class")
            finding.needs_applied_at = tuple(file.span(use.attr) for use in uses)
            return finding
        return self._made(file, node, name, claims)

    def _type_call(self, file: SourceFile, node: cst.Call) -> Finding | None:
        """``x.type(torch.cuda.LongTensor)``; ``type`` takes only classes, and acclimate has functions."""
        value, method = node.args[0].value, node.func
        if not isinstance(method, cst.Attribute) or node.args[0].keyword or node.args[0].star:
            return None
        said = string_value(value) or ""
        name = said.removeprefix("torch.cuda.") if said.startswith("torch.cuda.") else cuda_name(file, value)
        to = replace(file.span(method.attr), "to")
        is_on_one_device = is_on_host(file, method.value)
        if name in DTYPES:
            device, unsafe = file.target.device_type, ""
            if not is_on_one_device and isinstance(method.value, (cst.Name, cst.Attribute)):
                quote, tensor = file.quote(value), file.tree.source(method.value)
                device = f"{tensor}.device if {tensor}.device.type != {quote}cpu{quote} else {device}"
            elif not is_on_one_device:
                unsafe = _MAY_MOVE
            text = f"{device}, {file.torch}.{DTYPES[name]}"
            return self.convert(
                file, node, to, replace(file.span(value), text), unsafe=unsafe, claims=(value,)
            )
        classes = [kind for kind in tensor_classes(file, value) if cuda_name(file, kind) in DTYPES]
        if not classes:
            return None
        unsafe = "" if is_on_one_device else _MAY_MOVE
        finding = self.convert(file, node, to, insert(file.span(value).end, "(0)"), unsafe=unsafe)
        finding.claims, finding.needs_applied_at = (), tuple(file.span(kind) for kind in classes)
        return finding

    def _made(self, file: SourceFile, node: cst.Call, name: str, claims: tuple[cst.CSTNode, ...]) -> Finding:
        kinds = {file.values.of(argument.value).kind for argument in node.args}
        is_list = len(node.args) == 1 and isinstance(node.args[0].value, (cst.List, cst.Tuple, cst.ListComp))
        plain = not has_unpacking(node) and all(argument.keyword is None for argument in node.args)
        if not plain or not (is_list or (node.args and kinds == {Kind.NUMBER})):
            return self.left(
                file, node, f"torch.cuda.{name} takes sizes or data, and this argument may be either", claims
            )
        new = "tensor" if is_list else "empty"
        end = file.span(node.args[-1].value).end
        options = f", dtype={file.torch}.{DTYPES[name]}, device={file.target.device_type}"
        edits = (replace(file.span(node.func), f"{file.torch}.{new}"), insert(end, options))
        unsafe = ""
        return self.convert(file, node, *edits, unsafe=unsafe, claims=claims)
