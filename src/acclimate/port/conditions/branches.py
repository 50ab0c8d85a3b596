"""The code that a test of the device controls, and whether the test must stay false on a CPU-only machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import libcst as cst

from acclimate.port.source.cuda_packages import KERNEL_PACKAGES
from acclimate.port.source.tree import Span, called_name, dotted, string_value, walk
from acclimate.port.source_file import SourceFile

_KERNELS = re.compile(r"^kernels?$|_kernels?$|^triton_|_triton$")
_NAME_OF_CUDA = re.compile(r"cuda|gpu", re.IGNORECASE)
_INDEX = re.compile(r"\bget_device\(\)|\.device\.index\b|\.record_stream\(")
_HALF = re.compile(r"\bb?float16\b|\.half\b")
_PROVIDER = re.compile(r"(CUDA|Tensorrt)\w*Provider")
_GPU_IN_TEXT = re.compile(r"['\"][^'\"]*\b(GPU|CUDA)\b", re.IGNORECASE)
_NAME_OF_HOST = re.compile(r"^cpu_|_cpu$|_cpu_")


def branches(file: SourceFile, test: cst.CSTNode | None) -> list[Span]:
    """The code that runs only if a test is true, within the one statement or expression around the test.

    The right operand of ``and`` is part of it.
    """
    return [] if test is None else _Reach(file, test).inside


def branches_of_answer(file: SourceFile, test: cst.CSTNode | None) -> list[Span]:
    """The branches of a test, and of the names, attributes and functions that hold or return its result."""
    return _followed(file, test, lambda reach: reach.inside)


def where_true(file: SourceFile, test: cst.CSTNode | None) -> list[Span]:
    """The code that runs only if a test is true.

    The test may be an assertion, a name may hold its result, or a function may return it. The code may also
    follow a branch that returns or raises if the test is false.
    """
    return _followed(file, test, lambda reach: [*reach.inside, *reach.after, *reach.after_calls()])


def _followed(
    file: SourceFile, test: cst.CSTNode | None, places: Callable[[_Reach], list[Span]]
) -> list[Span]:
    """The ranges that a function gives for a test and for each use of its result."""
    found: list[Span] = []
    waiting, seen = [] if test is None else [test], set()
    while waiting:
        at = waiting.pop()
        seen.add(at)
        reach = _Reach(file, at)
        found += places(reach)
        waiting += [use for use in reach.answers() if use not in seen]
    return found


class _Reach:
    """The code that a test controls.

    Args:
        file: the file.
        test: the test, or a use of its result.
    """

    def __init__(self, file: SourceFile, test: cst.CSTNode) -> None:
        self.inside: list[Span] = []
        """The code inside the statement or expression around the test."""
        self.after: list[Span] = []
        """The code after that statement, if its other branch returns or raises."""
        self._file = file
        self._holders: list[cst.CSTNode] = []
        self._refusals: list[cst.CSTNode] = []
        negated = isinstance(test, cst.Comparison) and isinstance(
            test.comparisons[0].operator, (cst.NotEqual, cst.NotIn)
        )
        self._climb(test, not negated)

    def _climb(self, test: cst.CSTNode, positive: bool) -> None:
        below = test
        for around in self._file.tree.ancestors(test):
            if isinstance(around, cst.UnaryOperation):
                positive = positive != isinstance(around.operator, cst.Not)
            elif isinstance(around, cst.BooleanOperation):
                stops = cst.And if positive else cst.Or
                if isinstance(around.operator, stops) and below is around.left:
                    self.inside.append(self._file.span(around.right))
            elif isinstance(around, cst.NamedExpr) and below is around.value:
                self._holders.append(around.target)
            elif isinstance(around, (cst.If, cst.IfExp)):
                if below is around.test:
                    self._add_branches(around, positive)
                return
            elif isinstance(around, (cst.While, cst.Assert)) and below is around.test and positive:
                if isinstance(around, cst.While):
                    self.inside.append(self._file.span(around.body))
                else:
                    self._refusals.append(around)
                    self._add_rest(around)
                return
            elif isinstance(around, cst.MatchCase):
                self.inside.append(self._file.span(around.body))
                return
            elif isinstance(around, (cst.Assign, cst.AnnAssign)):
                targets = [around] if isinstance(around, cst.AnnAssign) else around.targets
                self._holders += [_bound_to(each.target, around.value, below, test) for each in targets]
                return
            elif isinstance(around, cst.Return):
                function = self._file.tree.function(around)
                self._holders += [function.name] if isinstance(function, cst.FunctionDef) else []
                return
            elif not self._passes(around):
                return
            below = around

    @staticmethod
    def _passes(around: cst.CSTNode) -> bool:
        """Whether a node has the value of the test: ``all(x.is_cuda for x in xs)``, ``bool(…)``."""
        if isinstance(around, cst.Call):
            return called_name(around) in ("all", "any", "bool")
        kinds = (cst.Arg, cst.GeneratorExp, cst.ListComp, cst.List, cst.Tuple, cst.Element, cst.MatchValue)
        return isinstance(around, kinds)

    def _add_branches(self, around: cst.If | cst.IfExp, positive: bool) -> None:
        span = self._file.span
        if isinstance(around, cst.IfExp):
            self.inside.append(span(around.body if positive else around.orelse))
            return
        if positive:
            self.inside.append(span(around.body))
        elif around.orelse is not None:
            self.inside.append(span(around.orelse))
        other = around.orelse.body if isinstance(around.orelse, cst.Else) else None
        other = other if positive else around.body
        if other is not None and leaves(other):
            self._add_rest(around)
            self._refusals += [around] if refuses(other) else []
        answer = "True" if positive else "False"
        last = around.body.body[-1] if around.body.body else None
        returned = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else None
        function = self._file.tree.function(around)
        if isinstance(returned, cst.Return) and isinstance(function, cst.FunctionDef):
            # After `if not x.is_cuda: return False` the function returns the test's result.
            self._holders += [function.name] if dotted(returned.value) == answer else []

    def _add_rest(self, statement: cst.CSTNode) -> None:
        """Adds the code after a statement in its block."""
        at, block = statement, self._file.tree.parent(statement)
        while block is not None and not isinstance(block, (cst.IndentedBlock, cst.Module)):
            at, block = block, self._file.tree.parent(block)
        if block is not None:
            start = self._file.span(at).end
            self.after.append(Span(start, max(start, self._file.span(block.body[-1]).end)))

    def after_calls(self) -> list[Span]:
        """The code after calls of a function that raises if the test is false: ``check(x)``, a kernel."""
        before = len(self.after)
        for refusal in self._refusals:
            function = self._file.tree.function(refusal)
            if isinstance(function, cst.FunctionDef):
                uses = [*self._file.tree.reads(function.name), *self._calls_of_method(function.name)]
                for call in (self._called(use) for use in uses):
                    if isinstance(self._file.tree.parent(call), cst.Expr):
                        self._add_rest(call)
        return self.after[before:]

    def answers(self) -> list[cst.CSTNode]:
        """The uses of names and attributes that hold the result, and calls of functions that return it."""
        found: list[cst.CSTNode] = []
        for holder in self._holders:
            if isinstance(holder, cst.Name):
                reads = [*self._file.tree.reads(holder), *self._calls_of_method(holder)]
                found += [self._called(use) for use in reads]
            elif isinstance(holder, cst.Attribute):
                found += self._file.tree.reads(holder)
        return found

    def _calls_of_method(self, name: cst.Name) -> list[cst.CSTNode]:
        method = self._file.tree.parent(name)
        if not isinstance(method, cst.FunctionDef):
            return []
        return [
            node
            for node in self._file.tree.of_type(cst.Attribute)
            if dotted(node) in (f"self.{name.value}", f"cls.{name.value}")
        ]

    def _called(self, use: cst.CSTNode) -> cst.CSTNode:
        call = self._file.tree.parent(use)
        return call if isinstance(call, cst.Call) and call.func is use else use


def _bound_to(
    target: cst.CSTNode, value: cst.CSTNode | None, below: cst.CSTNode, test: cst.CSTNode
) -> cst.CSTNode:
    """The target that an assignment binds to a result: ``b`` in ``a, b = x.shape, x.is_cuda``."""
    if below is not value or not isinstance(below, cst.Tuple) or not isinstance(target, cst.Tuple):
        return target
    ending = list(reversed(below.elements))
    index = next((i for i, each in enumerate(ending) if each.value is test), len(ending))
    fixed = not any(isinstance(each, cst.StarredElement) for each in ending[: index + 1])
    return target.elements[-1 - index].value if fixed and index < len(target.elements) else target


def keeps_host_out(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a test of the device must stay false on a machine without an accelerator."""
    negated = file.tree.parent(node)
    if isinstance(negated, cst.UnaryOperation) and guards_fallback(file, negated):
        return True
    if _needs_device(file, node):
        return True
    uses = [node, *_Reach(file, node).answers()]
    return any(has_host_branch(file, each) for each in uses) or imports_kernels(file) or _pins(file, node)


