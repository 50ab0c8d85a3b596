"""The rule ACC505, for `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`, `torch.nn.SyncBatchNorm(n)`."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.new_code.edits import insert
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Example, Finding, Rule, is_read
from acclimate_port.rules.comparison_edits import host_guard
from acclimate_port.source.tree import called_name, dotted, keyword, positional, walk
from acclimate_port.source_file import SourceFile

_SYNC_BATCH_NORM = {
    *("torch.nn.SyncBatchNorm", "torch.nn.modules.batchnorm.SyncBatchNorm"),
    *("torch.nn.modules.SyncBatchNorm",),
}
_ASK_FOR_CLASS = {"isinstance", "issubclass"}
_OF_DIMENSIONS = re.compile(
    r"^(?:Conv|ConvTranspose|BatchNorm|MaxPool|AvgPool|AdaptiveAvgPool|Dropout)([123])d$"
)
_BEFORE_GROUP = 5
_STATE_OF_LAYER = {"running_mean", "running_var", "num_batches_tracked"}
_NAME_OF_SYNC = re.compile(r"^Sync(?:BatchNorm|BN)", re.IGNORECASE)


class SyncBatchNorm(Rule[cst.Call | cst.Attribute | cst.Name]):
    """``torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)``."""

    code = "ACC505"
    name = "sync-batch-norm"
    summary = "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`, `torch.nn.SyncBatchNorm(n)`"
    explanation = """\
`SyncBatchNorm` raises on a CPU, so there the model keeps its layers, and each rank computes batch statistics over its
own part of the batch. In a process group it raises on Apple's GPUs too, which `--to acclimate` treats the same: a Mac
has one of them, so the statistics are those of the whole batch. If the model is an expression and not a name, the test chooses the function instead, so that the
model is evaluated once.

If a program creates the layer itself, the edit uses `BatchNorm1d`, `2d` or `3d` on a CPU, with the same parameters.
The file's other layers tell which one, so the edit is unsafe; if they do not, the layer is left. A layer with a
process group is left too, and so are the program's own conversion functions and subclasses, whose parts must match."""
    examples = (
        Example(
            "import torch\nfrom torch import nn\n\n\ndef f(m):\n    return nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
            "import torch\nfrom acclimate import get_accelerator\nfrom torch import nn\n\n\ndef f(m):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm(m) "
            'if get_accelerator().device_name() not in ("cpu", "mps") else m)\n',
            "import torch\nfrom torch import nn\n\n\ndef f(m):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm(m) if torch.accelerator.is_available() else m)\n",
        ),
        Example(
            "import torch\nfrom torch import nn\n\n\ndef f(make):\n"
            "    return nn.SyncBatchNorm.convert_sync_batchnorm(make())\n",
            "import torch\nfrom acclimate import get_accelerator\nfrom torch import nn\n\n\ndef f(make):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm "
            'if get_accelerator().device_name() not in ("cpu", "mps") else lambda module: module)(make())\n',
            "import torch\nfrom torch import nn\n\n\ndef f(make):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm "
            "if torch.accelerator.is_available() else lambda module: module)(make())\n",
        ),
    )
    nodes = (cst.Call, cst.Attribute, cst.Name)

    def check(self, file: SourceFile, node: cst.Call | cst.Attribute | cst.Name) -> Finding | None:
        if isinstance(node, (cst.Attribute, cst.Name)):
            return self._layer(file, node)
        if not isinstance(node, cst.Call) or called_name(node) != "convert_sync_batchnorm":
            return None
        if not (file.tree.qualified(node.func) or "").startswith("torch.nn."):
            return None
        above = file.tree.parent(node)
        if (isinstance(above, cst.IfExp) and above.body is node) or not node.args or node.args[0].star:
            return None
        if file.target.name == "torch" and file.is_guarded(node):
            return None
        model = node.args[0].value
        condition = _where_it_runs(file, '"')
        # Other rules still edit the code inside the call, such as a process group.
        around: cst.BaseExpression = node
        same = dotted(model)
        if not same or same.startswith("."):
            rest = "" if len(node.args) == 1 else ", process_group=None"
            around, same = node.func, f"lambda module{rest}: module"
        place = file.span(around)
        edits = (insert(place.start, "("), insert(place.end, f" if {condition} else {same})"))
        finding = self.convert(file, node, *edits)
        finding.claims = ()
        return finding

    def _layer(self, file: SourceFile, node: cst.Attribute | cst.Name) -> Finding | None:
        """The class itself, which a program calls, or passes as the type of layer to create."""
        if file.tree.qualified(node) not in _SYNC_BATCH_NORM or not is_read(file, node):
            return None
        below: cst.CSTNode = node
        at = file.tree.parent(node)
        while isinstance(at, (cst.IfExp, cst.BooleanOperation)) and below is not getattr(at, "test", None):
            if isinstance(at, cst.IfExp) and "device_name()" in file.tree.source(at.test):
                return None
            below, at = at, file.tree.parent(at)
        call = at if isinstance(at, cst.Call) else file.tree.parent(at) if isinstance(at, cst.Arg) else None
        is_made = isinstance(call, cst.Call) and call.func is node
        is_given = isinstance(call, cst.Call) and called_name(call) not in _ASK_FOR_CLASS
        if (
            not is_made
            and not is_given
            and not isinstance(at, (cst.Assign, cst.Param, cst.Return, cst.DictElement))
        ):
            return None
        if file.target.name == "torch" and file.is_guarded(node):
            return None
        dimensions = {found[1] for name in file.names if (found := _OF_DIMENSIONS.search(name))}
        takes_group = isinstance(call, cst.Call) and is_made and _takes_group(call)
        if len(dimensions) != 1 or takes_group:
            reason = "it raises on a CPU, and the shape of its input decides which BatchNorm can replace it"
            return self.left(file, node, reason)
        if _has_own_conversion(file, node):
            reason = "it is part of the program's own conversion, whose parts must match"
            return self.left(file, node, reason)
        condition = _where_it_runs(file, file.quote(node))
        plain = f"{file.torch}.nn.BatchNorm{dimensions.pop()}d"
        unsafe = "the shape of its input is inferred from the file's other layers"
        return self.becomes(file, node, "(", file.span(node), f" if {condition} else {plain})", unsafe=unsafe)


