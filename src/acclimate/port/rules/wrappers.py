"""Rules for what wraps or changes a whole model so that several devices train it."""

from __future__ import annotations

import libcst as cst

from acclimate.port.edits import insert
from acclimate.port.helpers import ACCELERATOR_TYPE, ON_ANY_DEVICE
from acclimate.port.rules.base import Example, Finding, Rule, without_argument
from acclimate.port.rules.devices import unsafe_at_import
from acclimate.port.source import SourceFile
from acclimate.port.targets import AcclimateTarget
from acclimate.port.tree import called_name, dotted, keyword
from acclimate.port.values import Kind, methods

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
_STEPS_OF_A_CLASS = {"forward", "scatter", "gather", "replicate", "parallel_apply"}


class DataParallel(Rule):
    """``torch.nn.DataParallel(model)``."""

    code = "ACC506"
    name = "data-parallel"
    summary = "`torch.nn.DataParallel(model)`"
    explanation = """\
torch shares a batch among CUDA's devices only; on another accelerator the first step fails, also with one device. The
object stays torch's own, and on CUDA nothing changes. Elsewhere the device of the model's parameters the whole batch, and inputs are moved there, as torch moves them on CUDA. For several devices that are not CUDA's a
program needs `DistributedDataParallel`.

A subclass with its own `scatter`, `gather` or `forward` is left, and so are `torch.nn.parallel.data_parallel` and the
steps that it is made of: outside CUDA a program calls the module itself."""
    examples = (
        Example(
            "import torch\n\n\ndef f(model):\n    return torch.nn.DataParallel(model).cuda()\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            + ON_ANY_DEVICE.replace("{device_type}", "get_accelerator().device_name()")
            + "\n\ndef f(model):\n    return on_any_device(torch.nn.DataParallel(model))"
            ".to(get_accelerator().device_name())\n",
            f"import torch\n\n\n{ACCELERATOR_TYPE}\n\n"
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
            reason = "torch shares a batch among CUDA's devices only; elsewhere call the module itself"
            return self.left(file, node, reason, (node.func,))
        definition = file.values.classes.get(node.func.value) if isinstance(node.func, cst.Name) else None
        if name not in _DATA_PARALLEL and not (definition and _is_data_parallel(file, definition)):
            return None
        holder = file.tree.parent(node)
        around = file.tree.parent(holder) if isinstance(holder, cst.Arg) else None
        if isinstance(around, cst.Call) and called_name(around) == file.on_any_device:
            return None
        if definition is not None and methods(definition) & _STEPS_OF_A_CLASS:
            reason = "its class has its own way to share a batch, which torch does among CUDA's devices only"
            return self.left(file, node, reason)
        place = file.span(node)
        edits = insert(place.start, f"{file.on_any_device}("), insert(place.end, ")")
        finding = self.convert(file, node, *edits, unsafe=unsafe_at_import(file, node))
        finding.claims = ()
        return finding


def _is_data_parallel(file: SourceFile, definition: cst.ClassDef) -> bool:
    return any(file.tree.qualified(base.value) in _DATA_PARALLEL for base in definition.bases)


class DeviceIds(Rule):
    """``DistributedDataParallel(model, device_ids=[rank])``."""

    code = "ACC502"
    name = "device-ids"
    summary = "`device_ids` of `DistributedDataParallel` and `barrier`, `device_id` of `init_process_group`"
    explanation = """\
On a CPU `device_ids`, `output_device`, and `device_id` of `init_process_group`, must be `None`. On CUDA they stay: they also make the wrapper move its inputs.
Only NCCL's `barrier` takes `device_ids`, so they go there. That is unsafe: NCCL then takes the current device, which
`get_accelerator().set_device(…)` sets."""
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
        Example(
            "import torch.distributed as dist\n\n\ndef f(rank):\n    dist.barrier(device_ids=[rank])\n",
            "import torch.distributed as dist\n\n\ndef f(rank):\n    dist.barrier()\n",
            "import torch.distributed as dist\n\n\ndef f(rank):\n    dist.barrier()\n",
        ),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        if not isinstance(node, cst.Call):
            return None
        name = file.tree.qualified(node.func) or called_name(node) or ""
        if name.rpartition(".")[2] not in ("DistributedDataParallel", "DDP", "barrier", "init_process_group"):
            return None
        words = ("device_id",) if name.endswith("init_process_group") else ("device_ids", "output_device")
        both = [keyword(node, word) for word in words]
        values = [each.value for each in both if each is not None]
        values = [each for each in values if file.values.of(each).kind is not Kind.NONE]
        if not values or any(
            isinstance(each, (cst.IfExp, cst.Lambda, cst.BooleanOperation)) for each in values
        ):
            return None
        if file.is_guarded(node) and file.target.name == "torch":
            return None
        if isinstance(values[0], cst.List) and not values[0].elements:
            return None
        if name.endswith("barrier"):
            given = keyword(node, "device_ids")
            if given is None:
                return None
            return self.convert(
                file,
                node,
                without_argument(file, node, given),
                unsafe="NCCL then takes the current device",
            )
        quote = file.quote(node)
        host = f"{file.target.device_type} != {quote}cpu{quote}"
        condition = host if file.target.name == "acclimate" else file.target.not_host
        edits = [insert(file.span(each).end, f" if {condition} else None") for each in values]
        finding = self.convert(file, values[0], *edits)
        finding.claims = ()
        return finding


class SyncBatchNorm(Rule):
    """``torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)``."""

    code = "ACC505"
    name = "sync-batch-norm"
    summary = "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`"
    explanation = """\
`SyncBatchNorm` raises on a CPU, so there the model keeps its own layers; each rank then takes the figures of its own
part of the batch. Where the model is more than a name, the test goes around the function, and the model is evaluated
once."""
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
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
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
        host = f'{file.target.device_type} != "cpu"'
        condition = host if isinstance(file.target, AcclimateTarget) else file.target.not_host
        # What is in the call, such as a process group, keeps its own edits.
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