def reason_to_keep(file: SourceFile, test: cst.CSTNode) -> str:
    """Why a comparison with CUDA, or a test for it, must keep meaning CUDA; ``""`` if it need not."""
    if (asks_for_missing_cuda(file, test) and not _skips(file, test)) or _is_in_check_for_cuda(file, test):
        return "it detects that the program was told to use CUDA on a machine without CUDA"
    if "version.cuda" in file.tree.source(_whole_test(file, test)):
        return "it tests the version of CUDA"
    places = branches(file, test)
    if any(_imports_kernels_within(file, place) for place in places):
        return "its branch imports a package for NVIDIA GPUs"
    if any(_PROVIDER.search(file.tree.source(place)) for place in places):
        return "it controls the use of a package for NVIDIA GPUs"
    return ""


def _whole_test(file: SourceFile, part: cst.CSTNode) -> cst.CSTNode:
    """The whole condition that a test is part of, through ``and``, ``or`` and ``not``."""
    whole, above = part, file.tree.parent(part)
    while isinstance(above, (cst.UnaryOperation, cst.BooleanOperation)):
        whole, above = above, file.tree.parent(above)
    return whole


def decided_by(file: SourceFile, question: cst.CSTNode) -> cst.If | cst.IfExp | None:
    """The ``if`` statement or conditional expression whose condition is, or contains, a test."""
    whole = _whole_test(file, question)
    above = file.tree.parent(whole)
    return above if isinstance(above, (cst.If, cst.IfExp)) and above.test is whole else None


