"""The rule ACC101, for a call of `torch.cuda`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.branches import where_true
from acclimate_port.conditions.checkpoints import decides_location
from acclimate_port.conditions.cuda_only import (
    REPORTS,
    chooses_for_library,
    chooses_package,
    is_flag_beside_others,
    reason_to_keep,
    reports_cuda,
    returns_word,
    word_of_library,
)
from acclimate_port.conditions.device_counts import divides, ends_without
from acclimate_port.conditions.given_away import reason_against_giving
from acclimate_port.conditions.guarded_settings import setting_guarded
from acclimate_port.conditions.host_answers import (
    asks_for_none,
    asks_for_several,
    is_for_cuda_alone,
    needs_streams,
    other_kinds,
)
from acclimate_port.conditions.host_memory import MAY_BE_HOSTS, may_be_of_host
from acclimate_port.conditions.proofs import compares_device, names_cuda, whole_value
from acclimate_port.conditions.statements import whole_condition
from acclimate_port.dataflow.own_devices import bound_elsewhere
from acclimate_port.new_code.added_functions import ACCELERATOR_TYPE
from acclimate_port.new_code.edits import Edit, Part, insert, replace
from acclimate_port.new_code.targets import AcclimateTarget, Missing, Spelling, TorchTarget
from acclimate_port.rules.base import Example, Finding, Rule, cuda_name, is_assigned, margin_of
from acclimate_port.rules.comparison_edits import FOR_EACH, host_guard, host_test
from acclimate_port.source.torch_cuda import CURRENT_STREAMS, FIGURES
from acclimate_port.source.tree import (
    Span,
    called_name,
    child_nodes,
    has_unpacking,
    last_name,
    positional,
    string_value,
    walk,
)
from acclimate_port.source.vendors import WITHOUT_STREAMS
from acclimate_port.source_file import SourceFile

OWN_RULE = ("amp", "nvtx", "CUDAGraph", "graph", "default_generators", "current_device")
_HANDLES = ("cuda_stream", "cuda_event", "_as_parameter_")
_PARAMETERS = {"Event": ("enable_timing", "blocking", "interprocess"), "Stream": ("device", "priority")}
"""Parameters of classes, which torch's own classes for any device take by keyword only, or in another order."""
_STATES = ("get_rng_state", "set_rng_state", "manual_seed")
_STEPS = 3
"""How many names are followed to where a state comes from."""
_TENSOR_SUFFIX = "Tensor"
_ON_EVERY_DEVICE = ("name", "total_memory")
_SHOW_PROPERTIES = ("print", "str", "repr", "getattr", "info", "debug", "warning", "format", "append")
_PROPERTIES_OF_HOST = {"name": "'cpu'", "gcnArchName": "''", "multi_processor_count": "1"}
"""The values of CUDA device properties to use on other devices; ``0`` for all others."""


def has_specific_rule(name: str) -> bool:
    """Whether another rule handles a name of ``torch.cuda``."""
    return name.split(".")[0] in OWN_RULE or name.endswith(_TENSOR_SUFFIX)


def guarded(file: SourceFile, call: cst.Call, spelling: Spelling, *parts: Part) -> tuple[Part, ...]:
    """A call, with a condition around it if the target's function would raise on a CPU-only machine."""
    if spelling.on_host is None or (spelling.condition is None and file.is_guarded(call)):
        return parts
    quote = file.quote(call)
    condition = spelling.condition.replace('"', quote) if spelling.condition else host_guard(file, quote)
    if condition in _conditions_around(file, call):
        return parts
    statement = file.tree.parent(call)
    if isinstance(statement, cst.Expr):
        margin = margin_of(file, statement) if not call.lpar else None
        if margin is not None:
            return (f"if {condition}:{file.tree.newline}{margin}{file.tree.indent_at(call)}", *parts)
        return (*parts, f" if {condition} else None")
    on_host = spelling.on_host.replace("'", quote)
    if isinstance(statement, cst.Arg) and not statement.star:
        return (*parts, f" if {condition} else {on_host}")
    return ("(", *parts, f" if {condition} else {on_host})")


