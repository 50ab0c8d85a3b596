"""The rule ACC502, for `device_ids` of `DistributedDataParallel`, `device_id` of `init_process_group`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.dataflow.origins import Origin, origin_of
from acclimate_port.new_code.edits import insert
from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.rules.comparison_edits import host_guard, host_test
from acclimate_port.source.tree import called_name, dotted, entry_key, keyword, positional, string_value
from acclimate_port.source.values import Kind
from acclimate_port.source.vendors import WITHOUT_STREAMS
from acclimate_port.source_file import SourceFile


class DeviceIds(Rule[cst.Call]):
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

    def check(self, file: SourceFile, node: cst.Call) -> Finding | None:
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
        not_gloo = f"{file.target.device_type} {host_test(quote, WITHOUT_STREAMS)}"
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
            made = file.tree.value_of(assignment.node)
            found += _in_dictionary(made, word) if made is not None else []
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
        if isinstance(holder, cst.Subscript) and holder.value is use and entry_key(holder) == word:
            made = file.tree.value_of(holder)
            found += [made] if made is not None else []
        call = file.tree.parent(holder) if isinstance(holder, cst.Attribute) else None
        if isinstance(call, cst.Call) and called_name(call) == "update":
            given = keyword(call, word)
            found += [given.value] if given is not None else []
            found += [
                entry for arg in call.args if not arg.keyword for entry in _in_dictionary(arg.value, word)
            ]
    return found
