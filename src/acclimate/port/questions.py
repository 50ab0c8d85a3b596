"""What depends on the answer of ``torch.cuda.is_available()``.

acclimate's answer is also true where the host is all there is, so a question that means other hardware than a
host must be asked in another way.
"""

from __future__ import annotations

import re

import libcst as cst

from acclimate.port.source import SourceFile
from acclimate.port.tree import called_name, string_value, walk

_LISTS = (cst.List, cst.Tuple, cst.Set)
_TEXTS = (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)
_HOST_IN_TEXT = re.compile(r"""['"]cpu['"]|['"][^'"]*\bCPU\b""")
_GPU_IN_TEXT = re.compile(r"\b(cuda|gpus?)\b", re.IGNORECASE)
_HALF = re.compile(r"(^|_)(half|fp16|use_amp|amp)$", re.IGNORECASE)
_DEVICE_IN_TEXT = re.compile(r"\b(cuda|gpus?|cpu)\b", re.IGNORECASE)
_TELLS = {"warn", "warning", "print", "info", "debug", "error", "log", "print0", "rprint", "warn_once"}
_KINDS = {"cpu", "xla", "mps", "xpu", "npu", "hpu"}
_OTHER_FLAGS = ("npu", "xpu", "mps", "hpu", "mlu", "musa", "xla", "tpu", "torch_npu", "torch_xpu")
_PACKAGE = re.compile(r"[-_](gpu|cuda|cpu)\b|CUDA\w*Provider")
_NAMED_PACKAGE = re.compile(
    r"\b(apex|bitsandbytes|triton|tilelang|flash.?attn|flash.?attention|xformers|transformer.?engine|tensorrt)\b",
    re.IGNORECASE,
)
_SAYS_NONE: dict[tuple[type[cst.CSTNode], str], bool] = {
    **dict.fromkeys([(cst.LessThan, "1"), (cst.Equal, "0"), (cst.LessThanEqual, "0")], True),
    **dict.fromkeys([(cst.GreaterThan, "0"), (cst.GreaterThanEqual, "1"), (cst.NotEqual, "0")], False),
}
_LINES_OF_A_SKIP = 2
_DEPTH = 3


