"""The code that a test of the device controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import libcst as cst

from acclimate_port.conditions.statements import decided_by, leaves, refuses, whole_condition
from acclimate_port.dataflow.uses import attributes_of_self, calls_of, parameter_of, uses_of
from acclimate_port.source.tree import Span, called_name, dotted, string_value, walk
from acclimate_port.source_file import SourceFile, kept


def branches(file: SourceFile, test: cst.CSTNode | None) -> list[Span]:
    """The code that runs only if a test is true, within the one statement or expression around the test.

    The right operand of ``and`` is part of it. For a comparison with ``!=`` or ``not in``, it is the code
    that runs only if the comparison is false.
    """
    return [] if test is None else _controlled(file, test).inside


def branches_of_result(file: SourceFile, test: cst.CSTNode | None) -> list[Span]:
    """The branches of a test, and of the names, attributes and functions that hold or return its result."""
    return _at_each_use(file, test, lambda controlled: controlled.inside)


def where_true(file: SourceFile, test: cst.CSTNode | None) -> list[Span]:
    """The code that runs only if a test is true.

    The test may be an assertion, a name may hold its result, or a function may return it. The code may also
    follow a branch that returns or raises if the test is false.
    """
    return _at_each_use(
        file,
        test,
        lambda controlled: [*controlled.inside, *controlled.after, *controlled.after_checking_calls],
    )


def controlled_quietly(file: SourceFile, test: cst.CSTNode | None) -> list[Span]:
    """The code that runs only if a test, or a use of its result, is true, without which a program goes on.

    It is in a branch, or follows a branch that returns or continues a loop: ``if not x.is_cuda: return x``.
    """
    return _at_each_use(file, test, lambda controlled: [*controlled.inside, *controlled.passed])


def code_passed(file: SourceFile, test: cst.CSTNode | None) -> tuple[list[Span], list[Span]]:
    """The code after a branch that returns if a test is false, and the code after one that raises."""
    if test is None:
        return [], []
    controlled = _controlled(file, test)
    refused = [place for place in controlled.after if place not in controlled.passed]
    return controlled.passed, refused


def replaced_by_host(file: SourceFile, test: cst.CSTNode) -> list[cst.CSTNode]:
    """The values in whose place a test gives the host: ``device`` in ``device if is_available() else "cpu"``.

    In ``def f(device="cuda")`` with ``if not torch.cuda.is_available(): device = "cpu"`` it is the default. A
    default of an option is such a value of ``args.device``.
    """
    decided = decided_by(file, test)
    if isinstance(decided, cst.IfExp):
        sides = (decided.body, decided.orelse)
        return [side for side, other in (sides, sides[::-1]) if _names_host(other) and not _names_host(side)]
    if not isinstance(decided, cst.If):
        return []
    last = decided.orelse.body if isinstance(decided.orelse, cst.Else) else None
    given = [*assigned_in(decided.body), *(assigned_in(last) if last is not None else ())]
    return [one for target, value in given if _names_host(value) for one in _values_of(file, target)]


def decided_by_result(file: SourceFile, test: cst.CSTNode) -> list[Span]:
    """The code that a number decides about which a function gives by a test: ``get_device()`` or −1."""
    statement, function = decided_by(file, test), file.tree.function(test)
    if not isinstance(statement, cst.If) or not leaves(statement.body):
        return []
    compared = (
        whole_condition(file, at)
        for call in calls_of(file, function)
        for use in uses_of(file, call)
        if isinstance(at := file.tree.parent(use), cst.Comparison)
    )
    holders = (file.tree.parent(one) for one in compared)
    return [
        file.span(part)
        for holder in holders
        if isinstance(holder, cst.If)
        for part in (holder.body, holder.orelse)
        if part is not None
    ]


def _names_host(value: cst.CSTNode) -> bool:
    return any(string_value(part) == "cpu" for part in walk(value))


def _values_of(file: SourceFile, target: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What the file gives to a name, an attribute or an entry, also as a default; a parameter's own name."""
    if isinstance(target, cst.Name):
        named: list[cst.CSTNode] = [one.node for one in file.tree.assignments(target)]
        yield from (one.name for one in named if isinstance(one, cst.Param))
    elif isinstance(target, (cst.Attribute, cst.Subscript)):
        named = [target, *file.tree.reads(target)]
    else:
        return
    for name in named:
        value = name.default if isinstance(name, cst.Param) else file.tree.value_of(name)
        yield from [value] if value is not None else []
    if isinstance(target, cst.Attribute):
        yield from file.options.get(target.attr.value, [])


