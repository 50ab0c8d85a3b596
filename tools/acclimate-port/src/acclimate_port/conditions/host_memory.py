"""Whether a call that asks for a device's memory may ask for a host's.

``torch.cuda.memory_allocated("cpu")`` is 0 while CUDA is unused; other accelerators refuse a host's device.
"""

from __future__ import annotations

import libcst as cst

from acclimate_port.conditions.proofs import names_cuda
from acclimate_port.source.torch_cuda import FIGURES
from acclimate_port.source.tree import string_value
from acclimate_port.source.values import Kind
from acclimate_port.source_file import SourceFile

MAY_BE_HOSTS = "nothing shows that its device is not a CPU, whose figures torch.cuda returns as 0"
_DEPTH = 3


def may_be_of_host(file: SourceFile, call: cst.Call, name: str) -> bool:
    """Whether the device of a call such as ``torch.cuda.max_memory_allocated(device)`` may be a CPU."""
    if name not in FIGURES and name != "memory_stats":
        return False
    device = next(
        (one.value for one in call.args if one.keyword is None or one.keyword.value == "device"), None
    )
    if device is None or any(one.star for one in call.args):
        return bool(call.args)
    return not _is_cudas(file, device, _DEPTH) and not _is_tested(file, call, device)


def _is_cudas(file: SourceFile, device: cst.BaseExpression, depth: int) -> bool:
    """Whether a value is no CPU's device where there is CUDA."""
    text = string_value(device)
    if isinstance(device, cst.FormattedString) and device.parts:
        first = device.parts[0]
        text = first.value if isinstance(first, cst.FormattedStringText) else None
    if text is not None:
        return text.startswith("cuda")
    if isinstance(device, cst.Call) and file.tree.qualified(device.func) == "torch.device" and device.args:
        return _is_cudas(file, device.args[0].value, depth)
    if isinstance(device, cst.IfExp):
        asks = device.test.func if isinstance(device.test, cst.Call) else device.test
        is_certain = file.tree.qualified(asks) == "torch.cuda.is_available"
        return _is_cudas(file, device.body, depth) and (is_certain or _is_cudas(file, device.orelse, depth))
    if file.values.of(device).kind in (Kind.NUMBER, Kind.NONE):
        return True
    if not isinstance(device, cst.Name) or not depth:
        return False
    bound = file.bound_values(device)
    return bool(bound) and all(one is not None and _is_cudas(file, one, depth - 1) for one in bound)


def _is_tested(file: SourceFile, call: cst.Call, device: cst.BaseExpression) -> bool:
    """Whether a test around a call compares its device with CUDA's name."""
    text = file.tree.source(device)
    for below, around in file.tree.upwards(call):
        test = around.test if isinstance(around, (cst.If, cst.IfExp)) and below is around.body else None
        if test is not None and names_cuda(test) and text in file.tree.source(test):
            return file.tests_device(test)
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            return False
    return False