def _where_it_runs(file: SourceFile, quote: str) -> str:
    """The target's condition for the layer, which in a process group raises on Apple's GPUs as on a CPU.

    acclimate has a process group there, of one device, in which an ordinary layer gives the same. torch has none.
    """
    if isinstance(file.target, AcclimateTarget):
        return f"{file.target.device_type} not in ({quote}cpu{quote}, {quote}mps{quote})"
    return host_guard(file, quote)


def _takes_group(call: cst.Call) -> bool:
    """Whether a layer gets a process group, its sixth argument, which ``BatchNorm2d`` lacks."""
    return (
        keyword(call, "process_group") is not None
        or len(positional(call)) > _BEFORE_GROUP
        or any(argument.star == "*" for argument in call.args)
    )


def _has_own_conversion(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether the program subclasses the layer, or converts layers itself as torch's function does."""
    classes = file.values.classes.values()
    if any(file.tree.qualified(base.value) in _SYNC_BATCH_NORM for kind in classes for base in kind.bases):
        return True
    function = file.tree.around(node, cst.FunctionDef)
    if function is None:
        return False
    names = [descendant for descendant in walk(function.body) if isinstance(descendant, cst.Name)]
    words = {name.value for name in names}
    asks_for_any = "_BatchNorm" in words and bool(words & _ASK_FOR_CLASS)
    return asks_for_any or bool(words & _STATE_OF_LAYER) or any(_makes_own(file, name) for name in names)


def _makes_own(file: SourceFile, name: cst.Name) -> bool:
    """Whether a call creates a synchronised layer that is not torch's."""
    call = file.tree.parent(name)
    is_made = isinstance(call, cst.Call) and call.func is name and name.value[:1].isupper()
    return (
        is_made
        and _NAME_OF_SYNC.search(name.value) is not None
        and file.tree.qualified(name) not in _SYNC_BATCH_NORM
    )