def must_be_false_on_a_host(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a question must stay false where the host is all there is.

    It decides between the host and something else, as ``None if is_available() else "cpu"`` does, whether a
    test is skipped, what people are told, or about 16-bit numbers.
    """
    return (
        _decides_on_the_host(file, question)
        or chooses_index_of_host(file, question)
        or _falls_back_to_host(file, question)
        or _adds_to_the_host(file, question)
        or _decides_on_a_skip(file, question, _DEPTH)
        or _decides_on_half(file, question)
        or _tells_people(file, question)
        or _is_told(file, question)
        or _limits_memory(file, question)
        or _is_first_of_kinds(file, question)
        or _one_use_chooses_package(file, question)
    )


def counts_for_a_skip(file: SourceFile, count: cst.CSTNode) -> tuple[cst.CSTNode, bool] | None:
    """The comparison of a number of devices with none that skips a test, and whether it is true for none."""
    around = file.tree.parent(count)
    if isinstance(around, cst.UnaryOperation) and isinstance(around.operator, cst.Not):
        is_none: bool | None = True
    elif isinstance(around, cst.Comparison) and len(around.comparisons) == 1 and around.left is count:
        target = around.comparisons[0]
        is_none = _SAYS_NONE.get((type(target.operator), file.tree.source(target.comparator)))
    else:
        return None
    if is_none is None or not _decides_on_a_skip(file, around, _DEPTH):
        return None
    return around, is_none


def is_flag_beside_others(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the answer is one of several flags: ``is_cuda_available`` beside ``is_npu_available``.

    Whoever reads the flags takes the first true one, so that for CUDA must mean CUDA.
    """
    assigned = file.tree.parent(question)
    if isinstance(assigned, cst.Return):
        function = file.tree.function(assigned)
        name = function.name if isinstance(function, cst.FunctionDef) else None
    else:
        targets = assigned.targets if isinstance(assigned, cst.Assign) else []
        name = next((each.target for each in targets if isinstance(each.target, cst.Name)), None)
    flag = name.value if name is not None else ""
    before, cuda, after = flag.lower().partition("cuda")
    others = {f"{before}{kind}{after}" for kind in _OTHER_FLAGS}
    return bool(cuda) and not others.isdisjoint(each.lower() for each in file.tree.all_names())


def chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a question decides only about a package for NVIDIA's hardware."""
    uses = _uses(file, question)
    return bool(uses) and all(_chooses_package(file, use) for use in uses)


def _one_use_chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    return any(_chooses_package(file, use) for use in _uses(file, question))


def _uses(file: SourceFile, question: cst.CSTNode) -> list[cst.CSTNode]:
    """The question, or the uses of a name that holds its answer."""
    assigned = next(
        (each for each in file.tree.ancestors(question) if isinstance(each, cst.BaseSmallStatement)), None
    )
    if not isinstance(assigned, cst.Assign) or len(assigned.targets) != 1:
        return [question]
    below: cst.CSTNode | None = file.tree.parent(question)
    while isinstance(below, cst.BooleanOperation):
        below = file.tree.parent(below)
    target = assigned.targets[0].target
    if below is not assigned or not isinstance(target, cst.Name):
        return [question]
    return file.tree.reads(target)


def _chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, cst.IfExp):
            sides = (around.body, around.orelse)
            texts = " ".join(file.tree.source(each) for each in sides if below is around.test)
            return _PACKAGE.search(texts) is not None and "device" not in texts
        if isinstance(around, cst.Assert):
            return around.msg is not None and _NAMED_PACKAGE.search(file.tree.source(around.msg)) is not None
        if isinstance(around, cst.If):
            ends = below is around.test and len(around.body.body) == 1
            text = file.tree.source(around.body.body[0]) if ends else ""
            return text.startswith("raise ") and _NAMED_PACKAGE.search(text) is not None
        if not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation)):
            return False
        below = around
    return False


def _decides_on_the_host(file: SourceFile, question: cst.CSTNode) -> bool:
    below = question
    at = file.tree.parent(question)
    if isinstance(at, cst.UnaryOperation) and isinstance(at.operator, cst.Not):
        below, at = at, file.tree.parent(at)
    if not isinstance(at, cst.IfExp) or below is not at.test:
        return False
    sides = (file.tree.source(at.body), file.tree.source(at.orelse))
    texts = all(isinstance(each, _TEXTS) for each in (at.body, at.orelse))
    return ("None" in sides or texts) and any(_HOST_IN_TEXT.search(side) for side in sides)


