"""The rule ACC103, for a name of `torch.cuda` that is passed, tested or caught, but not called."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.targets import AcclimateTarget, Missing
from acclimate_port.rules.acc101_runtime_call import _TENSOR_SUFFIX, has_specific_rule
from acclimate_port.rules.base import WITH_HELPER, Example, Finding, Rule, cuda_name, is_assigned, is_read
from acclimate_port.rules.comparison_edits import host_guard
from acclimate_port.source.torch_cuda import NEVER_RAISE, RESETS
from acclimate_port.source.tree import string_value
from acclimate_port.source_file import SourceFile

_QUESTIONS = ("is_available", "device_count", "is_bf16_supported", "is_initialized")
_ASKED_ELSEWHERE = "nothing shows what other code does by the answer of this function"
_ASK_FOR_NAMES = ("getattr", "hasattr", "setattr", "object", "delattr")


class RuntimeReference(Rule[cst.Attribute | cst.Name]):
    """Names of ``torch.cuda`` that are not called."""

    code = "ACC103"
    name = "runtime-reference"
    summary = "a name of `torch.cuda` that is passed, tested or caught, but not called"
    explanation = """\
The rule converts a function that is passed (`callback=torch.cuda.empty_cache`), an exception that is caught, and a
class in `isinstance`. In an annotation, torch's class for all devices replaces the class of CUDA. `is_bf16_supported`
becomes a lambda, since the default of its argument differs between acclimate and torch. So do `is_available` and
`device_count`, since acclimate counts the CPU of a host; these edits are unsafe, as nothing shows what the answer decides.
A question in a condition that lacks its call, `if torch.cuda.is_available:`, is true on every machine, and stays.