def _conditions_around(file: SourceFile, call: cst.Call) -> Iterator[str]:
    """The ported texts of the tests for a device that are the whole condition of an ``if`` around a call."""
    for below, around in file.tree.upwards(call):
        test = around.test if isinstance(around, cst.If) and below is around.body else None
        if isinstance(test, cst.Call) and cuda_name(file, test.func) == "is_available":
            yield f"{file.target.device_type} {host_test(file.quote(call), other_kinds(file, test))}"
        if isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            return


def _device_that_is_set(file: SourceFile, call: cst.Call) -> cst.BaseExpression | None:
    """The index in ``torch.cuda.set_device(torch.cuda.device(i))``, if it can replace the device."""
    given = file.tree.given_to(call)
    if given is None or cuda_name(file, given.call.func) != "set_device":
        return None
    return call.args[0].value if len(call.args) == 1 and call.args[0].keyword is None else None


_OF_STREAMS = {
    *("wait_stream", "wait_event", "record_stream", "record_event", "record", "wait", "synchronize"),
    *("query",),
}


def _only_waits(file: SourceFile, statement: cst.CSTNode) -> bool:
    """Whether a statement does nothing but order streams, so that a host can skip it: ``s.wait_stream(…)``."""
    call = statement.value if isinstance(statement, cst.Expr) else None
    return isinstance(call, cst.Call) and called_name(call) in _OF_STREAMS


def _with_default(file: SourceFile, call: cst.Call, spelling: Spelling, rest: Span) -> tuple[Part, ...]:
    """A call of a function that a device's module may lack; ``()`` if the call is a whole statement."""
    if isinstance(file.tree.parent(call), cst.Expr) or spelling.on_host is None:
        return ()
    quote = file.quote(call)
    module, _, name = spelling.text.rpartition(".")
    takes = "" if not call.args else " *_, **__" if any(argument.keyword for argument in call.args) else " *_"
    on_host = spelling.on_host.replace("'", quote)
    return (f"getattr({module}, {quote}{name}{quote}, lambda{takes}: {on_host})", rest)


def _property_edits(file: SourceFile, call: cst.Call) -> list[Edit]:
    """Edits of the reads of CUDA-only properties through a name that holds device properties: ``held.major``."""
    target = file.tree.holder_of(call)
    if target is None:
        return []
    bound = (
        [assignment.node for assignment in file.tree.assignments(target)]
        if isinstance(target, cst.Name)
        else [target]
    )
    if min(file.span(definition).start for definition in bound) < file.span(target).start:
        return []  # the first binding has the edits
    edits: list[Edit] = []
    for use in file.tree.reads(target):
        asked = file.tree.parent(use)
        if isinstance(asked, cst.Attribute) and asked.value is use and not is_assigned(file, asked):
            quote, name = file.quote(asked), asked.attr.value
            on_host = _PROPERTIES_OF_HOST.get(name, "0").replace("'", quote)
            edits.append(
                replace(file.span(asked), "getattr(", file.span(use), f", {quote}{name}{quote}, {on_host})")
            )
    return edits


def _property_read(file: SourceFile, call: cst.Call, name: str) -> tuple[cst.CSTNode, str] | None:
    """The attribute read from a call's result, and the expression to use instead on a CPU-only machine.

    ``torch.cuda.get_device_properties(0).total_memory`` needs a value for the memory, not for the properties.
    """
    holder = file.tree.parent(call)
    if name == "get_device_properties" and isinstance(holder, cst.Attribute):
        return holder, _PROPERTIES_OF_HOST.get(holder.attr.value, "0")
    if name == "memory_stats" and isinstance(holder, cst.Subscript) and holder.value is call:
        return holder, "0"
    return None