def _falls_back_to_host(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a question decides between the host and what a user said: ``args.device if … else "cpu"``.

    A choice between the host and ``"cuda"`` comes to the same on a host, however it is asked.
    """
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, cst.IfExp) and below is around.test:
            sides: list[cst.BaseExpression] = [around.body, around.orelse]
            hosts = [each for each in sides if _is_host(each)]
            return len(hosts) == 1 and not any(_names_cuda(each) for each in sides)
        if isinstance(around, cst.If) and below is around.test:
            blocks = [around.body, around.orelse.body if isinstance(around.orelse, cst.Else) else None]
            set_to = [found for each in blocks if each is not None and (found := _only_assignment(each))]
            if any(_is_host(each.value) for each in set_to) and not _names_cuda(around):
                return True
            return _is_one_of_users(around)
        if not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation)):
            return False
        below = around
    return False


def _is_one_of_users(statement: cst.If) -> bool:
    """Whether branches choose between the host, CUDA and what a user said: ``elif isinstance(x, str):``."""
    values: list[cst.BaseExpression] = []
    at: cst.If | cst.Else | None = statement
    while at is not None:
        only = _only_assignment(at.body)
        if only is None:
            return False
        values.append(only.value)
        at = at.orelse if isinstance(at, cst.If) else None
    kinds = {"host" if _is_host(each) else "cuda" if _names_cuda(each) else "user" for each in values}
    return len(values) > len({"host", "cuda"}) and {"host", "user"} <= kinds


def _is_host(node: cst.BaseExpression) -> bool:
    """Whether an expression is ``"cpu"`` or ``torch.device("cpu")``."""
    if isinstance(node, cst.Call) and called_name(node) == "device" and len(node.args) == 1:
        node = node.args[0].value
    return string_value(node) == "cpu"


def _adds_to_the_host(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a device is added to a list that may have the host, as by ``devices.append("cuda")``."""
    return any(_adds_device(file, use) for use in [question, *_uses(file, question)])


def _adds_device(file: SourceFile, question: cst.CSTNode) -> bool:
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, cst.IfExp) and below is around.test:
            sides = [each for each in (around.body, around.orelse) if isinstance(each, _LISTS)]
            return len(sides) == 2 and any(_names_cuda(each) for each in sides)
        if isinstance(around, cst.If) and below is around.test:
            return any(_is_addition(each) for each in around.body.body)
        if isinstance(around, cst.BinaryOperation):
            # `["cuda"] * torch.cuda.is_available()` is a list of none or of one.
            other = around.left if below is around.right else around.right
            is_repeated = isinstance(around.operator, cst.Multiply) and isinstance(other, _LISTS)
            return is_repeated and _names_cuda(other)
        if isinstance(around, cst.BooleanOperation) and below is around.left:
            if isinstance(around.right, _LISTS) and _names_cuda(around.right):
                return True
        elif isinstance(around, cst.Call):
            if called_name(around) not in ("bool", "int"):
                return False
        elif not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation, cst.Arg)):
            return False
        below = around
    return False


def _is_addition(line: cst.CSTNode) -> bool:
    only = _only_statement(line)
    if isinstance(only, cst.AugAssign):
        return isinstance(only.operator, cst.AddAssign) and _names_cuda(only.value)
    if isinstance(only, cst.Assign):
        is_list = isinstance(only.value, _LISTS) and _names_host(only.value)
        is_sum = isinstance(only.value, cst.BinaryOperation) and isinstance(only.value.operator, cst.Add)
        return (is_list or is_sum) and _names_cuda(only.value)
    call = only.value if isinstance(only, cst.Expr) else None
    adds = isinstance(call, cst.Call) and called_name(call) in ("append", "add", "extend", "insert")
    return adds and call is not None and _names_cuda(call)


def _names_host(node: cst.CSTNode) -> bool:
    return any(string_value(each) == "cpu" for each in walk(node))


def _names_cuda(node: cst.CSTNode) -> bool:
    return any((string_value(each) or "").partition(":")[0] == "cuda" for each in walk(node))


def chooses_index_of_host(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the other choice is −1, by which libraries such as transformers mean the host."""
    return any(_is_beside_minus_one(file, use) for use in [question, *_uses(file, question)])


def _is_beside_minus_one(file: SourceFile, question: cst.CSTNode) -> bool:
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, (cst.If, cst.IfExp)) and below is around.test:
            chosen = _chosen(file, around) if isinstance(around, cst.If) else [around.body, around.orelse]
            return any(_is_minus_one(each) for each in chosen)
        if not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation)):
            return False
        below = around
    return False


def _chosen(file: SourceFile, statement: cst.If) -> list[cst.BaseExpression]:
    """What a statement, or the line before it, may give to a name that the statement's first branch sets."""
    first = _only_assignment(statement.body)
    if first is None:
        return []
    target = file.tree.source(first.targets[0].target)
    others = [_only_assignment(statement.orelse.body)] if isinstance(statement.orelse, cst.Else) else []
    block = file.tree.parent(statement)
    if isinstance(block, (cst.IndentedBlock, cst.Module)):
        index = next(i for i, each in enumerate(block.body) if each is statement)
        others += [_assignment(block.body[index - 1])] if index else []
    same = [each for each in others if each and file.tree.source(each.targets[0].target) == target]
    return [first.value, *(each.value for each in same)]


def _only_assignment(block: cst.BaseSuite) -> cst.Assign | None:
    return _assignment(block.body[0]) if len(block.body) == 1 else None


def _only_statement(line: cst.CSTNode) -> cst.BaseSmallStatement | None:
    return line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None


def _assignment(line: cst.CSTNode) -> cst.Assign | None:
    only = _only_statement(line)
    return only if isinstance(only, cst.Assign) and len(only.targets) == 1 else None


def _is_minus_one(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.UnaryOperation)
        and isinstance(node.operator, cst.Minus)
        and isinstance(node.expression, cst.Integer)
        and node.expression.value == "1"
    )