def uses_of_result(file: SourceFile, test: cst.CSTNode) -> list[cst.CSTNode]:
    """The reads of names and attributes that hold a test's result, and calls of functions that return it."""
    return _controlled(file, test).uses_of_result


def holders_of_result(file: SourceFile, test: cst.CSTNode) -> list[cst.CSTNode]:
    """What holds or returns a test's result: names, attributes, functions' names, arguments of calls."""
    return [holder for controlled in _each_use(file, test) for holder in controlled.holders]


def _at_each_use(
    file: SourceFile, test: cst.CSTNode | None, places: Callable[[_Controlled], list[Span]]
) -> list[Span]:
    """The ranges that a function gives for a test and for each use of its result."""
    used = _each_use(file, test) if test is not None else ()
    return [place for controlled in used for place in places(controlled)]


def _each_use(file: SourceFile, test: cst.CSTNode) -> Iterator[_Controlled]:
    """What a test, and each use of its result, controls."""
    waiting, seen = [test], set()
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        controlled = _controlled(file, at)
        yield controlled
        waiting += [use for use in controlled.uses_of_result if id(use) not in seen]


class _Controlled:
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
        self.passed: list[Span] = []
        """The part of it after a branch that does not raise."""
        self._file = file
        self._holders: list[cst.CSTNode] = []
        """The names and attributes that hold the result, and the names of functions that return it."""
        self._given: list[cst.CSTNode] = []
        """The arguments of calls of functions that the file does not define."""
        self._uses: list[cst.CSTNode] = []
        """Other uses of the result."""
        self._refusals: list[cst.CSTNode] = []
        """The statement, if it raises or ends the program when the test is false."""
        self._add_all(test)

    @property
    def holders(self) -> list[cst.CSTNode]:
        """What holds the result: names, attributes, functions' names, and arguments of calls."""
        return [*self._holders, *self._given]

    def _add_all(self, test: cst.CSTNode) -> None:
        """Goes up from the test to the statement or choice that it decides."""
        negated = isinstance(test, cst.Comparison) and isinstance(
            test.comparisons[0].operator, (cst.NotEqual, cst.NotIn)
        )
        positive = not negated
        for below, around in self._file.tree.upwards(test):
            if isinstance(around, cst.UnaryOperation):
                positive = positive != isinstance(around.operator, cst.Not)
            elif isinstance(around, cst.BooleanOperation):
                stops = cst.And if positive else cst.Or
                if isinstance(around.operator, stops) and below is around.left:
                    self.inside.append(self._file.span(around.right))
            elif isinstance(around, cst.NamedExpr) and below is around.value:
                self._holders.append(around.target)
            elif isinstance(around, cst.ComparisonTarget):
                pass
            elif isinstance(around, cst.Comparison):
                agrees = _polarity(around, below)
                if agrees is None:
                    return
                positive = positive == agrees
            elif isinstance(around, cst.IfExp) and positive and _is_false(around.orelse):
                # `device_count() if is_available() else 0` is true only if its parts are.
                if below is around.test:
                    self.inside.append(self._file.span(around.body))
            elif not _has_value_of_test(around):
                self._add_decided(around, below, test, positive)
                return

    def _add_decided(
        self, around: cst.CSTNode, below: cst.CSTNode, test: cst.CSTNode, positive: bool
    ) -> None:
        """Adds the code that a statement or choice runs by its condition, or the names that get the result.

        Args:
            around: the statement or the conditional expression.
            below: the part of it that has the test's value.
            test: the test.
            positive: whether that part is true if the test is; else it is true if the test is false.
        """
        is_condition = isinstance(around, (cst.If, cst.IfExp, cst.While, cst.Assert)) and below is around.test
        if isinstance(around, cst.If) and is_condition:
            self._add_branch(around, positive)
        elif isinstance(around, cst.IfExp) and is_condition:
            self.inside.append(self._file.span(around.body if positive else around.orelse))
        elif isinstance(around, cst.While) and is_condition and positive:
            self.inside.append(self._file.span(around.body))
        elif isinstance(around, cst.Assert) and is_condition and positive:
            self.after += self._rest_of_block(around)
            self._refusals.append(around)
        elif isinstance(around, cst.MatchCase) or (isinstance(around, cst.For) and below is around.iter):
            self.inside.append(self._file.span(around.body))
        elif isinstance(around, cst.CompFor) and below is around.iter:
            made = self._file.tree.parent(around)
            self.inside += [self._file.span(made)] if made is not None else []
        elif isinstance(around, cst.Call):
            self._add_functions_given(around, below)
        elif isinstance(around, cst.Assign):
            bound = [_bound_to(target.target, around.value, below, test) for target in around.targets]
            self._holders += [part for one in bound for part in _unpacked(one)]
        elif isinstance(around, cst.AnnAssign):
            self._holders.append(_bound_to(around.target, around.value, below, test))
        elif isinstance(around, cst.Param) and below is around.default:
            self._holders.append(around.name)
        elif isinstance(around, cst.Return):
            self._add_function_around(around)

    def _add_functions_given(self, call: cst.Call, below: cst.CSTNode) -> None:
        """Adds what a call does with the result: its parameter, and functions that it gets beside it."""
        if not isinstance(below, cst.Arg):
            return
        parameter = parameter_of(self._file, self._file.tree.given_to(below))
        if parameter is not None:
            self._holders.append(parameter.name)
        else:
            self._given.append(below)
        if called_name(call) == "add_argument":  # a default of an option: `args.use_cuda`
            names = [name for name, options in self._file.options.items() if call in options]
            self._uses += [use for name in names for use in self._file.attributes.get(name, [])]
        for given in call.args:
            bound = self._file.tree.assignments(given.value) if isinstance(given.value, cst.Name) else ()
            functions = [one.node for one in bound if isinstance(one.node, cst.FunctionDef)]
            self.inside += [self._file.span(one.body) for one in functions]

    def _add_branch(self, statement: cst.If, positive: bool) -> None:
        """Adds a branch of an ``if`` statement, and the code after it if the other branch leaves."""
        self._holders += _flags_set(statement)
        self._holders += _filled(self._file, statement) if positive else ()
        final = statement.orelse.body if isinstance(statement.orelse, cst.Else) else None
        taken, other = (statement.body, final) if positive else (statement.orelse, statement.body)
        if taken is not None:
            self.inside.append(self._file.span(taken))
            self._holders += _flags_of_branch(self._file, taken)
        if other is not None and leaves(other):
            rest = self._rest_of_block(statement)
            self.after += rest
            if refuses(other):
                self._refusals.append(statement)
            else:
                self.passed += [*rest, *self._rest_of_outer_blocks(statement)]
        if _returns(statement.body, "True" if positive else "False"):
            # After `if not x.is_cuda: return False` the function returns the test's result.
            self._add_function_around(statement)

    def _rest_of_outer_blocks(self, statement: cst.CSTNode) -> list[Span]:
        """The code after the blocks around a statement, up to the loop or function that it may leave."""
        found: list[Span] = []
        for below, around in self._file.tree.upwards(statement):
            if isinstance(around, (cst.For, cst.While, cst.FunctionDef, cst.ClassDef)):
                break
            if isinstance(around, (cst.IndentedBlock, cst.Module)):
                start = self._file.span(below).end
                found.append(Span(start, max(start, self._file.span(around.body[-1]).end)))
        return found

    def _add_function_around(self, node: cst.CSTNode) -> None:
        """Adds the function around a node to those that return the result."""
        function = self._file.tree.function(node)
        if isinstance(function, cst.FunctionDef):
            self._holders.append(function.name)

    def _rest_of_block(self, statement: cst.CSTNode) -> list[Span]:
        """The code after a statement in its block."""
        at, block = statement, self._file.tree.parent(statement)
        while block is not None and not isinstance(block, (cst.IndentedBlock, cst.Module)):
            at, block = block, self._file.tree.parent(block)
        if block is None:
            return []
        start = self._file.span(at).end
        return [Span(start, max(start, self._file.span(block.body[-1]).end))]

    @cached_property
    def after_checking_calls(self) -> list[Span]:
        """The code after calls of a function that raises if the test is false: ``check(x)``, a kernel."""
        functions = [self._file.tree.function(refusal) for refusal in self._refusals]
        named = [one.name for one in functions if isinstance(one, cst.FunctionDef)]
        calls = [call for name in named for call in self._uses_of_name(name)]
        alone = [call for call in calls if isinstance(self._file.tree.parent(call), cst.Expr)]
        return [place for call in alone for place in self._rest_of_block(call)]

    @cached_property
    def uses_of_result(self) -> list[cst.CSTNode]:
        """The reads of names and attributes that hold the result, and calls of functions that return it."""
        found = [*self._uses]
        for holder in self._holders:
            if isinstance(holder, cst.Name):
                found += self._uses_of_name(holder)
                if is_field(self._file, holder):
                    found += self._file.attributes.get(holder.value, ())
            elif isinstance(holder, cst.Attribute) and dotted(holder.value) == "self":
                alike = attributes_of_self(self._file, holder, holder.attr.value)
                found += [one for one in alike if one is not holder and dotted(one).startswith("self.")]
            elif isinstance(holder, (cst.Attribute, cst.Subscript)):
                found += self._file.tree.reads(holder)
        return found

    def _uses_of_name(self, name: cst.Name) -> list[cst.CSTNode]:
        """The reads of a name; the call in place of the name, where it is called."""
        reads = [*self._file.tree.reads(name), *self._reads_of_method(name)]
        return [self._called(use) for use in reads]

    def _reads_of_method(self, name: cst.Name) -> list[cst.CSTNode]:
        """``self.f`` and ``cls.f``, if the name is that of a function ``f``."""
        if not isinstance(self._file.tree.parent(name), cst.FunctionDef):
            return []
        return attributes_of_self(self._file, name, name.value)

    def _called(self, use: cst.CSTNode) -> cst.CSTNode:
        call = self._file.tree.parent(use)
        return call if isinstance(call, cst.Call) and call.func is use else use