class RuntimeCall(Rule[cst.Call]):
    """Calls of ``torch.cuda``."""

    code = "ACC101"
    name = "runtime-call"
    summary = "a call of `torch.cuda`"
    explanation = """\
Most functions of `torch.cuda` exist on every accelerator under the same name. `get_accelerator()` has them with the
same arguments. torch has some in `torch.accelerator`, a few of them renamed, and others in the device's module.
`torch.accelerator` raises on a CPU-only machine, so `--to torch` adds a test around a call that has none. Functions
that MPS lacks in torch, such as memory statistics, are not called there. A number of devices stays 0 on a CPU-only machine,
also where it is a divisor or sets the number of processes.

`get_accelerator().is_available()` is also true on a CPU-only machine, so `torch.cuda.is_available()` becomes
`get_accelerator().device_name() != "cpu"`. A program still takes its CPU path, with its own precision, options and
kernels, and one that asserts CUDA still ends there. The same holds for `device_count()`, which is 0 there. A test that
controls the use of a package for NVIDIA GPUs is left, also if other files import the package by its result, and so is one of
several flags, such as `is_cuda_available` beside `is_npu_available`. `is_bf16_supported()`
becomes `is_bf16_supported(including_emulation=True)`: by default torch counts GPUs that emulate bfloat16, and acclimate
does not. It is unsafe unless `is_available()` stands beside it: the result is `True` on a CPU, where `torch.cuda`
returns `False`. A test whose branch loads a checkpoint without a device is unsafe. So is what chooses a device in a file where
any flag decides whether a checkpoint is loaded without a device or to the host, where a call gets a stream of CUDA and the
memory of tensors, and in a function whose docstring says that it is about kernels or operators of CUDA.

A guard and what it guards are one decision, also through a flag that the guard sets, a part of a function's result, a field of a class, a loop over the devices, a default
that it replaces with `"cpu"`, or a name that brings a device to it. A test that skips tests is ported with what it skips,
and the guards of objects that meet (in a function, its callers or a class) are ported together. A flag called `cuda` that only other code reads is unsafe. A question that is printed or
kept as "CUDA available" stays, also through a name that puts nothing on a device, with the name of the device that is told
behind such a test. So do a condition about TensorRT or another library of NVIDIA's, and one that chooses the build of a
package (`"+cpu"`, `pip install`). What else is told of a device is ported with what chooses it.

A question or a number is unsafe where it reaches code that means CUDA by it: another library, directly, through names, or in a
dictionary of arguments (`easyocr.Reader(gpu=torch.cuda.is_available())`, `Trainer(devices=torch.cuda.device_count())`); a
setting `accelerator` that it decides about, which is Lightning's; a variable of the environment; a text that is no message, such
as a command, a script or a part of a name (`f"torchrun --nproc_per_node={n}"`); and words such as `"--cuda"` and `"h264_nvenc"`,
or calls of other libraries such as `spacy.require_gpu()`, in the branch that it decides about. The same for what Ray, Dask,
submitit or SLURM are told of GPUs, and for a number in a file whose commands name GPUs. Libraries that take any accelerator
(transformers, accelerate, diffusers), messages, logs and errors do not count.

What serves one purpose in a function is one decision too: the backend of a process group and the devices that the function
chooses, a context or a handler and its body, the terms of a sum, and a number of devices and the calls that get it.

Without CUDA, `torch.cuda.manual_seed`, `seed`, `set_rng_state` and their variants for all devices do nothing. The
accelerator of a CPU-only machine is the CPU, whose generator they would change, so the edit adds a test around a call
that has none. The same holds for memory figures, which are 0 without CUDA; on a CPU acclimate returns the memory of the
process. A figure of a device that may be a CPU's is unsafe, and so are a figure and the test around it where the device of
their program stays.

If the file has code for another device, a test is false there, as before. A test in another function that only waits,
seeds or frees memory is not: that is right on every device. A `synchronize` that gets a device goes with that device.

`torch.cuda.Event(…)` fails on a host at the latest when it is recorded. With `--to torch` its edit is safe if the same
block records it; others are unsafe, as torch's events of a CPU have no methods, and so are the devices of the file.

Those calls and `empty_cache` do not count the devices, and their edits do. They are unsafe where the project sets a variable
such as `CUDA_VISIBLE_DEVICES` later, or forks. So is a call whose error, on a machine without CUDA, the function
catches: it is there to find out whether there is CUDA.

With `--to torch` a figure of memory that torch lacks for MPS is 0 there, so a figure that is a divisor is unsafe. A state of
the random numbers that comes from a checkpoint is unsafe too: it fits CUDA's generators only.

`torch.cuda.device(-1)` and `set_device(-1)` do nothing, and no accelerator of acclimate has such a device. Where the file
sets the number's name to a negative number, and no condition around the call names it, the edit is unsafe. A rank is no
such number: programs without a launcher set it to -1 and do not get to the call.

Functions that only NVIDIA GPUs have are left. So is a stream whose handle is read (`.cuda_stream`), since a CUDA
kernel takes the handle, and a call in a function that TorchScript compiles, which knows only `torch.cuda`."""
    examples = (
        Example(
            "import torch\n\ntorch.cuda.synchronize()\n",
            "import torch\nfrom acclimate import get_accelerator\n\nget_accelerator().synchronize()\n",
            "import torch\n\nif torch.accelerator.is_available():\n    torch.accelerator.synchronize()\n",
        ),
        Example(
            "import torch\n\nif torch.cuda.is_available():\n    torch.cuda.set_device(0)\n",
            "import torch\nfrom acclimate import get_accelerator\n\n"
            'if get_accelerator().device_name() != "cpu":\n    get_accelerator().set_device(0)\n',
            "import torch\n\nif torch.accelerator.is_available():\n    torch.accelerator.set_device_index(0)\n",
        ),
        Example(
            "import torch as th\n\npeak = th.cuda.max_memory_allocated(device=1)\n",
            "import torch as th\nfrom acclimate import get_accelerator\n\n"
            "peak = (get_accelerator().max_memory_allocated(device_index=1) "
            'if get_accelerator().device_name() != "cpu" else 0)\n',
            "import torch as th\n\n\n"
            + ACCELERATOR_TYPE.replace("torch.", "th.")
            + "\n\npeak = (th.accelerator.max_memory_allocated(1) "
            'if accelerator_type() not in ("cpu", "mps") else 0)\n',
        ),
        Example("import torch\n\ntorch.cuda.cudart().cudaProfilerStart()\n", None, None),
    )
    nodes = (cst.Call,)

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
        name = cuda_name(file, node.func)
        if not name or has_specific_rule(name):
            return None
        claims = (node.func,)
        if name in ("is_available", "device_count") and reports_cuda(file, node):
            return self.exempt(file, node, REPORTS, claims)
        if name == "is_available" and chooses_package(file, node):
            return self.left(file, node, "it controls the use of a package for NVIDIA GPUs", claims)
        if name == "device" and not node.args:
            return self.left(file, node, "torch.cuda.device raises an error without an argument", claims)
        if name == "device" and (chosen := _device_that_is_set(file, node)) is not None:
            return self.becomes(file, node, file.span(chosen), claims=claims)
        finding = self._call(file, node, name, claims)
        if finding.edits and finding.safe and (reason := self._reason_to_doubt(file, node, name)):
            finding.safe, finding.reason = False, reason
        return finding

    @staticmethod
    def _reason_to_doubt(file: SourceFile, node: cst.Call, name: str) -> str:
        if may_be_of_host(file, node, name):
            return MAY_BE_HOSTS
        figures = _figures(file, node, name) if isinstance(file.target, TorchTarget) else ()
        if any(divides(file, figure) for figure in figures):
            return "torch lacks this figure for MPS, and 0 in its place is a divisor"
        if name in ("Event", "Stream") and positional(node):
            return "the classes of other accelerators take these arguments by their names"
        if name in FIGURES and _is_in_test(file, node):
            return "a test expects this figure of CUDA's allocator; others may free memory later"
        if name.startswith("set_rng_state") and _is_loaded(file, node):
            return "a state that was saved on CUDA fits no other device's generator"
        if name == "get_device_properties" and (own := _own_property(file, node)):
            return f"only CUDA's devices have the property `{own}`"
        if name == "get_device_properties" and _gives_properties(file, node):
            return "other code gets these properties, of which only CUDA's devices may have some"
        if name in ("is_available", "device_count") and (word := word_of_library(file, node)):
            return f"another library gets {word}, and may not know other accelerators by it"
        if name in ("is_available", "device_count") and returns_word(file, node):
            return "its function gives the program's own word for a device, of which others may make CUDA"
        if name in ("is_available", "device_count") and (reason := reason_against_giving(file, node)):
            return reason
        is_number = name in ("device", "set_device") and isinstance(file.target, AcclimateTarget)
        if is_number and node.args and _may_be_negative(file, node.args[0].value):
            return "for torch.cuda a negative number changes nothing, and it is no device of an accelerator"
        if name == "is_available" and ends_without(file, node) and (reason := bound_elsewhere(file, node)):
            return reason
        if name == "is_available" and (setting := setting_guarded(file, node)):
            return f"`{setting}` may name a device of CUDA where there is none, which is not ported"
        if name == "is_available" and decides_location(file, node):
            return "a checkpoint saved on CUDA is loaded to CUDA unless `map_location` names the device"
        return ""

    def _call(self, file: SourceFile, node: cst.Call, name: str, claims: tuple[cst.CSTNode, ...]) -> Finding:
        is_test = name == "is_available" or (name == "device_count" and bool(where_true(file, node)))
        stays = reason_to_keep(file, node) if is_test else ""
        stays = stays or chooses_for_library(file, node) or ""
        if name == "get_device_capability" and (tested := _beside_test(file, node)) is not None:
            stays = reason_to_keep(file, tested)
        if not stays and name in ("is_available", "device_count") and is_flag_beside_others(file, node):
            stays = "the program has another flag for other devices beside it"
        if stays:
            return self.left(file, node, stays, claims)
        if is_test and is_for_cuda_alone(file, node):
            return self.left(file, node, FOR_EACH, claims, stands_alone=True)
        if name == "is_available":
            kinds = other_kinds(file, node)
            if kinds or isinstance(file.target, AcclimateTarget):
                return self._not_on_a_host(file, node, kinds)
        if name == "device_count" and isinstance(file.target, AcclimateTarget) and not node.args:
            finding = self._count(file, node, file.target)
            if finding is not None:
                return finding
        if name == "is_available" and needs_streams(file, node):
            return self._not_on_a_host(file, node, WITHOUT_STREAMS)
        if name in _STATES and "_lazy_call" in file.names:
            return self.left(
                file, node, "it must match torch.cuda's `_lazy_call`, which no rule converts", claims
            )
        spelling = file.target.runtime(name)
        if isinstance(spelling, Missing):
            return self.left(file, node, spelling.reason, claims)
        if name in (*CURRENT_STREAMS, "Stream", "Event") and _gives_handle(file, node):
            return self.left(file, node, "only CUDA kernels take a CUDA stream's handle", claims)
        if name in CURRENT_STREAMS and isinstance(file.target, TorchTarget):
            return self._stream(file, node, spelling)
        edits = self._keywords(file, node, spelling, _PARAMETERS.get(name, ()))
        if edits is None:
            return self.left(file, node, f"only CUDA has these arguments of torch.cuda.{name}", claims)
        function = file.span(node.func)
        rest = Span(function.end, file.span(node).end)
        before = Span(file.span(node).start, function.start)
        kept: tuple[Part, ...] = (before,) if before.start != before.end else ()
        if isinstance(file.target, TorchTarget):
            asked = _property_read(file, node, name)
            if asked is not None:
                holder, on_host = asked
                if isinstance(holder, cst.Attribute) and holder.attr.value not in _ON_EVERY_DEVICE:
                    return self._property(file, node, holder, on_host, spelling, edits)
                spelling = dataclasses.replace(spelling, on_host=on_host)
                rest = Span(function.end, file.span(holder).end)
                parts = guarded(file, node, spelling, *kept, spelling.text, rest)
                return self.convert(file, node, replace(file.span(holder), *parts), *edits, claims=claims)
            if name == "get_device_properties":
                edits += _property_edits(file, node)
            if spelling.condition and "hasattr(" in spelling.condition:
                parts = _with_default(file, node, spelling, rest)
                if parts:
                    whole = replace(file.span(node), *kept, *parts)
                    return self.convert(file, node, whole, *edits, claims=claims)
        elif _property_read(file, node, name) is not None:
            # Without CUDA there are no statistics to read an entry of, so the program ends there.
            spelling = dataclasses.replace(spelling, on_host=None)
        whole = replace(file.span(node), *guarded(file, node, spelling, *kept, spelling.text, rest))
        unsafe = "" if name == "Event" and _is_recorded(file, node) else spelling.unsafe
        return self.convert(file, node, whole, *edits, unsafe=unsafe, claims=claims)

    def _stream(self, file: SourceFile, node: cst.Call, spelling: Spelling) -> Finding:
        """A call of ``torch.cuda.current_stream``; a statement with it is skipped on a CPU-only machine."""
        edits = [replace(file.span(node.func), spelling.text)]
        statement = file.tree.statement(node)
        margin = margin_of(file, statement) if isinstance(statement, cst.Expr) else None
        asks = [
            descendant
            for descendant in walk(statement)
            if isinstance(descendant, cst.Call) and cuda_name(file, descendant.func) in CURRENT_STREAMS
        ]
        if file.is_guarded(node) or margin is None or not _only_waits(file, statement):
            unsafe = (
                ""
                if file.is_guarded(node)
                else "torch's stream of a CPU has no methods; acclimate's has (--to acclimate)"
            )
            return self.convert(file, node, *edits, unsafe=unsafe, claims=(node.func,))
        if file.span(node).start == min(file.span(ask).start for ask in asks):
            condition = f"if {file.target.device_type} {host_test(file.quote(node), WITHOUT_STREAMS)}:"
            before = f"{condition}{file.tree.newline}{margin}{file.tree.indent_at(node)}"
            edits.append(insert(file.span(statement).start, before))
        return self.convert(file, node, *edits, claims=(node.func,))

    def _property(
        self, file: SourceFile, call: cst.Call, asked: cst.Attribute, on_host: str, spelling: Spelling,
        edits: list[Edit],
    ) -> Finding:  # fmt: skip
        """A property that only CUDA devices have: ``torch.cuda.get_device_properties(0).major``."""
        rest = Span(file.span(call.func).end, file.span(call).end)
        quote = file.quote(call)
        properties = _with_default(file, call, spelling, rest) or (spelling.text, rest)
        name = f"{quote}{asked.attr.value}{quote}"
        parts = ("getattr(", *properties, f", {name}, {on_host.replace(chr(39), quote)})")
        return self.convert(file, call, replace(file.span(asked), *parts), *edits, claims=(call.func,))

    def _count(self, file: SourceFile, node: cst.Call, target: AcclimateTarget) -> Finding | None:
        """A device count; acclimate counts at least one device on a CPU-only machine, torch.cuda none.

        ``None``: the program has tested for one.
        """
        quote, kind = file.quote(node), target.device_type
        # A device whose type is compared beside it may be CUDA's on a host, if a user asks for it.
        if file.is_guarded(node) and not compares_device(whole_value(file, node)):
            return None
        asked = asks_for_none(file, node)
        if asked is not None:
            around, is_none = asked
            text = f"{kind} {host_test(quote, other_kinds(file, around), is_host=is_none)}"
            return self.convert(file, node, replace(file.span(around), text), claims=(node.func,))
        several = asks_for_several(file, node)
        if several is not None:
            # acclimate counts a host with two NUMA nodes as two devices; the program must treat it as one.
            around, is_several = several
            joined = "and" if is_several else "or"
            start = f"({kind} {host_test(quote, is_host=not is_several)} {joined} "
            count, place = file.span(node), file.span(around)
            parts = (start, f"{target.accelerator}.device_count()", Span(count.end, place.end), ")")
            return self.convert(file, node, replace(place, *parts), claims=(node.func,))
        text = f"({target.accelerator}.device_count() if {kind} {host_test(quote)} else 0)"
        return self.becomes(file, node, text, claims=(node.func,))

    def _not_on_a_host(self, file: SourceFile, node: cst.Call, kinds: tuple[str, ...]) -> Finding:
        """A test that is false on a CPU-only machine, and for the device types in ``kinds``."""
        quote, above = file.quote(node), file.tree.parent(node)
        negated = isinstance(above, cst.UnaryOperation) and isinstance(above.operator, cst.Not)
        text = f"{file.target.device_type} {host_test(quote, kinds, is_host=negated)}"
        place = above if negated and above is not None else node
        if isinstance(file.tree.parent(place), (cst.Comparison, cst.ComparisonTarget, cst.BinaryOperation)):
            text = f"({text})"
        if isinstance(place, cst.UnaryOperation) and place.lpar:
            text = f"({text})"
        finding = self.convert(file, node, replace(file.span(place), text), claims=(node.func,))
        return finding

    @staticmethod
    def _keywords(
        file: SourceFile, call: cst.Call, spelling: Spelling, parameters: tuple[str, ...]
    ) -> list[Edit] | None:
        """Edits of the keywords' names; ``None`` if the target lacks an argument.

        Args:
            parameters: those of torch.cuda, if other devices' classes may have them in another order.
        """
        edits: list[Edit] = []
        if spelling.keywords == () and call.args:
            return None
        if spelling.default:
            if has_unpacking(call):
                return None  # the unpacked arguments are unknown
            if not call.args:
                edits.append(insert(file.span(call).end - 1, spelling.default))
        unnamed = [argument for argument in call.args if argument.keyword is None]
        if parameters and len(unnamed) <= len(parameters) and not has_unpacking(call):
            named = zip(parameters, unnamed, strict=False)
            edits += [insert(file.span(one.value).start, f"{name}=") for name, one in named]
        for argument in call.args:
            if argument.keyword is None:
                continue
            said = argument.keyword.value
            if spelling.positional_only:
                if said != "device" or has_unpacking(call) or len(call.args) > 1:
                    return None
                place = Span(file.span(argument.keyword).start, file.span(argument.value).start)
                edits.append(replace(place))
            elif spelling.keywords is not None and said not in spelling.keywords:
                if said != "device" or "device_index" not in spelling.keywords:
                    return None
                edits.append(replace(file.span(argument.keyword), "device_index"))
        return edits


