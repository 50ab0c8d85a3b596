"""The rule ACC201, for `"cuda"` or `"cuda:0"` as a device."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from acclimate_port.dataflow.callees import held_functions
from acclimate_port.dataflow.literals import LiteralUse, Role, classify_literal
from acclimate_port.dataflow.map_location import loadable
from acclimate_port.dataflow.sinks import takes_device
from acclimate_port.dataflow.uses import parameter_of, uses_of
from acclimate_port.new_code.added_functions import ACCELERATOR_TYPE
from acclimate_port.new_code.edits import Part
from acclimate_port.rules.base import DEVICE, IMPORTS, WITH_HELPER, Example, Finding, Rule, index_of
from acclimate_port.rules.comparison_edits import OTHERS, adapt_to_comparison
from acclimate_port.source.tree import Given, called_name, dotted, keyword, string_value
from acclimate_port.source_file import SourceFile


def report_device(
    rule: Rule[Any], file: SourceFile, node: cst.CSTNode, place: LiteralUse, *parts: Part
) -> Finding | None:
    """The finding for a device's name, by the use that the file makes of it."""
    if place.role is Role.DATA:
        return rule.exempt(file, node, place.reason or "nothing shows that it is a device")
    if place.role is Role.FOREIGN:
        return rule.left(file, node, place.reason, stands_alone=True)
    if place.role is Role.KEY:
        return rule.left(file, node, place.reason)
    if place.role is Role.PATTERN:
        return rule.left(file, node, "a pattern of `match` must be a literal; compare with `if`")
    unsafe = place.reason if place.role is Role.LIKELY else ""
    unsafe = _turns_on_host(file, node) or unsafe
    return adapt_to_comparison(file, rule.becomes(file, node, *parts, unsafe=unsafe))


_SWITCHES = re.compile(r"torch\.(amp\.)?(\w+\.)?(autocast|GradScaler|set_autocast_enabled)$")


def _turns_on_host(file: SourceFile, node: cst.CSTNode) -> str:
    """Why a device is unsafe that autocasts get, and nothing else that fails without CUDA."""
    found = ""
    for use in uses_of(file, node):
        given = file.tree.given_to(use)
        if given is None:
            continue
        if switch := _switch(file, given):
            # The rule for mixed precision adds a guard to a call of torch's with the name in it.
            is_direct = use is node and given.full == switch
            turned = keyword(given.call, "enabled")
            is_off = turned is not None and dotted(turned.value) == "False"
            if not is_direct and not is_off and not file.is_guarded(given.call):
                found = f"on a host `{switch}`, which gets it, is on then, and is off with CUDA's name"
        elif given.full != "torch.device" and (given.full.startswith("torch.") or takes_device(given)):
            return ""
    return found


def _switch(file: SourceFile, given: Given) -> str:
    """The autocast or scaler that gets an argument, also later (``partial(autocast, "cuda")``), or may get it."""
    full = given.full
    if full == "functools.partial" and given.index != 0:
        full = file.tree.qualified(given.call.args[0].value) or ""
    held = held_functions(file, given.call.func) if not full and given.index == 0 else (full,)
    if found := next(filter(_SWITCHES.match, held), ""):
        return found
    is_unknown = not full and parameter_of(file, given) is None
    return given.name if given.word == "device_type" and is_unknown else ""


_STRATEGY = re.compile(r"cuda(:\d+)? \w")
"""A device with what is done there: ``RWKV(strategy="cuda fp16")``."""