def _decides_on_a_skip(file: SourceFile, question: cst.CSTNode, depth: int) -> bool:
    """Whether a question decides about a skipped test; a name that holds the answer is followed."""
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, cst.Call) and called_name(around) in ("skipif", "skipIf", "skipUnless"):
            return True
        if isinstance(around, cst.If) and below is around.test:
            words = {each.value.lower() for each in walk(around.body) if isinstance(each, cst.Name)}
            return bool(words & {"skip", "skiptest"}) and len(around.body.body) <= _LINES_OF_A_SKIP
        if isinstance(around, cst.Assign) and depth:
            targets = [each.target for each in around.targets if isinstance(each.target, cst.Name)]
            uses = [use for target in targets for use in file.tree.reads(target)]
            return bool(uses) and all(_decides_on_a_skip(file, use, depth - 1) for use in uses)
        if isinstance(around, (cst.BaseCompoundStatement, cst.Lambda)):
            return False
        below = around
    return False


def _decides_on_half(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the answer says that numbers have 16 bits: ``fp16=torch.cuda.is_available()``."""
    at = file.tree.parent(question)
    while isinstance(at, cst.BooleanOperation):
        at = file.tree.parent(at)
    if isinstance(at, cst.Arg):
        return at.keyword is not None and _HALF.search(at.keyword.value) is not None
    targets = [each.target for each in at.targets] if isinstance(at, cst.Assign) else []
    names = [
        each.attr.value if isinstance(each, cst.Attribute) else file.tree.source(each) for each in targets
    ]
    return any(_HALF.search(name) for name in names)


def _tells_people(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the branch does nothing but tell people of a GPU."""
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, cst.If):
            only = around.body.body[0] if below is around.test and len(around.body.body) == 1 else None
            line = _only_statement(only) if only is not None else None
            if isinstance(line, cst.AugAssign) and isinstance(line.value, _TEXTS):
                return _DEVICE_IN_TEXT.search(file.tree.source(line.value)) is not None
            call = line.value if isinstance(line, cst.Expr) else None
            tells = isinstance(call, cst.Call) and called_name(call) in _TELLS and around.orelse is None
            return tells and _GPU_IN_TEXT.search(file.tree.source(around.body)) is not None
        if not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation)):
            return False
        below = around
    return False


def _limits_memory(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the branch limits the memory of numbered devices, as Accelerate's ``max_memory`` does."""
    below = question
    for around in file.tree.ancestors(question):
        if isinstance(around, (cst.If, cst.IfExp)):
            names = {each.value for each in walk(around.body) if isinstance(each, cst.Name)}
            return below is around.test and "max_memory" in names
        if not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation)):
            return False
        below = around
    return False


def _is_told(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the answer is part of a message: ``print(f"CUDA: {torch.cuda.is_available()}")``."""
    for around in file.tree.ancestors(question):
        if isinstance(around, cst.FormattedStringExpression):
            return True
        if isinstance(around, cst.Call):
            name = called_name(around)
            if name in _TELLS | {"format"}:
                return True
            if name not in ("str", "bool"):
                return False
        elif not isinstance(around, (cst.UnaryOperation, cst.Arg)):
            return False
    return False


def _is_first_of_kinds(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a later branch asks for another kind of device: ``elif x.device.type == "xla"``."""
    statement = file.tree.parent(question)
    if not isinstance(statement, cst.If) or statement.test is not question:
        return False
    at = statement.orelse
    while isinstance(at, cst.If):
        if isinstance(at.test, cst.Comparison) and any(
            string_value(each) in _KINDS for each in walk(at.test)
        ):
            return True
        at = at.orelse
    return False
