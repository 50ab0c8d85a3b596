"""The rule ACC401, for `torch.cuda.amp`: `autocast`, `GradScaler`, `custom_fwd`, `custom_bwd`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.edits import Edit, insert, replace
from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import WITH_HELPER, Example, Finding, Rule, cuda_name, is_read
from acclimate_port.rules.comparison_edits import host_guard
from acclimate_port.source.tree import argument_of, dotted, has_unpacking, keyword, positional, string_value
from acclimate_port.source_file import SourceFile

_PLAIN = {
    "amp.autocast": "autocast", "amp.autocast_mode.autocast": "autocast",
    "amp.GradScaler": "GradScaler", "amp.grad_scaler.GradScaler": "GradScaler",
    "amp.custom_fwd": "custom_fwd", "amp.custom_bwd": "custom_bwd",
    "amp.autocast_mode.custom_fwd": "custom_fwd", "amp.autocast_mode.custom_bwd": "custom_bwd",
}  # fmt: skip
_OF_AMP = {*_PLAIN.values()}
"""What ``torch.amp`` has, too."""

_OF_TORCH = {
    "torch.autocast": "autocast", "torch.amp.autocast": "autocast", "torch.amp.autocast_mode.autocast": "autocast",
    "torch.amp.GradScaler": "GradScaler", "torch.amp.grad_scaler.GradScaler": "GradScaler",
}  # fmt: skip
"""torch's own, whose first argument is the device type."""
_ARGUMENTS = {"autocast": ("enabled", "dtype", "cache_enabled")}
_ENABLED = {"autocast": 0, "GradScaler": 4}
"""The position of the argument ``enabled`` in ``torch.cuda.amp``."""
_ENABLED_OF_TORCH = {"autocast": 2, "GradScaler": 5}
"""Its position in ``torch.amp``."""
_HALVES = {"torch.float16", "torch.half", "torch.bfloat16"}
_ASKS_FOR_CLASS = {"isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance"}


