"""Infers the kind of a value within one function: a number, a device, a string, a tensor, a module.

Each result says whether the code shows the kind or only a name suggests it. An edit based only on a name is
unsafe.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import libcst as cst

from acclimate_port.source.module_classes import is_module_class, makes_module
from acclimate_port.source.tree import (
    Tree,
    called_name,
    dotted,
    entry_key,
    has_unpacking,
    keyword,
    string_value,
)


class Kind(Enum):
    """The kind of a value."""

    NUMBER = "number"
    DEVICE = "device"
    STRING = "string"
    TENSOR = "tensor"
    MODULE = "module"
    NONE = "None"
    LOADER = "data loader"
    SAME = "what the name held before"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Value:
    """A kind, and whether the code shows it."""

    kind: Kind
    certain: bool = True


UNKNOWN = Value(Kind.UNKNOWN, certain=False)

DEVICE_NAME = re.compile(r"(^|_)(device|dev)(_?(type|name|str|string))?$|^device", re.IGNORECASE)
_NUMBER_NAME = re.compile(
    r"(^|_)(rank|gpu|gpu_?ids?|gpu_?index|gpu_?idx|gpu_?num|device_?(id|index|idx|num)|dev_?id|i)$",
    re.IGNORECASE,
)
BACKEND_NAME = re.compile(r"(^|_)backend$", re.IGNORECASE)

_FACTORIES = {
    *("empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "linspace", "tensor"),
    *("eye", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "from_numpy", "as_tensor", "stack", "cat", "randperm", "logspace"),
    *("empty_strided", "normal", "FloatTensor", "LongTensor", "IntTensor", "HalfTensor"),
    *("DoubleTensor", "ByteTensor", "BoolTensor", "hann_window", "hamming_window", "blackman_window"),
    *("bartlett_window", "kaiser_window", "complex", "polar", "bernoulli", "multinomial", "poisson"),
    *("diag", "outer", "einsum", "clamp", "clone", "flip", "vstack", "hstack", "dstack", "concat"),
    *("concatenate", "triu", "asarray", "heaviside", "tanh", "sigmoid", "stft", "istft", "reshape"),
    *("transpose", "permute", "flatten", "squeeze", "unsqueeze", "softmax", "gather", "Tensor"),
    *("BFloat16Tensor", "ShortTensor", "CharTensor", "tril", "where", "matmul", "mm", "bmm", "exp"),
    *("log", "sqrt", "abs", "sum", "mean", "sin", "cos", "frombuffer", "tril_indices", "triu_indices"),
    *("gt", "lt", "ge", "le", "eq", "ne", "add", "sub", "mul", "div", "pow", "prod", "norm", "round"),
    *("floor", "ceil", "sign", "relu", "log_softmax", "roll", "repeat_interleave", "cumsum", "cumprod"),
    *("maximum", "minimum", "argmax", "argmin", "argsort", "logical_and", "logical_or", "logical_not"),
    *("isnan", "isinf", "isfinite", "masked_select", "index_select", "scatter", "take", "movedim"),
    *("cross", "dot", "mv", "addmm", "baddbmm", "cdist", "nonzero", "log10", "log2", "rsqrt"),
}
"""Functions of torch and of ``torch.nn.functional`` that give a tensor, whatever they get."""
_TENSOR_METHODS = {
    *("float", "half", "double", "long", "int", "bool", "bfloat16", "contiguous", "clone", "detach"),
    *("t", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "repeat"),
    *("flatten", "requires_grad_", "fill_", "zero_", "normal_", "uniform_", "cuda", "to", "type"),
    *("pin_memory", "cpu", "sum", "mean", "abs", "exp", "log", "sqrt", "clamp", "pow", "argmax"),
    *("argmin", "softmax", "matmul", "norm", "std", "var", "gather", "scatter", "index_select"),
    *("masked_fill", "new_zeros", "new_tensor", "new_empty", "cumsum", "log_softmax", "sigmoid"),
    *("tanh", "relu", "roll", "flip", "gt", "lt", "ge", "le", "eq", "ne", "add", "sub", "mul", "div"),
    *("prod", "round", "floor", "ceil", "sign", "neg", "cos", "sin", "log2", "log10", "rsqrt", "tril"),
    *("triu", "diag", "nonzero", "masked_select", "cumprod", "argsort", "select", "narrow", "mm", "bmm"),
    *("matmul", "outer", "dot", "byte", "short", "char", "new_ones", "new_full", "view_as", "expand_as"),
    *("type_as", "unsqueeze_", "squeeze_", "masked_fill_", "scatter_", "copy_", "clamp_", "mul_", "add_"),
    *("repeat_interleave", "movedim", "swapaxes", "any", "all", "logical_not", "to_dense"),
}
_OF_TENSORS_ALONE = {
    *("unsqueeze", "unsqueeze_", "index_select", "masked_fill", "masked_fill_", "masked_select", "long"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "view_as", "expand_as", "type_as"),
    *("log_softmax", "contiguous", "permute", "scatter_", "copy_"),
}
"""Methods that arrays of numpy and of others have not, and modules neither."""
_TENSOR_FIELDS = {"device", "data", "grad", "T", "mT", "real", "imag"}
_BATCH_FIELDS = {"input_ids", "attention_mask", "token_type_ids", "pixel_values", "input_features", "labels"}
"""What a tokenizer or processor of transformers gives, by the names of its results."""
_MODULE_METHODS = {
    *("cuda", "to", "train", "eval", "half", "float", "double", "bfloat16", "requires_grad_", "cpu")
}
METHODS_OF_TORCH = (_TENSOR_METHODS | _MODULE_METHODS) - {"cuda", "to", "cpu", "pin_memory", "type", "train"}
"""Methods of tensors and modules that what has a method ``cuda`` besides these has not."""
METHODS_OF_TENSORS = {*_OF_TENSORS_ALONE, "view", "detach", "dim", "size", "backward", "unbind", "new"}
"""Those of tensors that nothing else with a method ``cuda`` has."""
_OF_MODULES_ALONE = (
    *({"parameters"}, {"named_parameters"}, {"load_state_dict", "eval"}, {"load_state_dict", "train"}),
)
_OF_TENSORS = {"size", "shape", "dim", "ndim", "view", "new_zeros", "new_ones", "new", "dtype", "unsqueeze"}
"""What tensors have, and modules have not."""
_WRAP_MODULES = {
    *("torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.DistributedDataParallel"),
    *("torch.distributed.fsdp.FullyShardedDataParallel", "torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
}
"""What takes nothing but a module."""
_NUMBER_CALLS = {
    *("int", "len", "torch.distributed.get_rank", "torch.distributed.get_world_size"),
    *("torch.cuda.current_device", "torch.cuda.device_count", "torch.accelerator.device_count"),
    *("torch.accelerator.current_device_index", "torch.distributed.get_node_local_rank"),
}
_NUMBER_TYPES = {"int"}
_OF_MODULES: dict[str | None, tuple[Kind, list[int]]] = {
    "parameters": (Kind.TENSOR, []),
    "buffers": (Kind.TENSOR, []),
    "named_parameters": (Kind.TENSOR, [1]),
    "named_buffers": (Kind.TENSOR, [1]),
    "modules": (Kind.MODULE, []),
    "children": (Kind.MODULE, []),
    "named_modules": (Kind.MODULE, [1]),
    "named_children": (Kind.MODULE, [1]),
}
"""Methods of modules: what a loop over their results gives, and which part of it."""
_PASS_ELEMENTS = {"tqdm", "iter", "list", "tuple", "set", "reversed", "sorted", "cycle", "track"}
"""Functions that give the elements of their first argument."""
_LISTS = {"List", "list", "Sequence", "Iterable", "Tuple", "tuple", "Collection", "Iterator"}
_TYPES = ("type", "Type")
_SPAWN = {
    *("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"),
    *("torch.multiprocessing.spawn.spawn", "torch.multiprocessing.spawn.start_processes"),
}
"""Functions that give a function the index of the process that runs it."""
_COPY = ("copy.copy", "copy.deepcopy")
_MOST_BINDINGS = 20
_DEPTH = 9


class Values:
    """Infers the kinds of the values in one file."""

    def __init__(self, tree: Tree, modules: Callable[[str], bool] = lambda _: False) -> None:
        self._tree = tree
        self._is_module = modules
        """Whether the project defines a class, given by its full name, as a module."""
        self._open: set[str] = set()
        """The names whose bindings are being looked at."""
        self._of_names: dict[int, Value] = {}
        """By the identity of the name's binding."""
        self._of_attributes: dict[str, Value | None] = {}

    @cached_property
    def classes(self) -> dict[str, cst.ClassDef]:
        """The classes that the file defines."""
        return {node.name.value: node for node in self._tree.of_type(cst.ClassDef)}

    @cached_property
    def classes_with_own_cuda(self) -> set[str]:
        """The classes of the file that define ``cuda``, and those that inherit from them."""
        own = {name for name, node in self.classes.items() if "cuda" in methods(node)}
        heirs: dict[str, list[str]] = defaultdict(list)
        for name, node in self.classes.items():
            for base in _base_names(node):
                heirs[base].append(name)
        waiting = [*own]
        while waiting:
            following = [heir for heir in heirs[waiting.pop()] if heir not in own]
            own.update(following)
            waiting += following
        return own

    def of(self, node: cst.CSTNode, depth: int = _DEPTH) -> Value:
        """The kind of an expression's value."""
        if depth == 0:
            return UNKNOWN
        if isinstance(node, cst.Integer):
            return Value(Kind.NUMBER)
        if isinstance(node, (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)):
            return Value(Kind.STRING)
        if isinstance(node, cst.Name):
            return self._of_name(node, depth)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.Call):
            return self._of_call(node, depth)
        if isinstance(node, cst.BinaryOperation):
            return self._of_operation(node, depth)
        if isinstance(node, cst.IfExp):
            return self._both(self.of(node.body, depth - 1), self.of(node.orelse, depth - 1))
        if isinstance(node, cst.Subscript):
            held = self.of(node.value, depth - 1)
            return held if held.kind is Kind.TENSOR else self._of_subscript(node, depth)
        if isinstance(node, cst.UnaryOperation) and not isinstance(node.operator, cst.Not):
            return self.of(node.expression, depth - 1)
        return UNKNOWN

    @staticmethod
    def _both(one: Value, other: Value) -> Value:
        return Value(one.kind, one.certain and other.certain) if one.kind is other.kind else UNKNOWN

    def _of_name(self, name: cst.Name, depth: int) -> Value:
        if name.value == "None":
            return Value(Kind.NONE)
        if name.value in self._open:
            return Value(Kind.SAME)
        if (given := self._given_before(name)) is not None:
            last = self._of_bound(given, depth)
            if last.kind is not Kind.UNKNOWN:
                return last
        key = id(self._tree.binding(name))
        if key in self._of_names:
            return self._of_names[key]
        value = self._of_bindings(name, depth)
        if not self._open:
            self._of_names[key] = value
        return value

    def _given_before(self, use: cst.Name) -> cst.CSTNode | None:
        """The target of the last assignment of a name before a use, if the use gets that value in any case.

        It is in a block around the use. Nothing binds it in between, or in a loop around the use alone.
        """
        bound = self._tree.assignments(use)
        if not 1 < len(bound) <= _MOST_BINDINGS:
            return None  # with one binding there is no choice
        start = self._tree.span(use).start
        # `x = x.cuda()` reads what it replaces.
        own = self._tree.statement(use)
        before = [one.node for one in bound if self._tree.span(one.node).start < start]
        before = [node for node in before if self._tree.statement(node) is not own]
        if not before:
            return None
        node = max(before, key=lambda found: self._tree.span(found).start)
        target = self._tree.parent(node)
        if isinstance(target, cst.Element):
            target = self._tree.parent(self._tree.parent(target) or target)
        holder = self._tree.parent(target) if isinstance(target, cst.AssignTarget) else None
        if not isinstance(holder, cst.Assign):
            return None
        block = self._tree.parent(self._tree.parent(holder) or holder)
        for around in self._tree.ancestors(use):
            if around is block:
                return node
            if isinstance(around, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
                return None
            if isinstance(around, (cst.For, cst.While)):
                loop = self._tree.span(around)
                if any(loop.start <= self._tree.span(one.node).start < loop.end for one in bound):
                    return None
        return None

    def _of_bindings(self, name: cst.Name, depth: int) -> Value:
        """The kind of all values that the file binds to a name."""
        self._open.add(name.value)
        try:
            found = [self._of_bound(assignment.node, depth) for assignment in self._tree.assignments(name)]
        finally:
            self._open.discard(name.value)
        if found and all(value.kind is Kind.SAME for value in found):
            return Value(Kind.SAME)
        found = [value for value in found if value.kind is not Kind.SAME]
        if (
            any(value.kind is Kind.UNKNOWN for value in found)
            and (kind := self._kind_by_use(name)) is not None
        ):
            return Value(kind)
        known = {value.kind for value in found}
        if len(known) == 1 and Kind.UNKNOWN not in known:
            return Value(known.pop(), all(value.certain for value in found))
        return guess_by_name(name.value)

    def _of_bound(self, node: cst.CSTNode, depth: int) -> Value:
        """The kind of what a target, a parameter or a loop's variable gets."""
        parent = self._tree.parent(node)
        if isinstance(node, cst.Param):
            if self._is_rank(node):
                return Value(Kind.NUMBER)
            return self._of_self(node) if node.name.value == "self" else self._of_annotation(node.annotation)
        if isinstance(parent, cst.AnnAssign) and parent.value is None:
            return self._of_annotation(parent.annotation)
        value = self._beside(parent) if isinstance(parent, cst.Element) else self._tree.value_of(node)
        if value is not None:
            return self.of(value, depth - 1)
        if isinstance(parent, cst.Element):
            return self._of_part(parent, depth)
        loop, path = self._loop(node)
        return UNKNOWN if loop is None else self._of_element(loop.iter, path, depth)

    def _is_rank(self, parameter: cst.Param) -> bool:
        """Whether a parameter is the first one of a function that only ``torch.multiprocessing`` calls.

        It gives the function the index of the process.
        """
        function = self._tree.around(parameter, cst.FunctionDef)
        is_first = isinstance(function, cst.FunctionDef) and parameter in function.params.params[:1]
        if not isinstance(function, cst.FunctionDef) or not is_first or function.decorators:
            return False
        given = [self._tree.given_to(use) for use in self._tree.reads(function.name)]
        return bool(given) and all(
            one is not None and one.full in _SPAWN and (one.index == 0 or one.word == "fn") for one in given
        )

    def _of_self(self, parameter: cst.Param) -> Value:
        """A module, in the methods of its class."""
        method = self._tree.around(parameter, cst.FunctionDef)
        owner = self._tree.around(method, cst.ClassDef) if method is not None else None
        is_own = owner is not None and method in owner.body.body
        return self.instance_of(owner.name.value) if owner is not None and is_own else UNKNOWN

    def _of_part(self, element: cst.Element, depth: int) -> Value:
        """The kind of what one name gets of several: ``x`` in ``x, y = f()`` or ``for x, y in pairs``."""
        if self._is_sound(element):
            return Value(Kind.TENSOR)
        loop, path = self._loop(element)
        if loop is not None:
            return self._of_element(loop.iter, path, depth)
        names = self._tree.parent(element)
        made = self._tree.value_of(names)
        if not isinstance(names, cst.Tuple) or not isinstance(made, cst.Call):
            return UNKNOWN
        if _is_next(made) and path:
            return self._of_element(made.args[0].value, path, depth)
        return self._of_result(made.func, depth, path[-1]) if path else UNKNOWN

    def _of_element(self, iterated: cst.BaseExpression, path: list[int], depth: int) -> Value:
        """The kind of what a loop over a value gives, or of a part of it.

        Args:
            iterated: what the loop goes over.
            path: where the part is: ``[1, 0]`` for ``x`` in ``for i, (x, y) in …``.
            depth: how far names are followed.
        """
        if depth <= 0:
            return UNKNOWN
        if isinstance(iterated, cst.Call):
            return self._of_element_of_call(iterated, path, depth)
        if isinstance(iterated, (cst.List, cst.Tuple, cst.Set)):
            return self._all_alike([_part_of(one.value, path) for one in iterated.elements], depth)
        if isinstance(iterated, (cst.ListComp, cst.GeneratorExp, cst.SetComp)):
            return self._all_alike([_part_of(iterated.elt, path)], depth)
        held = self.of(iterated, depth - 1).kind
        if held in (Kind.TENSOR, Kind.LOADER):  # the batches of a loader are tensors, or lists of tensors
            return Value(Kind.TENSOR)
        if path or not isinstance(iterated, (cst.Name, cst.Attribute)):
            return UNKNOWN
        # `torch.nn.ModuleList` and `Sequential`; the keys of others are moved nowhere.
        if held is Kind.MODULE:
            return Value(Kind.MODULE)
        if isinstance(iterated, cst.Name) and self._holds_tensors(iterated):
            return Value(Kind.TENSOR)
        return self._of_elements_held(iterated, depth)

    def _of_element_of_call(self, call: cst.Call, path: list[int], depth: int) -> Value:
        name, given = called_name(call), [one.value for one in call.args]
        is_plain = isinstance(call.func, cst.Name) and given and not has_unpacking(call)
        if is_plain and name == "range":
            return UNKNOWN if path else Value(Kind.NUMBER)
        if is_plain and name == "enumerate" and path:
            return self._of_element(given[0], path[1:], depth - 1) if path[0] else Value(Kind.NUMBER)
        if is_plain and name == "zip" and path and path[0] < len(given):
            return self._of_element(given[path[0]], path[1:], depth - 1)
        if given and name in _PASS_ELEMENTS:
            return self._of_element(given[0], path, depth - 1)
        if name in _OF_MODULES and self._is_of_module(call.func, depth):
            kind, place = _OF_MODULES[name]
            return Value(kind) if path == place else UNKNOWN
        return Value(Kind.TENSOR) if self.of(call, depth - 1).kind in (Kind.TENSOR, Kind.LOADER) else UNKNOWN

    def _of_elements_held(self, holder: cst.Name | cst.Attribute, depth: int) -> Value:
        """The kind of all elements of a list that a name or an attribute holds, with those appended to it."""
        key = f"{dotted(holder)}[]"
        if key in self._open:
            return UNKNOWN
        if isinstance(holder, cst.Name):
            values = [self._tree.value_of(one.node) for one in self._tree.assignments(holder)]
        else:
            values = self.given_to_attributes.get(dotted(holder), [])
        if not values or len(values) > _MOST_BINDINGS:
            return UNKNOWN
        self._open.add(key)
        try:
            lists = [one for one in values if not (isinstance(one, cst.List) and not one.elements)]
            found = [UNKNOWN if one is None else self._of_element(one, [], depth - 1) for one in lists]
            found += [self.of(one, depth - 1) for one in self._appended(holder)[:_MOST_BINDINGS]]
        finally:
            self._open.discard(key)
        return self._common(found)

    def _appended(self, holder: cst.Name | cst.Attribute) -> list[cst.BaseExpression]:
        """What the file appends to a list."""
        found = []
        for read in self._tree.alike(holder):
            at = self._tree.parent(read)
            call = (
                self._tree.parent(at) if isinstance(at, cst.Attribute) and at.attr.value == "append" else None
            )
            if isinstance(call, cst.Call) and call.func is at and len(call.args) == 1:
                found.append(call.args[0].value)
        return found

    def _all_alike(self, values: list[cst.BaseExpression | None], depth: int) -> Value:
        """The kind that some values have in common; unknown if there are none."""
        if len(values) > _MOST_BINDINGS:
            return UNKNOWN
        return self._common([UNKNOWN if one is None else self.of(one, depth - 1) for one in values])

    @staticmethod
    def _common(found: list[Value]) -> Value:
        kinds = {one.kind for one in found if one.kind is not Kind.SAME}
        if len(kinds) != 1:
            return UNKNOWN
        return Value(kinds.pop(), all(one.certain for one in found))

    def _is_of_module(self, method: cst.CSTNode | None, depth: int) -> bool:
        """Whether a method is one of a module's."""
        held = self.of(method.value, depth - 1) if isinstance(method, cst.Attribute) else UNKNOWN
        return held.kind is Kind.MODULE and held.certain

    def _beside(self, element: cst.Element) -> cst.BaseExpression | None:
        """The value of ``y`` in ``x, y = x.cuda(), y.cuda()``."""
        names = self._tree.parent(element)
        target = self._tree.parent(names) if names is not None else None
        holder = self._tree.parent(target) if isinstance(target, cst.AssignTarget) else None
        values = holder.value if isinstance(holder, cst.Assign) else None
        if not isinstance(names, cst.Tuple) or not isinstance(values, cst.Tuple):
            return None
        pairs = zip(names.elements, values.elements, strict=False)
        return next((given.value for named, given in pairs if named is element), None)

    def _is_sound(self, element: cst.Element) -> bool:
        """Whether a name is the first of those that get what ``torchaudio.load(…)`` returns."""
        names = self._tree.parent(element)
        made = self._tree.value_of(names)
        if not isinstance(names, cst.Tuple) or names.elements[0] is not element:
            return False
        return isinstance(made, cst.Call) and self._tree.qualified(made.func) == "torchaudio.load"

    def _loop(self, node: cst.CSTNode) -> tuple[cst.For | cst.CompFor | None, list[int]]:
        """The loop whose target a name is part of, if it is, and which part of the target it is."""
        path: list[int] = []
        below, at = node, self._tree.parent(node)
        while isinstance(at, (cst.Element, cst.Tuple, cst.List)):
            if isinstance(at, (cst.Tuple, cst.List)):
                path.insert(0, next(n for n, one in enumerate(at.elements) if one is below))
            below, at = at, self._tree.parent(at)
        return (at if isinstance(at, (cst.For, cst.CompFor)) and at.target is below else None), path

    def _holds_tensors(self, iterated: cst.BaseExpression) -> bool:
        """Whether a name is annotated as a list of tensors: ``x: List[torch.Tensor]``."""
        bound = (
            [one.node for one in self._tree.assignments(iterated)] if isinstance(iterated, cst.Name) else []
        )
        told = [one.annotation for one in bound if isinstance(one, cst.Param)]
        of_names = [self._tree.parent(one) for one in bound]
        told += [one.annotation for one in of_names if isinstance(one, cst.AnnAssign)]
        return bool(told) and len(told) == len(bound) and all(map(self._is_list_of_tensors, told))

    def _is_list_of_tensors(self, annotation: cst.Annotation | None) -> bool:
        held = annotation.annotation if annotation is not None else None
        if not isinstance(held, cst.Subscript) or dotted(held.value).rpartition(".")[2] not in _LISTS:
            return False
        element = held.slice[0].slice
        return isinstance(element, cst.Index) and self._tree.qualified(element.value) == "torch.Tensor"

    def _kind_by_use(self, holder: cst.Name | cst.Attribute) -> Kind | None:
        """The kind that alone has the attributes of what a name holds, if the file reads such."""
        reads = self._tree.reads(holder)
        if any(self.is_wrapped(use) for use in reads):
            return Kind.MODULE
        parents = (self._tree.parent(use) for use in reads)
        used = {parent.attr.value for parent in parents if isinstance(parent, cst.Attribute)}
        if "is_cuda" in used and used & _OF_TENSORS:
            return Kind.TENSOR
        return Kind.MODULE if any(used >= methods for methods in _OF_MODULES_ALONE) else None

    def is_wrapped(self, node: cst.CSTNode) -> bool:
        """Whether a wrapper of modules gets a value: ``DistributedDataParallel(model)``."""
        given = self._tree.given_to(node)
        return (
            given is not None and given.full in _WRAP_MODULES and (given.index == 0 or given.word == "module")
        )

    def _of_annotation(self, annotation: cst.Annotation | None) -> Value:
        if annotation is None:
            return UNKNOWN
        told = self._tree.qualified(annotation.annotation)
        if isinstance(annotation.annotation, cst.SimpleString):  # `x: "torch.Tensor"`
            told = string_value(annotation.annotation)
        if told in ("torch.Tensor", "torch.nn.Parameter"):
            return Value(Kind.TENSOR)
        if told is not None and (is_module_class(told) or self._is_module(told)):
            return Value(Kind.MODULE)
        if told == "torch.device":
            return Value(Kind.DEVICE)
        named = annotation.annotation
        if isinstance(named, cst.Name) and named.value in _NUMBER_TYPES:
            return Value(Kind.NUMBER)
        return Value(Kind.STRING) if isinstance(named, cst.Name) and named.value == "str" else UNKNOWN

    def _of_attribute(self, node: cst.Attribute) -> Value:
        is_field = node.attr.value in _TENSOR_FIELDS | _BATCH_FIELDS
        held = self.of(node.value, 2).kind if is_field else Kind.UNKNOWN
        if held is Kind.TENSOR:
            return Value(Kind.DEVICE if node.attr.value == "device" else Kind.TENSOR)
        text = dotted(node)
        if text in self._open:
            return Value(Kind.SAME)
        if text.startswith("self.") and text in self.given_to_attributes:
            held_by = self._of_values(node, text, self.given_to_attributes[text])
            return held_by or guess_by_name(node.attr.value)
        return guess_by_name(node.attr.value)

    def _of_values(
        self, node: cst.Attribute, text: str, values: list[cst.BaseExpression | None]
    ) -> Value | None:
        """The tensor or module that an attribute is, if all that the file gives it are such."""
        if text not in self._of_attributes:
            self._open.add(text)
            try:
                found = [UNKNOWN if value is None else self.of(value, 3) for value in values[:_MOST_BINDINGS]]
            finally:
                self._open.discard(text)
            known = {value.kind for value in found if value.kind not in (Kind.SAME, Kind.NONE)}
            is_one = (
                len(known) == 1 and known <= {Kind.TENSOR, Kind.MODULE} and all(one.certain for one in found)
            )
            kind = known.pop() if is_one else self._kind_by_use(node)
            self._of_attributes[text] = Value(kind) if kind is not None else None
        return self._of_attributes[text]

    @cached_property
    def given_to_attributes(self) -> dict[str, list[cst.BaseExpression | None]]:
        """What the file assigns to each attribute; ``None`` for a part of something."""
        found: dict[str, list[cst.BaseExpression | None]] = defaultdict(list)
        for node in self._tree.of_type(cst.Attribute):
            at, value = self._tree.parent(node), self._tree.value_of(node)
            if value is not None:
                found[dotted(node)].append(value)
            elif isinstance(at, (cst.Element, cst.For, cst.AsName, cst.AugAssign)) and self._is_bound(node):
                found[dotted(node)].append(None)
        return found

    def _is_bound(self, node: cst.CSTNode) -> bool:
        """Whether a part of a target is bound: ``self.x`` in ``self.x, y = f()``."""
        for below, around in self._tree.upwards(node):
            if isinstance(around, (cst.AssignTarget, cst.AsName)):
                return True
            if isinstance(around, (cst.For, cst.AugAssign)):
                return around.target is below
            if not isinstance(around, (cst.Element, cst.Tuple, cst.List)):
                return False
        return False

    def _of_call(self, call: cst.Call, depth: int) -> Value:
        name = self._tree.qualified(call.func)
        last = called_name(call) or ""
        if name is not None and name.startswith("torch."):
            if name in _NUMBER_CALLS:
                return Value(Kind.NUMBER)
            if name == "torch.device":
                return Value(Kind.DEVICE)
            if name.startswith("torch.autograd.") and last == "Variable":
                return Value(Kind.TENSOR)
            if last == "DataLoader" and not any(argument.star for argument in call.args):
                given = {argument.keyword.value for argument in call.args if argument.keyword is not None}
                return UNKNOWN if "collate_fn" in given else Value(Kind.LOADER)
            if (
                name.rpartition(".")[0] in ("torch", "torch.cuda", "torch.nn.functional")
                and last in _FACTORIES
            ):
                return Value(Kind.TENSOR)
            if name.startswith("torch.nn.") and last[:1].isupper():
                return Value(Kind.TENSOR if last == "Parameter" else Kind.MODULE)
            return UNKNOWN
        if name is not None and (self._is_module(name) or makes_module(name)):
            return Value(Kind.MODULE)
        if name in _COPY and call.args:
            return self.of(call.args[0].value, depth - 1)
        if (told := keyword(call, "return_tensors")) is not None and string_value(told.value) == "pt":
            return Value(Kind.TENSOR)  # or a dictionary of tensors, which has a method `to` too
        owner = call.func.value if isinstance(call.func, cst.Attribute) else None
        if owner is not None and last.startswith("from_") and self._is_class_of_modules(owner):
            return Value(Kind.MODULE)
        if isinstance(call.func, cst.Name):
            if call.func.value in ("int", "len"):
                return Value(Kind.NUMBER)
            if call.func.value in ("str", "repr"):
                return Value(Kind.STRING)
            if _is_next(call):
                return self._of_element(call.args[0].value, [], depth)
            if call.func.value == "iter" and len(call.args) == 1:
                held = self.of(call.args[0].value, depth - 1)
                return held if held.kind is Kind.LOADER else UNKNOWN
            made = self.instance_of(call.func.value)
            made = made if made is not UNKNOWN else self._of_result(call.func, depth)
            return made if made is not UNKNOWN else self._of_class_in(call.func)
        if isinstance(call.func, cst.Attribute):
            made = self._of_result(call.func, depth)
            if made is not UNKNOWN:
                return made
            if last in ("current_device", "device_count", "get_rank", "get_world_size"):
                # A program's own accelerator may give "cpu".
                is_known = "get_accelerator(" in self._tree.source(call.func)
                return Value(Kind.NUMBER, certain=is_known and last in ("current_device", "device_count"))
            if last in ("device_name", "current_device_name"):
                return Value(Kind.STRING)
            if last in ("get", "getenv") and name in ("os.environ.get", "os.getenv"):
                return Value(Kind.STRING)
            if last in _TENSOR_METHODS | _MODULE_METHODS:
                held = self.of(call.func.value, depth - 1)
                if held.kind in (Kind.TENSOR, Kind.SAME):
                    return held
                if held.kind is Kind.MODULE and last in _MODULE_METHODS:
                    return held
                if last in _OF_TENSORS_ALONE:
                    return Value(Kind.TENSOR)
        return UNKNOWN

    def _of_result(self, called: cst.CSTNode, depth: int, part: int | None = None) -> Value:
        """The tensor or module that a function of the file, or a method of the class, gives in any case.

        Args:
            called: the function.
            depth: how far names are followed.
            part: which of the values of a tuple is meant; ``None``: the function gives one value.
        """
        functions: list[cst.CSTNode]
        if isinstance(called, cst.Name):
            functions = [one.node for one in self._tree.assignments(called)]
        elif not isinstance(called, cst.Attribute) or dotted(called.value) != "self":
            return UNKNOWN
        else:
            owner = self._tree.around(called, cst.ClassDef)
            functions = (
                [one for one in owner.body.body if _is_method(one, called.attr.value)] if owner else []
            )
        if len(functions) != 1 or not isinstance(functions[0], cst.FunctionDef) or functions[0].asynchronous:
            return UNKNOWN
        key = f"{id(functions[0])}({part})"
        if key in self._open:
            return Value(Kind.SAME)
        self._open.add(key)
        try:
            path = [] if part is None else [part]
            returned = (one.value for one in self._tree.returns[id(functions[0])])
            given = [None if value is None else _part_of(value, path) for value in returned]
            found = [UNKNOWN if value is None else self.of(value, depth - 1) for value in given]
        finally:
            self._open.discard(key)
        kinds = {value.kind for value in found if value.kind is not Kind.SAME}
        is_known = kinds in ({Kind.TENSOR}, {Kind.MODULE}) and all(one.certain for one in found)
        return Value(kinds.pop()) if is_known and not functions[0].decorators else UNKNOWN

    def _of_class_in(self, name: cst.Name) -> Value:
        """A module, if all classes that a name may hold are such: ``make = Net if x else Linear``."""
        bound = self._tree.assignments(name)
        held = [self._tree.value_of(one.node) for one in bound]
        told = [one.node.annotation for one in bound if isinstance(one.node, cst.Param)]
        are_classes = [value is not None and self._is_class_of_modules(value) for value in held]
        are_typed = [annotation is not None and self._is_type_of_modules(annotation) for annotation in told]
        known = are_typed if len(told) == len(bound) else are_classes
        return Value(Kind.MODULE) if known and all(known) else UNKNOWN

    def _is_class_of_modules(self, value: cst.CSTNode) -> bool:
        if isinstance(value, cst.IfExp):
            return self._is_class_of_modules(value.body) and self._is_class_of_modules(value.orelse)
        full = self._tree.qualified(value)
        if full is not None:
            return is_module_class(full) or self._is_module(full)
        return isinstance(value, cst.Name) and self.instance_of(value.value).kind is Kind.MODULE

    def _is_type_of_modules(self, annotation: cst.Annotation) -> bool:
        """Whether an annotation is ``type[torch.nn.Module]``, or that of a class of modules."""
        held = annotation.annotation
        is_type = isinstance(held, cst.Subscript) and dotted(held.value).rpartition(".")[2] in _TYPES
        element = held.slice[0].slice if isinstance(held, cst.Subscript) and is_type else None
        return isinstance(element, cst.Index) and self._is_class_of_modules(element.value)

    def instance_of(self, name: str) -> Value:
        """The kind of the objects of a class of the file."""
        definition = self.classes.get(name)
        if definition is None or name in self.classes_with_own_cuda:
            return UNKNOWN
        for base in definition.bases:
            told = self._tree.qualified(base.value)
            if told is not None and (is_module_class(told) or self._is_module(told)):
                return Value(Kind.MODULE)
            if isinstance(base.value, cst.Name) and base.value.value != name:
                inherited = self.instance_of(base.value.value)
                if inherited.kind is Kind.MODULE:
                    return inherited
        return UNKNOWN

    def _of_operation(self, node: cst.BinaryOperation, depth: int) -> Value:
        if isinstance(node.operator, (cst.FloorDivide, cst.BitAnd)):
            return Value(Kind.NUMBER)
        left, right = self.of(node.left, depth - 1), self.of(node.right, depth - 1)
        if Kind.TENSOR in (left.kind, right.kind):
            return Value(Kind.TENSOR)
        if isinstance(node.operator, cst.Modulo):
            return (
                Value(Kind.STRING)
                if left.kind is Kind.STRING
                else Value(Kind.NUMBER, left.kind is Kind.NUMBER)
            )
        if isinstance(node.operator, (cst.Add, cst.Subtract, cst.Multiply)):
            return self._both(left, right)
        return UNKNOWN

    def _of_subscript(self, node: cst.Subscript, depth: int) -> Value:
        if self._tree.qualified(node.value) == "os.environ":
            return Value(Kind.STRING)
        key = entry_key(node)
        is_entry = key is None and len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index)
        element = self._of_element(node.value, [], depth - 1) if is_entry else UNKNOWN
        is_object = element.kind in (Kind.TENSOR, Kind.MODULE) and element.certain
        return element if is_object else guess_by_name(key or "")