def is_field(file: SourceFile, name: cst.Name) -> bool:
    """Whether a name is one that the body of a class binds, which its objects have as an attribute."""
    statement = file.tree.parent(file.tree.statement(name))
    block = file.tree.parent(statement) if statement is not None else None
    is_bound = isinstance(file.tree.parent(name), (cst.AssignTarget, cst.AnnAssign))
    return is_bound and block is not None and isinstance(file.tree.parent(block), cst.ClassDef)


@kept
def _controlled(file: SourceFile, test: cst.CSTNode) -> _Controlled:
    return _Controlled(file, test)


def _polarity(comparison: cst.Comparison, below: cst.CSTNode) -> bool | None:
    """Whether a comparison of a test, or of a number of devices, is true if the test is or if there are some.

    ``None``: it is compared with something else than a number, ``True`` or ``False``.
    """
    if len(comparison.comparisons) != 1:
        return None
    target = comparison.comparisons[0]
    is_first = below is comparison.left
    other, operator = (target.comparator if is_first else comparison.left), target.operator
    if not isinstance(other, cst.Integer) and dotted(other) not in ("True", "False", "None"):
        return None
    if isinstance(operator, (cst.GreaterThan, cst.GreaterThanEqual)):
        return is_first
    if isinstance(operator, (cst.LessThan, cst.LessThanEqual)):
        return not is_first
    is_none = dotted(other) in ("False", "None") or (isinstance(other, cst.Integer) and other.value == "0")
    if isinstance(operator, (cst.Equal, cst.Is)):
        return not is_none
    return is_none if isinstance(operator, (cst.NotEqual, cst.IsNot)) else None