class MixedPrecision(Rule[cst.Call | cst.Attribute | cst.Name]):
    """``torch.cuda.amp``."""

    code = "ACC401"
    name = "mixed-precision"
    summary = "`torch.cuda.amp`: `autocast`, `GradScaler`, `custom_fwd`, `custom_bwd`"
    explanation = """\
`get_accelerator().amp` has the same classes and decorators with the same arguments. `--to torch` passes the device type
as the first argument of `torch.amp.autocast` and `torch.amp.GradScaler`, and so does the edit of
`torch.autocast("cuda")`. Without `dtype` each device uses its default: float16 on CUDA, as before. Inside an autocast
of another dtype, `torch.cuda.amp.autocast()` still took float16, and its edit takes that dtype: write
`dtype=torch.float16` where you nest them.

Without CUDA, torch turns CUDA's autocast and scaler off, and warns. Those of a CPU would be on there, so the edit
adds `enabled=get_accelerator().device_name() != "cpu"`, unless a test of the device is around the call or in its
`enabled`, also through a name (`cuda = device.type != "cpu"`); `device != "cpu"` is one only if the file shows a
string, as a `torch.device` differs from every string. One that stays or is unsafe makes the device, the backend and
the autocasts with `enabled=False` of its program unsafe; one with `enabled=False` that stays or is unsafe makes the
autocasts and scalers of all programs that run it unsafe.
A caller may autocast the CPU, as may the rest of a program: in a package, and in a program that does so, a
`with` keeps that autocast (`or torch.is_autocast_enabled("cpu")`). Four edits are unsafe: an autocast there with a dtype,
or outside `with`, which would change the CPU's; a dtype that is not known to be float16 or bfloat16, since CUDA alone
autocasts to others; a class or function that is passed and not called, also through `functools.partial`; and a
decorator in a class, which runs at import and makes the program choose the accelerator then."""
    examples = (
        Example(
            "import torch\n\n\ndef f(x, enabled):\n    with torch.cuda.amp.autocast(enabled, dtype=torch.float16):\n"
            "        return x @ x\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\ndef f(x, enabled):\n"
            '    with get_accelerator().amp.autocast(enabled and get_accelerator().device_name() != "cpu", '
            "dtype=torch.float16):\n        return x @ x\n",
            f"{WITH_HELPER}def f(x, enabled):\n"
            "    with torch.amp.autocast(accelerator_type(), enabled=enabled and torch.accelerator.is_available(), "
            "dtype=torch.float16):\n        return x @ x\n",
        ),
        Example(
            "import torch\nfrom torch.cuda.amp import GradScaler\n\n\ndef f():\n    return GradScaler(enabled=True)\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            'def f():\n    return get_accelerator().amp.GradScaler(enabled=get_accelerator().device_name() != "cpu")\n',
            f"{WITH_HELPER}def f():\n"
            "    return torch.amp.GradScaler(accelerator_type(), enabled=torch.accelerator.is_available())\n",
        ),
        Example(
            'import torch\n\n\ndef f(x):\n    with torch.autocast("cuda", dtype=torch.bfloat16):\n        return x @ x\n',
            "import torch\nfrom acclimate import get_accelerator\n\n\ndef f(x):\n"
            "    with torch.autocast(get_accelerator().device_name(), dtype=torch.bfloat16, "
            'enabled=get_accelerator().device_name() != "cpu"):\n        return x @ x\n',
            f"{WITH_HELPER}def f(x):\n    with torch.autocast(accelerator_type(), dtype=torch.bfloat16, "
            "enabled=torch.accelerator.is_available()):\n        return x @ x\n",
        ),
        Example(
            "import torch\n\n\nclass F(torch.autograd.Function):\n    @staticmethod\n    @torch.cuda.amp.custom_fwd\n"
            "    def forward(ctx, x):\n        return x\n",
            "import torch\nfrom acclimate import get_accelerator\n\n\n"
            "class F(torch.autograd.Function):\n    @staticmethod\n    @get_accelerator().amp.custom_fwd\n"
            "    def forward(ctx, x):\n        return x\n",
            f"{WITH_HELPER}class F(torch.autograd.Function):\n    @staticmethod\n"
            "    @torch.amp.custom_fwd(device_type=accelerator_type())\n    def forward(ctx, x):\n        return x\n",
        ),
    )
    nodes = (cst.Call, cst.Attribute, cst.Name)

    def check(self, file: SourceFile, node: cst.Call | cst.Attribute | cst.Name) -> Finding | None:
        function = node.func if isinstance(node, cst.Call) else node
        if isinstance(node, cst.Call) and (own := _OF_TORCH.get(file.tree.qualified(function) or "")):
            return self._of_torch(file, node, own)
        name = cuda_name(file, function)
        if name is None or name.partition(".")[0] != "amp" or not is_read(file, function):
            return None
        parent = file.tree.parent(node)
        is_part = isinstance(parent, cst.Attribute) or (isinstance(parent, cst.Call) and parent.func is node)
        if is_part and not isinstance(node, cst.Call):
            return None
        if file.tree.in_annotation(node):
            return None
        plain = _PLAIN.get(name)
        if name == "amp" and _is_asked_for(file, node):
            return self.becomes(file, node, f"{file.torch}.amp")
        if plain is None:
            return self.left(file, node, f"torch.cuda.{name} has no equivalent on every device", (function,))
        if isinstance(node, cst.Call):
            return self._call(file, node, plain)
        return self._reference(file, node, plain)

    def _reference(self, file: SourceFile, node: cst.CSTNode, plain: str) -> Finding:
        """A class or function that is not called here: a decorator, a callback, a class that is asked for."""
        parent, target, given = file.tree.parent(node), file.target, file.tree.given_to(node)
        if plain == "GradScaler" and given is not None and given.name in _ASKS_FOR_CLASS:
            # A library's scaler is an instance of torch.amp.GradScaler, the base class of each device's scaler.
            return self.becomes(file, node, f"{file.torch}.amp.GradScaler")
        unsafe = ""
        if plain in _ENABLED and not file.is_guarded(node):
            unsafe = f"on a host a call of this turns {plain} on, which torch.cuda.amp does not"
        elif plain not in _ENABLED and file.autocasts_on_host:
            unsafe = unsafe or WITHIN_HOSTS
        if isinstance(target, AcclimateTarget) and not target.of_deepspeed:
            return self.becomes(file, node, f"{target.accelerator}.amp.{plain}", unsafe=unsafe)
        if plain.startswith("custom_") and isinstance(parent, cst.Decorator):
            text = f"{file.torch}.amp.{plain}(device_type={target.device_type})"
            return self.becomes(file, node, text, unsafe=unsafe)
        return self.left(
            file, node, f"torch.amp.{plain} needs the device type as an argument, and this use is not a call"
        )

    def _call(self, file: SourceFile, node: cst.Call, plain: str) -> Finding:
        """``torch.cuda.amp.autocast(…)``."""
        target = file.target
        off, unsafe = _off_on_host(file, node, plain, _ENABLED.get(plain))
        if plain == "autocast" and file.survey.casts_to_others and not _has_dtype(node):
            unsafe = unsafe or "it means float16; inside another autocast the new one takes the type of that"
        if isinstance(target, AcclimateTarget) and not target.of_deepspeed:
            function = replace(file.span(node.func), f"{target.accelerator}.amp.{plain}")
            return self.convert(file, node, function, *off, unsafe=unsafe, claims=(node.func,))
        if has_unpacking(node):
            return self.left(file, node, "no rule converts these arguments", (node.func,))
        function = replace(file.span(node.func), f"{file.torch}.amp.{plain}")
        word = "device_type=" if plain.startswith("custom_") else ""
        text = f"{word}{target.device_type}"
        arguments, names = positional(node), _ARGUMENTS.get(plain, ())
        if plain == "autocast" and len(arguments) > len(names):
            return self.left(file, node, "no rule converts these arguments", (node.func,))
        edits = [function]
        if not node.args:
            inside = file.span(node).end - 1
            edits.append(insert(inside, text + (", " if off else "")))
        elif word:
            edits.append(insert(file.span(node.args[-1].value).end, f", {text}"))
        else:
            edits.append(insert(file.span(node.args[0]).start, f"{text}, "))
        edits += [
            insert(file.span(argument.value).start, f"{name}=")
            for argument, name in zip(arguments, names, strict=False)
        ]
        return self.convert(file, node, *edits, *off, unsafe=unsafe, claims=(node.func,))

    def _of_torch(self, file: SourceFile, node: cst.Call, plain: str) -> Finding | None:
        """``torch.autocast("cuda", …)``, and ``torch.amp.GradScaler(…)``, whose device is CUDA's by default."""
        given = argument_of(node, "device_type" if plain == "autocast" else "device", 0)
        off, unsafe = _off_on_host(file, node, plain, _ENABLED_OF_TORCH[plain])
        device = file.target.device_type
        if given is not None:
            if string_value(given.value) != "cuda":
                return None
            edit = replace(file.span(given.value), device)
            return self.convert(file, node, edit, *off, unsafe=unsafe, claims=(given.value,))
        if plain != "GradScaler" or has_unpacking(node):
            return None
        inside = file.span(node.args[0]).start if node.args else file.span(node).end - 1
        text = device + (", " if node.args or off else "")
        return self.convert(file, node, insert(inside, text), *off, unsafe=unsafe)