`getattr`, `hasattr` and `setattr` on `torch.cuda` are left, since it depends on their second argument whether
another accelerator has the name. A name that the program assigns to is left too."""
    examples = (
        Example(
            "import torch\n\ntry:\n    step()\nexcept torch.cuda.OutOfMemoryError:\n    pass\n",
            "import torch\nfrom acclimate import get_accelerator\n\n"
            "try:\n    step()\nexcept get_accelerator().OutOfMemoryError:\n    pass\n",
            "import torch\n\ntry:\n    step()\nexcept torch.OutOfMemoryError:\n    pass\n",
        ),
        Example(
            "import torch\n\nafter_step(fn=torch.cuda.empty_cache)\n",
            "import torch\nfrom acclimate import get_accelerator\n\nafter_step(fn=get_accelerator().empty_cache)\n",
            f"{WITH_HELPER}after_step(fn=(torch.accelerator.empty_cache "
            'if accelerator_type() not in ("cpu", "mps") else lambda *_: None))\n',
        ),
        Example(
            "import torch\n\n\ndef wait(stream: torch.cuda.Stream) -> None:\n    stream.synchronize()\n",
            "import torch\n\n\ndef wait(stream: torch.Stream) -> None:\n    stream.synchronize()\n",
            "import torch\n\n\ndef wait(stream: torch.Stream) -> None:\n    stream.synchronize()\n",
        ),
        Example('import torch\n\nok = hasattr(torch.cuda, "graph")\n', None, None),
        Example("import torch\n\ntorch.cuda.is_available = lambda: False\n", None, None),
    )
    nodes = (cst.Attribute, cst.Name)

    _SHARED = {  # noqa: RUF012 - a constant
        "Stream": "Stream", "Event": "Event", "amp.GradScaler": "amp.GradScaler",
        "amp.autocast": "amp.autocast", "OutOfMemoryError": "OutOfMemoryError",
        "device": "device", "amp.grad_scaler.GradScaler": "amp.GradScaler",
    }  # fmt: skip

    def check(self, file: SourceFile, node: cst.Attribute | cst.Name) -> Finding | None:
        name = cuda_name(file, node)
        if name is None or not is_read(file, node):
            return None
        if is_assigned(file, node):
            return self.left(file, node, "the program assigns to this name of torch.cuda")
        if file.tree.in_annotation(node):
            return self._annotation(file, node, name)
        if name == "":
            return self._module(file, node)
        parent = file.tree.parent(node)
        if (asked := self._asked_for_names(file, parent)) is not None:
            return self.left(file, node, asked.format(f"torch.cuda.{name}"))
        if has_specific_rule(name) and (name != "current_device" or isinstance(parent, cst.Call)):
            return None
        if name in _QUESTIONS and _is_tested(file, node):
            reason = "it is not called, and so it is true on every machine"
            return self.left(file, node, reason, stands_alone=True)
        spelling = file.target.runtime(name)
        if isinstance(spelling, Missing):
            return self.left(file, node, spelling.reason)
        if name in ("is_available", "device_count") and isinstance(file.target, AcclimateTarget):
            # acclimate counts the CPU of a host as a device, and torch.cuda none.
            guard = host_guard(file, file.quote(node))
            counted = guard if name == "is_available" else f"{spelling.text}() if {guard} else 0"
            return self.becomes(file, node, f"(lambda: {counted})", unsafe=_ASKED_ELSEWHERE)
        if spelling.on_host in ("None", "[]") and (spelling.condition or not file.is_guarded(node)):
            quote = file.quote(node)
            condition = (spelling.condition or host_guard(file, quote)).replace('"', quote)
            return self.becomes(
                file, node, f"({spelling.text} if {condition} else lambda *_: {spelling.on_host})"
            )
        text = spelling.text
        if spelling.default:
            parameter = spelling.default.partition("=")[0]
            text = f"(lambda {spelling.default}: {spelling.text}({parameter}))"
        unsafe = _ASKED_ELSEWHERE if name in _QUESTIONS else spelling.unsafe
        return self.becomes(file, node, text, unsafe=unsafe)

    @staticmethod
    def _asked_for_names(file: SourceFile, parent: cst.CSTNode | None) -> str | None:
        """Why what ``hasattr`` or ``getattr`` gets stays: ``hasattr(torch.cuda.Event, "from_ipc_handle")``."""
        given = file.tree.given_to(parent) if isinstance(parent, cst.Arg) else None
        if given is None or given.call.args[0] is not parent or given.name not in _ASK_FOR_NAMES:
            return None
        return f"`{given.name}` on {{}}: the second argument decides whether other devices have the name"

    def _annotation(self, file: SourceFile, node: cst.CSTNode, name: str) -> Finding | None:
        if name in self._SHARED:
            return self.becomes(file, node, f"{file.torch}.{self._SHARED[name]}")
        if name.endswith(_TENSOR_SUFFIX):
            return self.becomes(file, node, f"{file.torch}.Tensor")
        return self.left(file, node, f"torch has no class like torch.cuda.{name} for every device")

    def _module(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        parent = file.tree.parent(node)
        if (asked := self._asked_for_names(file, parent)) is not None:
            given = file.tree.given_to(parent) if isinstance(parent, cst.Arg) else None
            if given is not None and given.name == "hasattr" and _is_old(given.call):
                return self.exempt(file, node, "each torch that ported code runs with has this name")
            return self.left(file, node, asked.format("torch.cuda"))
        if isinstance(parent, cst.Attribute):
            return None
        target = file.target
        if isinstance(target, AcclimateTarget) and not target.of_deepspeed:
            text = f"{target.accelerator}.torch_module"
        else:
            text = f"{file.torch}.get_device_module({target.device_type})"
        return self.becomes(
            file, node, text, unsafe="other devices' modules have fewer names than torch.cuda"
        )


def _is_tested(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a function is taken for its answer: ``if torch.cuda.is_available:``."""
    at = file.tree.parent(node)
    if isinstance(at, (cst.BooleanOperation, cst.UnaryOperation)):
        return True
    return isinstance(at, (cst.If, cst.IfExp, cst.While, cst.Assert)) and at.test is node


def _is_old(call: cst.Call) -> bool:
    """Whether ``hasattr(torch.cuda, …)`` asks for a name that torch has had for years."""
    asked = string_value(call.args[1].value) if len(call.args) > 1 else None
    return asked in NEVER_RAISE | RESETS
