"""The rule ACC501, for `"nccl"` as a communication backend."""

from __future__ import annotations

import re

import libcst as cst

from acclimate_port.conditions.device_counts import ends_without
from acclimate_port.conditions.host_answers import ends_program_if_false
from acclimate_port.dataflow.uses import whole_choice
from acclimate_port.new_code.edits import insert, replace
from acclimate_port.rules.base import IMPORTS, WITH_HELPER, Example, Finding, Rule, is_read
from acclimate_port.rules.comparison_edits import HOST_CHANGES, OTHERS, false_on_host
from acclimate_port.source.survey import Survey, backends_given
from acclimate_port.source.tree import called_name, dotted, positional, string_value, walk
from acclimate_port.source.values import BACKEND_NAME
from acclimate_port.source_file import SourceFile, kept

_TAKES_BACKEND_FIRST = {"init_process_group", "init_distributed", "is_backend_available"}
_TAKES_BACKEND = {*_TAKES_BACKEND_FIRST, "new_group", "new_subgroups", "init_process_group_wrapper"}
_CONSTANTS = {"torch.distributed.Backend.NCCL", "torch.distributed.distributed_c10d.Backend.NCCL"}
_ASKS_FOR_NCCL = re.compile(r"torch\.distributed\.(?!is_nccl_available$)(\w+\.)*\w*nccl\w*$")
_ONLY_NCCL = "it asks for NCCL itself, and no rule converts this question"
_OPTION = re.compile(r"backend$", re.IGNORECASE)
_UNUSED = "nothing shows that torch.distributed gets the value of this option"
_FIELDS = {"field", "Field", "Option", "Argument", "attrib", "ib"}
"""Functions whose first argument, or `default`, is that of a field or a parameter."""
_ONE_OF_SEVERAL = "it is one of several backends to choose from"