def _is_next(call: cst.Call) -> bool:
    """Whether a call gets the next element of an iterator, or raises: ``next(batches)``."""
    return dotted(call.func) == "next" and len(call.args) == 1 and not has_unpacking(call)


def _part_of(value: cst.BaseExpression, path: list[int]) -> cst.BaseExpression | None:
    """A part of a literal: ``y`` of ``(x, y)`` for ``[1]``; ``None`` if it is not written out."""
    for index in path:
        if not isinstance(value, (cst.Tuple, cst.List)) or index >= len(value.elements):
            return None
        if any(isinstance(one, cst.StarredElement) for one in value.elements):
            return None
        value = value.elements[index].value
    return value


def guess_by_name(name: str) -> Value:
    """The kind that a name suggests."""
    if _NUMBER_NAME.search(name):
        return Value(Kind.NUMBER, certain=False)
    return Value(Kind.DEVICE, certain=False) if DEVICE_NAME.search(name) else UNKNOWN


def methods(node: cst.ClassDef) -> set[str]:
    """The names of the functions that a class defines."""
    return {statement.name.value for statement in node.body.body if isinstance(statement, cst.FunctionDef)}


def _base_names(node: cst.ClassDef) -> set[str]:
    """The bases of a class that are plain names."""
    return {base.value.value for base in node.bases if isinstance(base.value, cst.Name)}


def _is_method(statement: cst.CSTNode, name: str) -> bool:
    return isinstance(statement, cst.FunctionDef) and statement.name.value == name
