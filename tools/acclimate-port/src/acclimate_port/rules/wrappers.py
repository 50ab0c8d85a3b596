"""Rules for wrappers and conversions of a whole model for training on several devices."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.dataflow.origins import Origin, origin_of
from acclimate_port.new_code.added_functions import ON_ANY_DEVICE
from acclimate_port.new_code.edits import insert
from acclimate_port.rules.base import WITH_HELPER, Example, Finding, Rule, is_read
from acclimate_port.rules.comparison_edits import host_guard, host_test
from acclimate_port.rules.devices import unsafe_at_import
from acclimate_port.source.tree import called_name, dotted, keyword, positional, string_value, walk
from acclimate_port.source.values import Kind, methods
from acclimate_port.source_file import SourceFile

_DATA_PARALLEL = {
    *("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"),
    "torch.nn.parallel.data_parallel.DataParallel",
}
_STEPS = {
    *("torch.nn.parallel.data_parallel", "torch.nn.parallel.data_parallel.data_parallel"),
    *(f"torch.nn.parallel.{name}" for name in ("scatter", "gather", "replicate")),
    *("torch.nn.parallel.scatter_gather.scatter", "torch.nn.parallel.scatter_gather.scatter_kwargs"),
    *("torch.nn.parallel.scatter_gather.gather", "torch.nn.parallel.replicate.replicate"),
}
_SYNC_BATCH_NORM = {
    "torch.nn.SyncBatchNorm",
    "torch.nn.modules.batchnorm.SyncBatchNorm",
    "torch.nn.modules.SyncBatchNorm",
}
_ASK_FOR_CLASS = {"isinstance", "issubclass"}
_OF_DIMENSIONS = re.compile(
    r"^(?:Conv|ConvTranspose|BatchNorm|MaxPool|AvgPool|AdaptiveAvgPool|Dropout)([123])d$"
)
_BEFORE_GROUP = 5
_STATE_OF_LAYER = {"running_mean", "running_var", "num_batches_tracked"}
_NAME_OF_SYNC = re.compile(r"^Sync(?:BatchNorm|BN)", re.IGNORECASE)
_STEPS_OF_A_CLASS = {"forward", "scatter", "gather", "replicate", "parallel_apply"}


class DataParallel(Rule):
    """``torch.nn.DataParallel(model)``."""

    code = "ACC506"
    name = "data-parallel"
    summary = "`torch.nn.DataParallel(model)`"
    explanation = """\
torch splits a batch over CUDA devices only; on another accelerator the first step fails, even with one device. The edit
keeps torch's object, and on CUDA nothing changes. Elsewhere the device of the model's parameters gets the whole batch,
and the inputs are moved there, as torch does on CUDA. To use several devices other than CUDA, a program needs
`DistributedDataParallel`.

A subclass with its own `scatter`, `gather` or `forward` is left, and so are `torch.nn.parallel.data_parallel` and
the functions that it calls: without CUDA a program should call the module directly."""
    examples = (
        Example(
            "import torch\n\n\ndef f(model):\n    return torch.nn.DataParallel(model).cuda()\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            + ON_ANY_DEVICE.replace("{device_type}", "get_accelerator().device_name()")
            + "\n\ndef f(model):\n    return on_any_device(torch.nn.DataParallel(model))"
            ".to(get_accelerator().device_name())\n",
            WITH_HELPER
            + ON_ANY_DEVICE.replace("{device_type}", "accelerator_type()")
            + "\n\ndef f(model):\n    return on_any_device(torch.nn.DataParallel(model)).to(accelerator_type())\n",
        ),
        Example(
            "import torch\n\n\ndef f(model, x):\n    return torch.nn.parallel.data_parallel(model, x)\n",
            None,
            None,
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.Call):
            return None
        name = file.tree.qualified(node.func)
        if name in _STEPS:
            reason = "torch splits a batch over CUDA devices only; elsewhere call the module directly"
            return self.left(file, node, reason, (node.func,))
        definitions = _own_data_parallel(file, node.func)
        if name not in _DATA_PARALLEL and not definitions:
            return None
        holder = file.tree.parent(node)
        around = file.tree.parent(holder) if isinstance(holder, cst.Arg) else None
        if isinstance(around, cst.Call) and called_name(around) == file.on_any_device:
            return None
        if any(methods(definition) & _STEPS_OF_A_CLASS for definition in definitions):
            reason = "its class splits a batch itself, and torch does that over CUDA devices only"
            return self.left(file, node, reason)
        place = file.span(node)
        edits = insert(place.start, f"{file.on_any_device}("), insert(place.end, ")")
        finding = self.convert(file, node, *edits, unsafe=unsafe_at_import(file, node))
        finding.claims = ()
        return finding


def _own_data_parallel(file: SourceFile, name: cst.BaseExpression) -> list[cst.ClassDef]:
    """The classes of the file that a name may be, if each is a subclass of torch's ``DataParallel``."""
    bound = (
        [assignment.node for assignment in file.tree.assignments(name)] if isinstance(name, cst.Name) else []
    )
    own = [
        definition
        for definition in bound
        if isinstance(definition, cst.ClassDef) and _is_data_parallel(file, definition)
    ]
    return own if len(own) == len(bound) else []