class CommunicationBackend(Rule[cst.SimpleString | cst.Attribute | cst.Name | cst.Call]):
    """``"nccl"``."""

    code = "ACC501"
    name = "communication-backend"
    summary = '`"nccl"` as a communication backend'
    explanation = """\
`"nccl"` becomes `get_accelerator().communication_backend_name()`: `"nccl"` on CUDA, `"gloo"` on a CPU. `--to torch`
calls `torch.distributed.get_default_backend_for_device`. `torch.distributed.Backend.NCCL` and `is_nccl_available()` are
ported in the same way. `"cpu:gloo,cuda:nccl"` becomes `"cpu:gloo"` on a CPU-only machine, since torch refuses a device
that is named twice. In the `choices` of an option `"nccl"` stays, and the accelerator's backend is added, so that
scripts which pass `nccl` still start.

The default of an option, or of a field of a class of settings, is safe only if a file of the project shows that
torch.distributed gets its value. The arms of a choice (`"nccl" if cuda else "gloo"`) count like the whole choice.

A comparison, `backend == "nccl"`, stays false if the ranks use Gloo, as on a CPU (`!= "gloo"`): the branch is seldom
meant for a CPU. It becomes true there only under the conditions for `device == "cuda"`, see [ACC204](ACC204.md). A
file that only assigns literals to names, such as an mmcv config, is left: its loader may not run the import that the
edit needs."""
    examples = (
        Example(
            "import torch\n\n\ndef f():\n    torch.distributed.init_process_group(backend='nccl')\n",
            f"{IMPORTS}\ndef f():\n"
            "    torch.distributed.init_process_group(backend=get_accelerator().communication_backend_name())\n",
            f"{WITH_HELPER}def f():\n    torch.distributed.init_process_group("
            "backend=torch.distributed.get_default_backend_for_device(accelerator_type()))\n",
        ),
        Example(
            "import torch\n\n\ndef f():\n    torch.distributed.init_process_group('cpu:gloo,cuda:nccl')\n",
            f"{IMPORTS}\ndef f():\n"
            "    torch.distributed.init_process_group(('cpu:gloo' if get_accelerator().device_name() == 'cpu' else "
            "f'cpu:gloo,{get_accelerator().device_name()}:{get_accelerator().communication_backend_name()}'))\n",
            f"{WITH_HELPER}def f():\n"
            "    torch.distributed.init_process_group(('cpu:gloo' if accelerator_type() == 'cpu' else "
            "f'cpu:gloo,{accelerator_type()}:"
            "{torch.distributed.get_default_backend_for_device(accelerator_type())}'))\n",
        ),
    )
    nodes = (cst.SimpleString, cst.Attribute, cst.Name, cst.Call)

    def check(
        self, file: SourceFile, node: cst.SimpleString | cst.Attribute | cst.Name | cst.Call
    ) -> Finding | None:
        if isinstance(node, (cst.Attribute, cst.Name)):
            return self._constant(file, node)
        if isinstance(node, cst.Call):
            if _ASKS_FOR_NCCL.match(file.tree.qualified(node.func) or ""):
                return self.left(file, node, _ONLY_NCCL, (node.func,))
            if file.tree.qualified(node.func) != "torch.distributed.is_nccl_available" or node.args:
                return None
            asks = f"{file.torch}.distributed.is_backend_available({file.target.backend})"
            return self.becomes(file, node, asks, unsafe=HOST_CHANGES, claims=(node.func,))
        text = string_value(node)
        if text is None or isinstance(file.tree.parent(node), (cst.Expr, cst.ConcatenatedString)):
            return None
        if text in ("cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl"):
            return self._both(file, node)
        if text.lower() != "nccl":
            return None
        if _is_settings_alone(file, node):
            return self.left(
                file, node, "this file holds only settings, and their loader may not run an import"
            )
        found = self._role(file, node)
        if found is None:
            return self.left(file, node, "nothing shows that it is a backend of torch.distributed")
        if found == "data":
            return self.exempt(file, node, "it is a key of data or part of a message")
        if (comparison := _comparison(file, node)) is not None:
            return self._compared(file, node, comparison)
        if found == _ONE_OF_SEVERAL:
            # Scripts that pass the old name still start: many programs then choose another backend themselves.
            holder = file.tree.parent(file.tree.parent(node) or node)
            if holder is not None and file.target.backend in file.tree.source(holder):
                return self.exempt(file, node, "the accelerator's backend is already among the choices")
            beside = insert(file.span(node).end, f", {file.target.backend}")
            return self.convert(file, node, beside, unsafe=found)
        return self.becomes(file, node, file.target.backend, unsafe=found)

    def _compared(self, file: SourceFile, node: cst.CSTNode, comparison: cst.Comparison) -> Finding:
        """A comparison with NCCL's name, which stays false if ranks use Gloo, as on a CPU."""
        name = replace(file.span(node), file.target.backend)
        operator, edits = comparison.comparisons[0].operator, [name]
        negated = isinstance(operator, cst.NotEqual)
        refuses = ends_program_if_false(file, comparison) if negated else ends_without(file, comparison)
        if isinstance(operator, (cst.Equal, cst.NotEqual)) and not refuses:
            backend, quote = file.target.backend, file.quote(node)
            edits += false_on_host(file, comparison, quote, negated=negated, name=backend, host="gloo")
        return self.convert(file, node, *edits, unsafe=OTHERS if len(edits) > 1 else HOST_CHANGES)

    def _constant(self, file: SourceFile, node: cst.CSTNode) -> Finding | None:
        """A finding for ``torch.distributed.Backend.NCCL``, which is the string ``"nccl"``."""
        full = file.tree.qualified(node) or ""
        if full.startswith("torch.") and full.endswith(".ProcessGroupNCCL") and is_read(file, node):
            return self.left(file, node, _ONLY_NCCL)
        if full not in _CONSTANTS or not is_read(file, node):
            return None
        unsafe = ""
        if (comparison := _comparison(file, node)) is not None:
            return self._compared(file, node, comparison)
        if isinstance(file.tree.parent(node), (cst.DictElement, cst.Element)):
            unsafe = _ONE_OF_SEVERAL
        return self.becomes(file, node, file.target.backend, unsafe=unsafe)

    def _both(self, file: SourceFile, node: cst.CSTNode) -> Finding:
        """A finding for a string that names the backends of the CPU and of CUDA."""
        unsafe = self._role(file, node)
        if unsafe is None or unsafe == "data" or file.in_fstring(node):
            return self.left(file, node, "nothing shows that it is a backend of torch.distributed")
        quote, kind = file.quote(node), file.target.device_type
        return self.becomes(
            file,
            node,
            f"({quote}cpu:gloo{quote} if {kind} == {quote}cpu{quote} else "
            f"f{quote}cpu:gloo,{{{kind}}}:{{{file.target.backend}}}{quote})",
            unsafe=unsafe,
        )

    def _role(self, file: SourceFile, node: cst.CSTNode) -> str | None:
        """Why the edit is unsafe; ``""``: it is safe; ``"data"``: the string is data; ``None``: unknown."""
        at = file.tree.parent(whole_choice(file, node))
        if isinstance(at, cst.Arg):
            call = file.tree.parent(at)
            return self._argument(file, call, at) if isinstance(call, cst.Call) else None
        if isinstance(at, (cst.Comparison, cst.ComparisonTarget)):
            return HOST_CHANGES if _compares_backend(file, at) else None
        if isinstance(at, cst.Param):
            return "" if BACKEND_NAME.search(at.name.value) else None
        if isinstance(at, (cst.Assign, cst.AnnAssign)):
            targets = [target.target for target in at.targets] if isinstance(at, cst.Assign) else [at.target]
            names = [file.tree.source(target) for target in targets]
            if isinstance(at, cst.AnnAssign) and _is_field(file, at):
                return _of_option(file, names[0])
            return (
                "" if any(re.search(r"backend(['\"]\])?$", name, re.IGNORECASE) for name in names) else None
            )
        if isinstance(at, cst.DictElement):
            return "data" if at.key is node else None
        if isinstance(at, cst.Element):
            holder = file.tree.parent(file.tree.parent(at) or at)
            call = file.tree.parent(holder) if isinstance(holder, cst.Arg) else None
            is_choice = isinstance(holder, cst.Arg) and holder.keyword and holder.keyword.value == "choices"
            options = (
                [string_value(argument.value) or "" for argument in positional(call)]
                if isinstance(call, cst.Call)
                else []
            )
            chosen = is_choice and any(_OPTION.search(option) for option in options)
            return _ONE_OF_SEVERAL if chosen else None
        return "data" if isinstance(at, cst.Index) else None

    @staticmethod
    def _argument(file: SourceFile, call: cst.Call, argument: cst.Arg) -> str | None:
        name = called_name(call) or ""
        if name in _FIELDS and (field := _field(file, call)):
            word = argument.keyword.value if argument.keyword is not None else ""
            is_first = positional(call)[:1] == [argument]
            return _of_option(file, field) if is_first or word == "default" else None
        if argument.keyword is not None:
            word = argument.keyword.value
            if _OPTION.search(word):
                return ""
            if word == "default" and name in ("add_argument", "option", "Option"):
                options = [string_value(text.value) or "" for text in positional(call)]
                named = [option for option in options if _OPTION.search(option)]
                return _of_option(file, *named)
            return None
        if name in ("print", "info", "debug", "warning", "error"):
            return "data"
        index = positional(call).index(argument) if argument in positional(call) else None
        if name in _TAKES_BACKEND and (index == 0 or name not in _TAKES_BACKEND_FIRST):
            return ""
        key = 1 if name == "getattr" else 0
        said = string_value(call.args[key].value) if index is not None and index > key else None
        if name in ("get", "getattr", "pop", "setdefault", "DEFINE_string", "getenv") and _OPTION.search(
            said or ""
        ):
            return ""
        return None