class DeviceString(Rule[cst.SimpleString | cst.FormattedString]):
    """``"cuda"`` and ``"cuda:0"`` as a device."""

    code = "ACC201"
    name = "device-string"
    summary = '`"cuda"` or `"cuda:0"` as a device'
    explanation = """\
`"cuda"` becomes `get_accelerator().device_name()`, and `"cuda:1"` becomes `get_accelerator().device_name(1)`. On CUDA
both have the same value as before.

The rule edits a literal if torch takes it as a device, also through a name that holds a function of torch (`scope =
torch.autocast if half else nullcontext`, a `partial`, a parameter, an attribute), if the name of its variable, parameter, option or attribute
suggests a device, or if the value reaches one of these. Dictionary keys, messages, and arguments such as `impl="cuda"`
are data, and stay. So does the device of another library (Warp, JAX), also where a method imports the library and gets the
device through names, parameters or a part of the text.

A device is unsafe if a test of its name reads it (`device == "cpu"`, `device == Device.CUDA`,
`args.device.startswith("cuda")`), unless the test does nothing but fall back to the CPU. It is unsafe where it reaches a check that accepts only some names: `device in ALLOWED`,
`re.match("cpu|cuda", device)`, an `Enum` with the member `"cuda"`, or a field of `Literal["cpu", "cuda"]` of a class that is no plain dataclass. It is unsafe too in a file that imports no torch, where the same name is a key of the
program's data near it, and as part of a command line (`f"run --device {device}"`), which another program or machine
reads; a key of a dictionary that begins empty, and that the program fills and reads by no literal, is no such key. It is
unsafe as the default of an option in a table (`{"name": "--rl_device", "default": "cuda:0"}`), and as the argument of a
function that only by its name sets a device. It is left if the program has its own words for devices: `"ascend"` beside `"cuda"`. It is left as the argument of a decorator that registers code for the device
(`@register("cuda")`), and as a key of a table in which `x.device.type` is looked up: on a host, the accelerator's name
would be that of the CPU's entry. The default, the choices and the field of one option are ported together, and so are moves whose results one call gets, such as `torch.cat`.

A device is unsafe in a program with code that is not known to follow torch's devices: a package such as DGL, Warp,
bitsandbytes or spconv, a compiled module, an operator of the project's own. It is unsafe too in a file that names no torch and nothing built on it, if no call there takes the text as a device.

A device is unsafe in a file that cannot be imported without a package for NVIDIA GPUs, such as flash_attn or bitsandbytes, or that
imports a module which cannot; beside operators that run on a CPU and with CUDA alone (torch_cluster, torch_scatter, pytorch3d,
`mmcv.ops`, kernels of numba), also in what the same program uses; where numbers of 64 bits are the default, or go to the device,
which Apple's GPUs lack; in the classes of Lightning, and in a program that runs a `Trainer` of Lightning, which knows no
accelerators but its own; and as a part of the name of a file that is read. As a value for `accelerator`, Lightning's word for a
device, it is left. In `pytest.param("cuda", marks=…)` it is one decision with the mark.

A device is unsafe where the program finds that CUDA was asked for and is missing, and says so or raises: on a host it
would find that no longer. So is one that only a later use needs, where an import evaluates it, also through a constructor,
or where the program sets `CUDA_VISIBLE_DEVICES` or forks after it: the edit counts the devices.

`device == torch.device("cuda")` gets `!= torch.device("cpu")` appended, so that it stays false on a CPU, as before.
This edit is unsafe.

`--to torch` adds a function of three lines to the file, since `torch.accelerator` has no name for the CPU."""
    examples = (
        Example(
            'import torch\n\n\ndef f(n):\n    return torch.empty(n, device="cuda")\n',
            f"{IMPORTS}\ndef f(n):\n    return torch.empty(n, device=get_accelerator().device_name())\n",
            f"{WITH_HELPER}def f(n):\n    return torch.empty(n, device=accelerator_type())\n",
        ),
        Example(
            'import torch\n\n\ndef f(x):\n    return x.to("cuda:1")\n',
            f"{IMPORTS}\ndef f(x):\n    return x.to(get_accelerator().device_name(1))\n",
            f'{WITH_HELPER}def f(x):\n    return x.to(f"{{accelerator_type()}}:1")\n',
        ),
        Example(
            'import argparse\n\np = argparse.ArgumentParser()\np.add_argument("--device", default="cuda")\n',
            "import argparse\n\nfrom acclimate import get_accelerator\n\np = argparse.ArgumentParser()\n"
            'p.add_argument("--device", default=get_accelerator().device_name())\n',
            "import argparse\n\nimport torch\n\n\n" + ACCELERATOR_TYPE + "\n\n"
            'p = argparse.ArgumentParser()\np.add_argument("--device", default=accelerator_type())\n',
        ),
        Example('state = {"cuda": 1}\nprint(state["cuda"])\n', None, None),
        Example('model = build(impl="cuda")\n', None, None),
    )
    nodes = (cst.SimpleString, cst.FormattedString)

    def check(self, file: SourceFile, node: cst.SimpleString | cst.FormattedString) -> Finding | None:
        text = string_value(node)
        if text is None:
            return None
        if text.startswith("torch.cuda."):
            return self._name_of_cuda(file, node, text)
        if _STRATEGY.match(text) and (given := file.tree.given_to(node)) and given.word == "strategy":
            return self.left(
                file, node, f"`{given.name}` takes a strategy, which has its own words for devices"
            )
        if not DEVICE.match(text) or isinstance(file.tree.parent(node), (cst.Expr, cst.ConcatenatedString)):
            return None
        place = classify_literal(file, node)
        if place.role is Role.COMPARED:
            return None
        index = index_of(text)
        named = (file.target.device_type,) if index is None else file.device_at(index)
        parts = named if index is None else loadable(file, node, *named)
        if index is not None and file.target.name == "torch" and file.in_fstring(node):
            return self.left(
                file,
                node,
                "a string inside an f-string cannot be replaced by code that every Python version parses",
            )
        return report_device(self, file, node, place, *parts)

    def _name_of_cuda(self, file: SourceFile, node: cst.CSTNode, text: str) -> Finding:
        """A name of torch.cuda in a string: ``x.type() == "torch.cuda.HalfTensor"``."""
        name = text.removeprefix("torch.cuda.")
        if not name.endswith("Tensor"):
            return self.left(file, node, "a name of torch.cuda in a string, such as the target of a mock")
        if not _is_compared_type(file, node) or file.in_fstring(node):
            return self.left(file, node, "nothing shows what gets this name of a class of tensors")
        quote = file.quote(node)
        parts = (f"f{quote}torch.{{", file.target.device_type, f"}}.{name}{quote}")
        return self.becomes(file, node, *parts, unsafe=OTHERS)


def _is_compared_type(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a string, or the list that holds it, is compared with the result of ``x.type()``."""
    at = file.tree.parent(node)
    while isinstance(at, (cst.Element, cst.List, cst.Tuple, cst.Set, cst.ComparisonTarget)):
        at = file.tree.parent(at)
    if not isinstance(at, cst.Comparison):
        return False
    sides = (at.left, *(target.comparator for target in at.comparisons))
    return any(isinstance(side, cst.Call) and called_name(side) == "type" and not side.args for side in sides)