def _is_data_parallel(file: SourceFile, definition: cst.ClassDef) -> bool:
    return any(file.tree.qualified(base.value) in _DATA_PARALLEL for base in definition.bases)


class DeviceIds(Rule):
    """``DistributedDataParallel(model, device_ids=[rank])``."""

    code = "ACC502"
    name = "device-ids"
    summary = "`device_ids` of `DistributedDataParallel`, `device_id` of `init_process_group`"
    explanation = """\
On a CPU, `device_ids` and `output_device`, and `device_id` of `init_process_group`, must be `None`; `device_id` must be
`None` on Apple's devices too, whose ranks use Gloo. On CUDA they stay: they also make the wrapper move its inputs. The
rule finds them as arguments and in a dictionary passed as `**options`. `device_ids` of `barrier` stay, since every
backend takes them from torch 2.10 on.

A class or function of the same name from elsewhere, such as apex or the repository itself, is left. If the file's
imports and definitions do not show where it comes from, keyword arguments are edited, which is unsafe, and
positional arguments stay."""
    examples = (
        Example(
            "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
            "def f(model, rank):\n    return DDP(model, device_ids=[rank])\n",
            "import torch\nfrom acclimate import get_accelerator\n"
            "from torch.nn.parallel import DistributedDataParallel as DDP\n\n\ndef f(model, rank):\n"
            '    return DDP(model, device_ids=[rank] if get_accelerator().device_name() != "cpu" else None)\n',
            "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\ndef f(model, rank):\n"
            "    return DDP(model, device_ids=[rank] if torch.accelerator.is_available() else None)\n",
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.Call):
            return None
        is_partial = file.tree.qualified(node.func) == "functools.partial" and bool(node.args)
        function = node.args[0].value if is_partial else node.func
        name = (file.tree.qualified(function) or dotted(function)).rpartition(".")[2]
        if name not in ("DistributedDataParallel", "DDP", "init_process_group"):
            return None
        if file.is_guarded(node) and file.target.name == "torch":
            return None
        origin = origin_of(file, function)
        unknown = f"nothing here shows that `{name}` is torch's" if origin is Origin.UNKNOWN else ""
        joins = name == "init_process_group"
        words = ("device_id",) if joins else ("device_ids", "output_device")
        values = [value for word in words for value in _given(file, node, word)]
        by_position = [] if joins else [argument.value for argument in positional(node)[1:3]]
        if not is_partial and origin is not Origin.OTHER:
            values += by_position
        values = [device for device in values if _may_be_a_device(file, device)]
        if not values:
            return None
        if origin is Origin.OTHER:
            return self._left_to_its_owner(file, values[0], name)
        if unknown and any(device in by_position for device in values):
            return self._left(file, values[0], f"{unknown}, whose second argument is `device_ids`")
        # Ranks on Apple's devices use Gloo, which supports only the CPU.
        quote = file.quote(node)
        not_gloo = f"{file.target.device_type} {host_test(quote, ('mps',))}"
        condition = not_gloo if joins else host_guard(file, quote)
        edits = [insert(file.span(device).end, f" if {condition} else None") for device in values]
        finding = self.convert(file, values[0], *edits, unsafe=unknown)
        finding.claims = ()
        return finding

    def _left_to_its_owner(self, file: SourceFile, value: cst.BaseExpression, name: str) -> Finding:
        return self._left(
            file, value, f"this `{name}` is not torch's, so it is unknown which values it accepts on a CPU"
        )

    def _left(self, file: SourceFile, value: cst.BaseExpression, reason: str) -> Finding:
        """A finding that stays; other rules still check the code inside the value."""
        finding = self.left(file, value, reason)
        finding.claims = ()
        return finding


def _may_be_a_device(file: SourceFile, value: cst.BaseExpression) -> bool:
    """Whether a value may be a device on a CPU-only machine; a conditional expression handles that itself."""
    if isinstance(value, (cst.IfExp, cst.Lambda, cst.BooleanOperation)):
        return False
    if isinstance(value, cst.List) and not value.elements:
        return False
    return file.values.of(value).kind is not Kind.NONE


def _given(file: SourceFile, call: cst.Call, word: str) -> list[cst.BaseExpression]:
    """The values of a keyword of a call, also through ``**options`` that are made in the same scope."""
    plain = keyword(call, word)
    if plain is not None:
        return [plain.value]
    found: list[cst.BaseExpression] = []
    for options in [argument.value for argument in call.args if argument.star == "**"]:
        if not isinstance(options, cst.Name):
            found += _in_dictionary(options, word)
            continue
        first = next((use for use in _unpacked(file, options)), None)
        if first is not options:
            continue  # the earlier call has the edits
        for assignment in file.tree.assignments(options):
            target = file.tree.parent(assignment.node)
            made = file.tree.parent(target) if isinstance(target, cst.AssignTarget) else target
            if isinstance(made, (cst.Assign, cst.AnnAssign)) and made.value is not None:
                found += _in_dictionary(made.value, word)
        found += _set_later(file, options, word)
    return found


def _unpacked(file: SourceFile, name: cst.Name) -> list[cst.CSTNode]:
    """The uses of a name as ``**name``, in source order."""
    uses = [access for access in file.tree.accesses(name) if isinstance(file.tree.parent(access), cst.Arg)]
    return sorted(uses, key=lambda use: file.span(use).start)


def _in_dictionary(node: cst.CSTNode, word: str) -> list[cst.BaseExpression]:
    """The value of a key in ``{…}`` or ``dict(…)``."""
    if isinstance(node, cst.Dict):
        pairs = [element for element in node.elements if isinstance(element, cst.DictElement)]
        return [pair.value for pair in pairs if string_value(pair.key) == word]
    if isinstance(node, cst.Call) and dotted(node.func) == "dict":
        given = keyword(node, word)
        return [given.value] if given is not None else []
    return []


def _set_later(file: SourceFile, options: cst.Name, word: str) -> list[cst.BaseExpression]:
    """The values set with ``options[word] = …`` and ``options.update(word=…)``."""
    found: list[cst.BaseExpression] = []
    for use in file.tree.accesses(options):
        holder = file.tree.parent(use)
        if isinstance(holder, cst.Subscript) and holder.value is use:
            index = holder.slice[0].slice
            target = file.tree.parent(holder)
            made = file.tree.parent(target) if isinstance(target, cst.AssignTarget) else None
            if (
                isinstance(index, cst.Index)
                and string_value(index.value) == word
                and isinstance(made, cst.Assign)
            ):
                found.append(made.value)
        call = file.tree.parent(holder) if isinstance(holder, cst.Attribute) else None
        if isinstance(call, cst.Call) and called_name(call) == "update":
            given = keyword(call, word)
            found += [given.value] if given is not None else []
            found += [
                entry for arg in call.args if not arg.keyword for entry in _in_dictionary(arg.value, word)
            ]
    return found


class SyncBatchNorm(Rule):
    """``torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)``."""

    code = "ACC505"
    name = "sync-batch-norm"
    summary = "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`, `torch.nn.SyncBatchNorm(n)`"
    explanation = """\
`SyncBatchNorm` raises on a CPU, so there the model keeps its layers, and each rank computes batch statistics over its
own part of the batch. If the model is an expression and not a name, the test chooses the function instead, so that the
model is evaluated once.

If a program creates the layer itself, the edit uses `BatchNorm1d`, `2d` or `3d` on a CPU, with the same parameters.
The file's other layers tell which one, so the edit is unsafe; if they do not, the layer is left. A layer with a
process group is left too, and so are the program's own conversion functions and subclasses, whose parts must match."""
    examples = (
        Example(
            "import torch\nfrom torch import nn\n\n\ndef f(m):\n    return nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
            "import torch\nfrom acclimate import get_accelerator\nfrom torch import nn\n\n\ndef f(m):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm(m) "
            'if get_accelerator().device_name() != "cpu" else m)\n',
            "import torch\nfrom torch import nn\n\n\ndef f(m):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm(m) if torch.accelerator.is_available() else m)\n",
        ),
        Example(
            "import torch\nfrom torch import nn\n\n\ndef f(make):\n"
            "    return nn.SyncBatchNorm.convert_sync_batchnorm(make())\n",
            "import torch\nfrom acclimate import get_accelerator\nfrom torch import nn\n\n\ndef f(make):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm "
            'if get_accelerator().device_name() != "cpu" else lambda module: module)(make())\n',
            "import torch\nfrom torch import nn\n\n\ndef f(make):\n"
            "    return (nn.SyncBatchNorm.convert_sync_batchnorm "
            "if torch.accelerator.is_available() else lambda module: module)(make())\n",
        ),
    )
    nodes = (cst.Call, cst.Attribute, cst.Name)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
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
        condition = host_guard(file, '"')
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
        condition = host_guard(file, file.quote(node))
        plain = f"{file.torch}.nn.BatchNorm{dimensions.pop()}d"
        unsafe = "the shape of its input is inferred from the file's other layers"
        return self.becomes(file, node, "(", file.span(node), f" if {condition} else {plain})", unsafe=unsafe)


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
    function = next(
        (ancestor for ancestor in file.tree.ancestors(node) if isinstance(ancestor, cst.FunctionDef)), None
    )
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