def _of_option(file: SourceFile, *options: str) -> str | None:
    """Why the default of an option is unsafe; ``""``: torch.distributed gets it; ``None``: it is no backend."""
    names = {option.lstrip("-").replace("-", "_") for option in options if _OPTION.search(option)}
    if not names:
        return None
    return "" if names & _backends_used(file) else _UNUSED


@kept
def _backends_used(file: SourceFile) -> frozenset[str]:
    """The names of options whose value torch.distributed gets, in this file or another one."""
    own = Survey(backends=file.survey.backends | frozenset(backends_given(file.tree.bytes)))
    return own.backends_used


def _field(file: SourceFile, call: cst.Call) -> str:
    """The field or the parameter whose default a call describes; ``""`` if there is none."""
    at = file.tree.parent(call)
    if isinstance(at, cst.Param):
        return at.name.value
    return file.tree.source(at.target) if isinstance(at, cst.AnnAssign) else ""


def _is_field(file: SourceFile, statement: cst.AnnAssign) -> bool:
    """Whether a statement is a field of a class, such as a dataclass."""
    return file.tree.function(statement) is None and file.tree.around(statement, cst.ClassDef) is not None


def _is_settings_alone(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a file only assigns names, as mmcv's configs do, or a node is part of such an assignment."""
    if any(file.tree.of_type(kind) for kind in (cst.FunctionDef, cst.ClassDef)):
        return False
    calls = {called_name(call) for call in file.tree.of_type(cst.Call)}
    if calls <= {"dict"} and not file.module_imports:
        return True
    # mmengine turns everything that a config imports into a lazy object.
    statement = file.tree.statement(node)
    targets = [target.target for target in statement.targets] if isinstance(statement, cst.Assign) else []
    names = {dotted(target) for target in targets}
    return bool(names & {"dist_cfg", "dist_params", "env_cfg"}) and file.needs_torch_import


def _comparison(file: SourceFile, node: cst.CSTNode) -> cst.Comparison | None:
    """The comparison of a node with one other value."""
    at = file.tree.parent(node)
    at = file.tree.parent(at) if isinstance(at, cst.ComparisonTarget) else at
    return at if isinstance(at, cst.Comparison) and len(at.comparisons) == 1 else None


def _compares_backend(file: SourceFile, at: cst.CSTNode) -> bool:
    """Whether a name in a comparison says backend: ``args.dist_backend``, ``get_backend()``."""
    comparison = at if isinstance(at, cst.Comparison) else file.tree.parent(at)
    if not isinstance(comparison, cst.Comparison):
        return False
    names = {node.value for node in walk(comparison) if isinstance(node, cst.Name)}
    names |= {string_value(node) or "" for node in walk(comparison)}
    return any(re.search(r"backend", name, re.IGNORECASE) for name in names)