def _flags_set(statement: cst.If) -> Iterator[cst.CSTNode]:
    """The names and entries to which a branch gives ``True`` or ``False``: ``config["use_cuda"] = False``."""
    for target, value in assigned_in(statement.body):
        if dotted(value) in ("True", "False"):
            yield target


def _flags_of_branch(file: SourceFile, branch: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The flags that are ``False`` but for a branch: ``args.distributed = args.world_size > 1``."""
    for assign in (node for node in walk(branch) if isinstance(node, cst.Assign)):
        for target in assign.targets if isinstance(assign.value, cst.Comparison) else ():
            if _is_false_elsewhere(file, target.target):
                yield target.target


def _is_false_elsewhere(file: SourceFile, target: cst.CSTNode) -> bool:
    """Whether a flag gets one other value, which is ``False``."""
    held: list[cst.BaseExpression | None] = []
    if isinstance(target, cst.Name):
        held = file.bound_values(target)
    elif isinstance(target, cst.Attribute):
        held = file.values.given_to_attributes.get(dotted(target), [])
    return len(held) == 2 and any(dotted(one) == "False" for one in held)


def _filled(file: SourceFile, statement: cst.If) -> Iterator[cst.CSTNode]:
    """The lists and sets that a branch alone fills: ``if x.is_cuda: devices.add(x.device)``."""
    for line in statement.body.body:
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            call = small.value if isinstance(small, cst.Expr) else None
            filled = call.func if isinstance(call, cst.Call) else None
            name = filled.value if isinstance(filled, cst.Attribute) else None
            if isinstance(name, cst.Name) and _is_filled_once(file, name):
                yield name


def _is_filled_once(file: SourceFile, name: cst.Name) -> bool:
    """Whether a name holds a list or set that is empty, and to which one statement of the file adds."""
    held = file.bound_values(name)
    parents = [file.tree.parent(read) for read in file.tree.accesses(name)]
    fills = [one for one in parents if isinstance(one, cst.Attribute) and one.attr.value in _FILL]
    return len(held) == 1 and _is_empty(held[0]) and fills == [file.tree.parent(name)]


_FILL = ("add", "append", "extend", "update")


def _is_empty(value: cst.CSTNode | None) -> bool:
    """Whether a value is an empty list or set."""
    is_call = isinstance(value, cst.Call) and dotted(value.func) in ("set", "list") and not value.args
    return is_call or (isinstance(value, cst.List) and not value.elements)


def assigned_in(block: cst.BaseSuite) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """The targets that the statements of a block assign, and the values."""
    for line in block.body:
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else (line,):
            if isinstance(small, cst.Assign):
                yield from ((target.target, small.value) for target in small.targets)


def _is_false(value: cst.CSTNode) -> bool:
    """Whether a value is ``0``, ``False`` or ``None``."""
    return dotted(value) in ("False", "None") or (isinstance(value, cst.Integer) and value.value == "0")


def _has_value_of_test(around: cst.CSTNode) -> bool:
    """Whether a node has the value of the test in it: ``all(x.is_cuda for x in xs)``, ``bool(…)``."""
    if isinstance(around, cst.Call):
        return called_name(around) in ("all", "any", "bool", "range", "enumerate", "reversed")
    kinds = (cst.Arg, cst.GeneratorExp, cst.ListComp, cst.List, cst.Tuple, cst.Element, cst.MatchValue)
    return isinstance(around, kinds)


def _returns(block: cst.BaseSuite, constant: str) -> bool:
    """Whether a block ends with ``return True``, or with another constant."""
    last = block.body[-1] if block.body else None
    last = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else None
    return isinstance(last, cst.Return) and dotted(last.value) == constant


def _unpacked(target: cst.CSTNode) -> list[cst.CSTNode]:
    """The names that get the parts of a result: of ``device, use_cuda = setup()``, any may be the flag."""
    return [one.value for one in target.elements] if isinstance(target, cst.Tuple) else [target]


def _bound_to(
    target: cst.CSTNode, value: cst.CSTNode | None, below: cst.CSTNode, test: cst.CSTNode
) -> cst.CSTNode:
    """The target that an assignment binds to a result: ``b`` in ``a, b = x.shape, x.is_cuda``."""
    if below is not value or not isinstance(below, cst.Tuple) or not isinstance(target, cst.Tuple):
        return target
    ending = list(reversed(below.elements))
    index = next((i for i, element in enumerate(ending) if element.value is test), len(ending))
    fixed = not any(isinstance(element, cst.StarredElement) for element in ending[: index + 1])
    return target.elements[-1 - index].value if fixed and index < len(target.elements) else target