WITHIN_HOSTS = (
    "on a host it reads or changes the autocast of the CPU, which the program or its caller may turn on"
)
_TURNS_OFF_HOSTS = (
    "on a host it turns off an autocast of the CPU around it, which the program or its caller may use"
)
_OTHER_DTYPES = (
    "only CUDA autocasts to dtypes other than float16 and bfloat16; elsewhere autocast turns itself off"
)


def _off_on_host(file: SourceFile, call: cst.Call, plain: str, index: int | None) -> tuple[list[Edit], str]:
    """Edits that keep an autocast or a scaler off on a host, and why the edit of the call is unsafe.

    Args:
        file: the file.
        call: the call.
        plain: the name of the class.
        index: the position of the argument ``enabled``; ``None`` if there is none.
    """
    unsafe = ""
    given = keyword(call, "enabled") if index is None else argument_of(call, "enabled", index)
    is_guarded = file.is_guarded(call)
    if plain == "autocast" and file.autocasts_on_host and not is_guarded and _may_keep_hosts(file, call):
        return _as_around(file, call, given.value if given is not None else None), unsafe
    if plain != "GradScaler" and file.autocasts_on_host and not is_guarded:
        unsafe = _TURNS_OFF_HOSTS if plain == "autocast" else WITHIN_HOSTS
    if plain == "autocast" and dotted(given.value if given is not None else None) != "False":
        unsafe = _unsafe_dtype(file, call) or unsafe
    if index is None or is_guarded:
        return [], unsafe
    if given is not None:
        return also_an_accelerator(file, given.value), unsafe
    if has_unpacking(call):
        return [], f"on a host {plain} is on unless the unpacked arguments turn it off"
    condition = f"enabled={host_guard(file, file.quote(call))}"
    if not call.args:
        return [insert(file.span(call).end - 1, condition)], unsafe
    return [insert(file.span(call.args[-1].value).end, f", {condition}")], unsafe