def _may_be_negative(file: SourceFile, number: cst.BaseExpression) -> bool:
    """Whether the file sets a name or an attribute like this one to a negative number: ``args.gpu = -1``.

    A rank is none that reaches the call: without a launcher, programs set it to -1 and do not get there.
    """
    name = last_name(number)
    if not name or name.endswith("rank") or _is_tested(file, number, name):
        return False
    for one in file.tree.of_type(cst.Assign):
        is_same = any(last_name(target.target) == name for target in one.targets)
        if (
            is_same
            and isinstance(one.value, cst.UnaryOperation)
            and isinstance(one.value.operator, cst.Minus)
        ):
            return True
    return False


def _is_tested(file: SourceFile, number: cst.BaseExpression, name: str) -> bool:
    """Whether a condition around a number names it: ``if args.gpu >= 0:``."""
    around = (one for one in file.tree.ancestors(number) if isinstance(one, (cst.If, cst.IfExp)))
    return any(last_name(part) == name for one in around for part in walk(one.test))


def _beside_test(file: SourceFile, call: cst.Call) -> cst.CSTNode | None:
    """The comparison of a compute capability that another test for CUDA stands beside, with ``and`` or ``or``."""
    for around in file.tree.ancestors(call):
        if isinstance(around, cst.Comparison):
            whole = whole_condition(file, around)
            # The device whose capability is asked for is not compared: `get_device_capability("cuda")`.
            beside = (part for part in _parts_besides(whole, call) if names_cuda(part))
            asks = "is_available(" in file.tree.source(whole) or next(beside, None) is not None
            return around if asks else None
        if not isinstance(around, (cst.Subscript, cst.ComparisonTarget)):
            return None
    return None