def _skips(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a true condition skips a test case."""
    statement = decided_by(file, test)
    return isinstance(statement, cst.If) and "skip" in file.tree.source(statement.body).lower()


def asks_for_missing_cuda(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test is part of ``"cuda" in device and not torch.cuda.is_available()``."""
    whole = _whole_test(file, test)
    parts = [each for each in walk(whole) if isinstance(each, (cst.Comparison, cst.Call, cst.UnaryOperation))]
    missing = any(isinstance(each, cst.UnaryOperation) and _says_missing(file, each) for each in parts)
    is_only_and = all(
        isinstance(each.operator, cst.And) for each in walk(whole) if isinstance(each, cst.BooleanOperation)
    )
    return missing and is_only_and and any(_asks_for_cuda(each) for each in parts)


def _is_in_check_for_cuda(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a test is part of ``if device == "cuda": assert torch.cuda.is_available()``."""
    statements = (each for each in file.tree.ancestors(test) if isinstance(each, cst.If))
    return any(_only_checks_for_cuda(file, each) for each in statements)


def _only_checks_for_cuda(file: SourceFile, statement: cst.If) -> bool:
    """Whether a statement does nothing for a CUDA device but check that there is one."""
    asks = [each for each in walk(statement.test) if _asks_for_cuda(each)]
    if not asks or statement.orelse is not None or len(statement.body.body) != 1:
        return False
    (inner,) = statement.body.body
    if isinstance(inner, cst.If):
        negation = inner.test
        says = isinstance(negation, cst.UnaryOperation) and _says_missing(file, negation)
        return says and inner.orelse is None
    check = inner.body[0] if isinstance(inner, cst.SimpleStatementLine) and len(inner.body) == 1 else None
    return isinstance(check, cst.Assert) and _asks_for_any_cuda(file, check.test)


def _says_missing(file: SourceFile, negation: cst.UnaryOperation) -> bool:
    return isinstance(negation.operator, cst.Not) and _asks_for_any_cuda(file, negation.expression)


def _asks_for_any_cuda(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether an expression is ``torch.cuda.is_available()``."""
    return isinstance(node, cst.Call) and file.tree.qualified(node.func) == "torch.cuda.is_available"


def _asks_for_cuda(node: cst.CSTNode) -> bool:
    """Whether an expression is true for a CUDA device: ``device == "cuda"``, ``"cuda" in device``."""
    if isinstance(node, cst.Call):
        first = string_value(node.args[0].value) if node.args else None
        return called_name(node) == "startswith" and (first or "").startswith("cuda")
    if not isinstance(node, cst.Comparison):
        return False
    asks = all(isinstance(each.operator, (cst.Equal, cst.In)) for each in node.comparisons)
    return asks and any((string_value(each) or "").startswith("cuda") for each in walk(node))


def _imports_kernels_within(file: SourceFile, place: Span) -> bool:
    """Whether the code in a range imports a package for NVIDIA GPUs."""
    return any(
        KERNEL_PACKAGES & set(_parts_of_names(each))
        for each in file.tree.imports
        if place.start <= file.span(each).start and file.span(each).end <= place.end
    )


def _needs_device(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a branch uses a device's index or stream, or a choice prints "GPU" or takes a 16-bit type."""
    is_choice = any(isinstance(each, cst.IfExp) for each in file.tree.ancestors(node))
    for place in branches(file, node):
        text = file.tree.source(place)
        if _INDEX.search(text):
            return True
        if is_choice and (_GPU_IN_TEXT.search(text) or _HALF.search(text)):
            return True
    return False


def guards_fallback(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether the branch of a negated test, ``not x.is_cuda``, is code for a CPU and not an error."""
    below = test
    for around in file.tree.ancestors(test):
        if isinstance(around, cst.If):
            return below is around.test and not refuses(around.body)
        if isinstance(around, cst.IfExp):
            return False
        if not isinstance(around, cst.BooleanOperation):
            return False
        below = around
    return False


def refuses(block: cst.CSTNode) -> bool:
    """Whether a block, or a statement, raises or ends the program."""
    for node in walk(block):
        if isinstance(node, (cst.Raise, cst.Assert)):
            return True
        if isinstance(node, cst.Call) and called_name(node) in ("exit", "_exit", "quit", "skip", "SkipTest"):
            return True
    return False


def imports_kernels(file: SourceFile) -> bool:
    """Whether a file imports kernels, which accelerators may have and a CPU has not."""
    for statement in file.module_imports:
        parts = set(_parts_of_names(statement))
        if parts & KERNEL_PACKAGES or any(_KERNELS.search(part) for part in parts):
            return True
    return False


def _parts_of_names(statement: cst.Import | cst.ImportFrom) -> list[str]:
    """The parts between the dots of the names that a statement imports."""
    if isinstance(statement, cst.Import):
        names = [dotted(alias.name) for alias in statement.names]
    else:
        held = [] if isinstance(statement.names, cst.ImportStar) else statement.names
        names = [dotted(statement.module), *(dotted(alias.name) for alias in held)]
    return [part for name in names for part in name.split(".")]


def _pins(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a result controls pinned memory, which a CPU-only machine has not: ``pin_memory=on_gpu``."""
    at = file.tree.parent(node)
    while isinstance(at, (cst.BooleanOperation, cst.AssignTarget)):
        at = file.tree.parent(at)
    if isinstance(at, cst.Arg):
        return _is_pinning(at)
    if (
        not isinstance(at, cst.Assign)
        or len(at.targets) != 1
        or not isinstance(at.targets[0].target, cst.Name)
    ):
        return False
    name = at.targets[0].target
    if _NAME_OF_CUDA.search(name.value):
        return True  # code that reads `use_cuda` means hardware other than the CPU
    return any(_is_pinning(file.tree.parent(use)) for use in file.tree.accesses(name))


def _is_pinning(argument: cst.CSTNode | None) -> bool:
    word = argument.keyword if isinstance(argument, cst.Arg) else None
    return word is not None and word.value == "pin_memory"


def has_host_branch(file: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a test is one of several, and a later one is true on a CPU.

    A CPU-only machine needs that later branch, so this test must stay false there.
    """
    below = node
    for around in file.tree.ancestors(node):
        if isinstance(around, cst.If) and below is around.test:
            tests = list(later_tests(file, around))
            return (
                any(_is_true_on_host(each.test) for each in tests)
                or _names_host(_last_branch(around))
                or _follows_host_branch(file, around)
            )
        if isinstance(around, cst.IfExp) and below is around.test:
            other = around.orelse
            return _names_host(other) or (isinstance(other, cst.IfExp) and _is_true_on_host(other.test))
        if isinstance(around, cst.Match):
            return any(
                isinstance(each.pattern, cst.MatchValue) and string_value(each.pattern.value) == "cpu"
                for each in around.cases
            )
        if not isinstance(around, (cst.BooleanOperation, cst.MatchCase, cst.MatchValue)):
            return False
        below = around
    return False


def _follows_host_branch(file: SourceFile, statement: cst.If) -> bool:
    """Whether the statement before is the branch for the CPU: ``if "cpu" in device.type: …``."""
    block = file.tree.parent(statement)
    if not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return False
    index = next((i for i, each in enumerate(block.body) if each is statement), 0)
    before = block.body[index - 1] if index else None
    return isinstance(before, cst.If) and before.orelse is None and _is_true_on_host(before.test)


def _last_branch(statement: cst.If) -> cst.CSTNode | None:
    """The ``else`` of a statement and its ``elif`` branches."""
    at: cst.If | cst.Else | None = statement.orelse
    while isinstance(at, cst.If):
        at = at.orelse
    return at


def _names_host(branch: cst.CSTNode | None) -> bool:
    """Whether a branch uses a name with ``cpu`` in it: ``self.cpu_config``, ``filter_cpu(x)``."""
    names = [each.value for each in walk(branch) if isinstance(each, cst.Name)] if branch is not None else []
    return any(_NAME_OF_HOST.search(name) for name in names)


def later_tests(file: SourceFile, statement: cst.If) -> Iterator[cst.If]:
    """The ``elif`` branches of a statement, and the ``if`` statements after it if all its branches leave."""
    last: cst.CSTNode = statement
    at: cst.If | cst.Else | None = statement.orelse
    all_leave = leaves(statement.body)
    while isinstance(at, cst.If):
        yield at
        all_leave = all_leave and leaves(at.body)
        at = at.orelse
    while isinstance(
        holder := file.tree.parent(last), cst.If
    ):  # the parent of an `elif` is the `if` before it
        last = holder
    block = file.tree.parent(last)
    if not all_leave or at is not None or not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return
    statements: list[cst.CSTNode] = list(block.body)
    following = statements[statements.index(last) + 1 :] if last in statements else []
    for each in following:
        if not isinstance(each, cst.If):
            return
        yield each


def leaves(block: cst.BaseSuite) -> bool:
    """Whether a block ends with ``return``, ``raise``, ``continue`` or ``break``."""
    last = block.body[-1] if block.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, (cst.Return, cst.Raise, cst.Continue, cst.Break))


def _is_true_on_host(test: cst.CSTNode) -> bool:
    """Whether a condition tests for the CPU: ``device.type == "cpu"``, ``x.is_cpu``."""
    for node in walk(test):
        if isinstance(node, cst.Attribute) and node.attr.value == "is_cpu":
            return True
        if not isinstance(node, cst.Comparison):
            continue
        operators = [each.operator for each in node.comparisons]
        asks = all(isinstance(each, (cst.Equal, cst.In)) for each in operators)
        if asks and any(string_value(each) == "cpu" for each in walk(node)):
            return True
    return False
