"""The rule ACC107, for an import of `torch.cuda` or from it."""

from __future__ import annotations

import libcst as cst

from acclimate_port.new_code.edits import Edit, Part, replace
from acclimate_port.rules.base import Example, Finding, Rule
from acclimate_port.source.tree import Span, dotted
from acclimate_port.source_file import SourceFile


class CudaImport(Rule[cst.ImportFrom | cst.Import]):
    """``from torch.cuda.amp import autocast``."""

    code = "ACC107"
    name = "cuda-import"
    summary = "an import of `torch.cuda` or from it"
    explanation = """\
The import of a name from `torch.cuda` is removed if all its uses are ported. It stays in an `__init__.py`, in a
`try` block, and if `__all__` has the name, as other files may rely on it. A branch for a torch older than 2.10, and the
handler of such a `try`, do not matter: `if version >= "1.6": from torch.cuda.amp import autocast`."""
    examples = (
        Example(
            "import torch\nfrom torch.cuda import synchronize, is_available as has_gpu\n\nif has_gpu():\n    synchronize()\n",
            "import torch\nfrom acclimate import get_accelerator\n\n"
            'if get_accelerator().device_name() != "cpu":\n    get_accelerator().synchronize()\n',
            "import torch\n\nif torch.accelerator.is_available():\n    torch.accelerator.synchronize()\n",
        ),
        Example(
            "import torch.cuda as C\n\nC.synchronize()\n",
            "from acclimate import get_accelerator\n\nget_accelerator().synchronize()\n",
            "import torch\n\nif torch.accelerator.is_available():\n    torch.accelerator.synchronize()\n",
        ),
        Example(
            "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    autocast = None\n",
            None,
            None,
        ),
    )
    nodes = (cst.ImportFrom, cst.Import)

    def check(self, file: SourceFile, node: cst.ImportFrom | cst.Import) -> Finding | None:
        if not isinstance(node, (cst.ImportFrom, cst.Import)) or isinstance(node.names, cst.ImportStar):
            return None
        if isinstance(node, cst.ImportFrom):
            if node.relative or node.module is None:
                return None
            home = f"{dotted(node.module)}."
        else:
            home = ""
        aliases = [a for a in node.names if f"{home}{dotted(a.name)}.".startswith("torch.cuda.")]
        if not aliases:
            return None
        if isinstance(node, cst.Import) and all(alias.asname is None for alias in aliases):
            return self._plain(file, node, aliases)
        if any(isinstance(around, cst.Try) for around in file.tree.ancestors(node)):
            return self.left(file, node, "a `try` block imports it, to find out whether torch has it")
        names = {(a.evaluated_alias or dotted(a.name)).partition(".")[0] for a in aliases}
        if file.is_package_init or names & file.exported:
            return self.left(file, node, "other files may import the name from here")
        uses = [use for alias in aliases for use in self._uses(file, alias)]
        line = file.tree.parent(node)
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
            return self.left(file, node, "it shares its line with another statement")
        edit = self._removal(file, node, aliases, line)
        unsafe = "" if uses else "this file does not use it, so other files may import it from here"
        finding = self.convert(file, node, edit, unsafe=unsafe)
        finding.needs_applied_at = tuple(file.span(use) for use in uses)
        return finding

    def _plain(self, file: SourceFile, node: cst.Import, aliases: list[cst.ImportAlias]) -> Finding:
        line = file.tree.parent(node)
        is_alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        if is_alone and line is not None and self._binds_torch_already(file, node):
            return self.convert(file, node, self._removal(file, node, aliases, line))
        edits = [replace(file.span(alias.name), "torch") for alias in aliases]
        return self.convert(file, node, *edits)

    @staticmethod
    def _binds_torch_already(file: SourceFile, node: cst.Import) -> bool:
        """Whether another import of the same block, above this one, binds the name ``torch``."""
        line = file.tree.parent(node)
        block = file.tree.parent(line) if line is not None else None
        others = (one for one in file.tree.of_type(cst.Import) if one is not node)
        return any(
            file.span(one).start < file.span(node).start
            and file.tree.parent(file.tree.parent(one) or one) is block
            and any(
                alias.asname is None and "torch" in dotted(alias.name).split(".")[:1] for alias in one.names
            )
            for one in others
        )

    @staticmethod
    def _uses(file: SourceFile, alias: cst.ImportAlias) -> list[cst.CSTNode]:
        bound = alias.asname.name if alias.asname is not None else alias.name
        return [*file.tree.accesses(bound)] if isinstance(bound, cst.Name) else []

    @staticmethod
    def _removal(
        file: SourceFile, node: cst.ImportFrom | cst.Import, aliases: list[cst.ImportAlias], line: cst.CSTNode
    ) -> Edit:
        names = [] if isinstance(node.names, cst.ImportStar) else list(node.names)
        kept = [alias for alias in names if alias not in aliases]
        if kept:
            first, last = file.span(names[0]), file.span(names[-1])
            parts: list[Part] = []
            for alias in kept:
                bound = alias.name if alias.asname is None else alias.asname.name
                parts += [Span(file.span(alias.name).start, file.span(bound).end), ", "]
            return replace(Span(first.start, last.end), *parts[:-1])
        block = file.tree.parent(line)
        place = file.span(node)
        if isinstance(block, (cst.IndentedBlock,)) and len(block.body) == 1:
            return replace(place, "pass")
        first_line = file.tree.line(place.start)
        last_line = file.tree.line(max(place.start, place.end - 1))
        start = file.tree.line_starts[first_line - 1]
        ends = file.tree.line_starts
        end = ends[last_line] if last_line < len(ends) else len(file.tree.bytes)
        return replace(Span(start, end))