def _may_keep_hosts(file: SourceFile, call: cst.Call) -> bool:
    """Whether an autocast is entered where it is made, and sets nothing but whether it is on."""
    takes_dtype = keyword(call, "dtype") is not None or keyword(call, "cache_enabled") is not None
    if takes_dtype or has_unpacking(call) or not isinstance(file.tree.parent(call), cst.WithItem):
        return False
    return len(positional(call)) < 2


def _as_around(file: SourceFile, call: cst.Call, value: cst.BaseExpression | None) -> list[Edit]:
    """Edits after which an autocast leaves that of the CPU as it is around it, on a host."""
    quote = file.quote(call)
    here = host_guard(file, quote)
    around = f"{file.torch}.is_autocast_enabled({quote}cpu{quote})"
    if value is None or dotted(value) == "True":
        text = f"{here} or {around}"
        if value is not None:
            return [replace(file.span(value), text)]
        at = file.span(call.args[-1].value).end if call.args else file.span(call).end - 1
        return [insert(at, f"{', ' if call.args else ''}enabled={text}")]
    place = file.span(value)
    if dotted(value) == "False":
        is_host = here.replace("!=", "==") if "!=" in here else f"not {here}"
        return [replace(place, f"{is_host} and {around}")]
    is_loose = isinstance(value, (cst.IfExp, cst.Lambda, cst.NamedExpr)) and not value.lpar
    open_, close = ("(", ")") if is_loose else ("", "")
    return [insert(place.start, open_), insert(place.end, f"{close} if {here} else {around}")]


def also_an_accelerator(file: SourceFile, value: cst.BaseExpression) -> list[Edit]:
    """Edits that make a condition false on a host; none if it is false there already."""
    condition, place = host_guard(file, file.quote(value)), file.span(value)
    if dotted(value) == "False" or file.tests_device(value):
        return []
    if dotted(value) == "True":
        return [replace(place, condition)]
    is_loose = isinstance(value, (cst.IfExp, cst.Lambda, cst.NamedExpr)) or (
        isinstance(value, cst.BooleanOperation) and isinstance(value.operator, cst.Or)
    )
    if is_loose and not value.lpar:
        return [insert(place.start, "("), insert(place.end, f") and {condition}")]
    return [insert(place.end, f" and {condition}")]


def _unsafe_dtype(file: SourceFile, call: cst.Call) -> str:
    """Why the dtype of an autocast is unsafe; ``""`` if it is not."""
    given = argument_of(call, "dtype", 1)
    if given is None or _is_half(file, given.value, 3):
        return ""
    named = file.tree.qualified(given.value) or ""
    return _OTHER_DTYPES if named.startswith("torch.") else f"nothing shows the dtype, and {_OTHER_DTYPES}"


def _is_half(file: SourceFile, value: cst.CSTNode, depth: int) -> bool:
    """Whether a value is a 16-bit dtype or ``None``, as far as the file shows."""
    if isinstance(value, cst.IfExp):
        return all(_is_half(file, side, depth) for side in (value.body, value.orelse))
    if dotted(value) == "None" or file.tree.qualified(value) in _HALVES:
        return True
    if not isinstance(value, cst.Name) or not depth:
        return False
    found = file.bound_values(value)
    return bool(found) and all(one is not None and _is_half(file, one, depth - 1) for one in found)


def _is_asked_for(file: SourceFile, module: cst.CSTNode) -> bool:
    """Whether code asks only whether a module has a name: ``getattr(torch.cuda.amp, "autocast") is not None``."""
    given = file.tree.given_to(module)
    args = given.call.args if given is not None else ()
    if given is None or given.index != 0 or len(args) < 2 or string_value(args[1].value) not in _OF_AMP:
        return False
    is_compared = isinstance(file.tree.parent(given.call), cst.Comparison)
    return given.name == "hasattr" or (given.name == "getattr" and is_compared)


def _has_dtype(call: cst.Call) -> bool:
    return keyword(call, "dtype") is not None or len(positional(call)) > 1 or has_unpacking(call)
