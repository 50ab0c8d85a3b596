"""The rule ACC503, for `CUDA_VISIBLE_DEVICES`."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.targets import AcclimateTarget
from acclimate_port.rules.base import Example, Finding, Rule, is_assigned
from acclimate_port.source.tree import string_value
from acclimate_port.source_file import SourceFile


class VisibleDevices(Rule[cst.SimpleString]):
    """``CUDA_VISIBLE_DEVICES``."""

    code = "ACC503"
    name = "visible-devices"
    summary = "`CUDA_VISIBLE_DEVICES`"
    explanation = """\
Each vendor has its own variable; `get_accelerator().visible_devices_variable` is its name. Code that reads
`CUDA_VISIBLE_DEVICES` then reads that variable; a CPU has none, so the old name follows after an `or`. The edit is
unsafe, since it makes the program choose the accelerator at that line, and since ROCm's variable has another name.

Code that sets the variable is left: the vendor's library reads it only once, so the program must set it before that.
`acclimate run` sets the right variable for each rank, and `get_accelerator().set_visible_devices_envs(…)` sets it in
code. torch has no name for the variable, so `--to torch` leaves it.

A program that sets it to `"-1"`, `""` or another text that names no device runs on the host. It hides no device of another
accelerator, so tests for CUDA are unsafe beside it: they would find that device. The same holds where the text may come from
an option, and where the program replaces `torch.cuda.is_available`."""
    examples = (
        Example(
            'import os\n\nimport torch\n\n\ndef f():\n    return os.environ.get("CUDA_VISIBLE_DEVICES", "")\n',
            "import os\n\nimport torch\nfrom acclimate import get_accelerator\n\n\ndef f():\n"
            '    return os.environ.get(get_accelerator().visible_devices_variable or "CUDA_VISIBLE_DEVICES", "")\n',
            None,
        ),
        Example('import os\n\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n', None, None),
    )
    nodes = (cst.SimpleString,)

    def check(self, file: SourceFile, node: cst.SimpleString) -> Finding | None:
        if string_value(node) != "CUDA_VISIBLE_DEVICES":
            return None
        parent = file.tree.parent(node)
        if isinstance(parent, cst.BooleanOperation) and file.tree.source(parent.left).endswith(
            ".visible_devices_variable"
        ):
            return None
        if "nvidia-smi" in file.tree.text:
            return self.left(file, node, "the file calls nvidia-smi, whose devices the variable counts")
        if not _is_read_from_environment(file, node):
            return self.left(
                file, node, "each vendor has its own variable; `acclimate run` sets it for each rank"
            )
        if _sets_visible_devices(file):
            return self.left(file, node, "this file also sets the variable, and must read the same one")
        if file.needs_torch_import and file.needs_import:
            return self.left(file, node, "this file does not use torch")
        target = file.target
        if not isinstance(target, AcclimateTarget) or target.of_deepspeed:
            return self.left(
                file, node, "torch has no name for each vendor's variable; acclimate has one (--to acclimate)"
            )
        return self.becomes(
            file,
            node,
            f"{target.accelerator}.visible_devices_variable or ",
            file.span(node),
            unsafe="the accelerator is chosen here, and ROCm's variable has another name",
        )


def _sets_visible_devices(file: SourceFile) -> bool:
    """Whether a file sets the variable, in its own environment or for a child process."""
    for node in file.tree.nodes:
        if string_value(node) != "CUDA_VISIBLE_DEVICES":
            continue
        at = file.tree.parent(node)
        if isinstance(at, cst.DictElement) and at.key is node:
            return True
        given = file.tree.given_to(node)
        if given is not None and given.name in ("setdefault", "putenv", "setenv"):
            return True
        element = file.tree.parent(at) if isinstance(at, cst.Index) else None
        holder = file.tree.parent(element) if element is not None else None
        if isinstance(holder, cst.Subscript) and is_assigned(file, holder):
            return True
    return False


def _is_read_from_environment(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a string is the name of an environment variable whose value is read."""
    at, given = file.tree.parent(node), file.tree.given_to(node)
    if given is not None:
        return given.index == 0 and given.full in ("os.environ.get", "os.getenv")
    element = file.tree.parent(at) if isinstance(at, cst.Index) else None
    holder = file.tree.parent(element) if element is not None else None
    return (
        isinstance(holder, cst.Subscript)
        and file.tree.qualified(holder.value) == "os.environ"
        and not is_assigned(file, holder)
    )