def _parts_besides(whole: cst.CSTNode, besides: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The parts of a condition without a call in it, each as large as it can be."""
    if whole is besides:
        return
    if not any(part is besides for part in walk(whole)):
        yield whole
        return
    for part in child_nodes(whole):
        yield from _parts_besides(part, besides)


def _is_loaded(file: SourceFile, call: cst.Call) -> bool:
    """Whether the state that a call sets is an entry of something, such as a checkpoint."""
    parts = [part for given in call.args[:1] for part in walk(given.value)]
    for _ in range(_STEPS):
        names = [part for part in parts if isinstance(part, cst.Name)]
        values = [value for name in names for value in _values_of(file, name)]
        parts += [part for value in values for part in walk(value)]
    return any(
        (isinstance(part, cst.Index) and string_value(part.value) is not None)
        or (isinstance(part, cst.Call) and called_name(part) in ("get", "pop", "load"))
        for part in parts
    )


def _values_of(file: SourceFile, name: cst.Name) -> Iterator[cst.CSTNode]:
    """What a name holds, or the loop goes over whose variable it is."""
    yield from (value for value in file.bound_values(name) if value is not None)
    for assignment in file.tree.assignments(name):
        at = file.tree.parent(assignment.node)
        while isinstance(at, (cst.Element, cst.Tuple)):
            at = file.tree.parent(at)
        yield from [at.iter] if isinstance(at, (cst.For, cst.CompFor)) else []


def _is_in_test(file: SourceFile, figure: cst.CSTNode) -> bool:
    """Whether a test holds a figure, and compares values."""
    functions = (one for one in file.tree.ancestors(figure) if isinstance(one, cst.FunctionDef))
    tests = (one for one in functions if one.name.value.startswith("test"))
    return any("assert" in file.tree.source(one) for one in tests)


def _figures(file: SourceFile, call: cst.Call, name: str) -> list[cst.CSTNode]:
    """The figures of memory that a call gives, in place of which MPS gets 0."""
    if name in FIGURES or name == "mem_get_info":
        return [call]
    if name not in ("get_device_properties", "memory_stats"):
        return []
    read = [file.tree.parent(holder) for holder in _holders(file, call)]
    return [one for one in read if isinstance(one, (cst.Attribute, cst.Subscript))]


def _holders(file: SourceFile, call: cst.Call) -> list[cst.CSTNode]:
    """A call, and the reads of the name or attribute that holds its result."""
    target = file.tree.holder_of(call)
    return [call, *(file.tree.reads(target) if target is not None else ())]


def _own_property(file: SourceFile, call: cst.Call) -> str:
    """A property that only CUDA's devices have and that is read from a call's result; ``""`` if none is."""
    read = [file.tree.parent(holder) for holder in _holders(file, call)]
    names = [asked.attr.value for asked in read if isinstance(asked, cst.Attribute)]
    return next((name for name in names if name not in _ON_EVERY_DEVICE), "")


def _gives_properties(file: SourceFile, call: cst.Call) -> bool:
    """Whether other code gets the properties of a device, and may read any of them: ``return properties``."""
    for holder in _holders(file, call):
        at, given = file.tree.parent(holder), file.tree.given_to(holder)
        if isinstance(at, cst.Return):
            return True
        if given is not None and given.name == "getattr" and len(given.call.args) == 2:
            return string_value(given.call.args[1].value) not in _ON_EVERY_DEVICE
        if given is not None and given.name not in _SHOW_PROPERTIES:
            return True
    return False


def _is_recorded(file: SourceFile, event: cst.Call) -> bool:
    """Whether a statement of the same block records an event, which fails without a device in any case."""
    target, block = file.tree.holder_of(event), _block(file, event)
    if target is None or file.tree.around(event, cst.Try) is not None:
        return False
    for read in file.tree.reads(target):
        asked = file.tree.parent(read)
        call = file.tree.parent(asked) if isinstance(asked, cst.Attribute) and asked.value is read else None
        if not isinstance(call, cst.Call) or called_name(call) != "record":
            continue
        if isinstance(file.tree.parent(call), cst.Expr) and _block(file, read) is block:
            return True
    return False


def _block(file: SourceFile, node: cst.CSTNode) -> cst.CSTNode | None:
    """The block of statements that a node is in."""
    blocks = (one for one in file.tree.ancestors(node) if isinstance(one, (cst.IndentedBlock, cst.Module)))
    return next(blocks, None)


def _gives_handle(file: SourceFile, call: cst.Call) -> bool:
    """Whether code reads a stream's handle, to pass it to a kernel: ``torch.cuda.current_stream().cuda_stream``."""
    holders = [file.tree.parent(use) for use in _holders(file, call)]
    return any(isinstance(at, cst.Attribute) and at.attr.value in _HANDLES for at in holders)
