"""Where a program gives tensors of its device to what takes them from CUDA alone.

A native extension for CUDA that code calls with what is not on a CPU: ``if x.device.type == "cpu": … else:
fused.act(x)``. Another process, as torch sends and shares only the tensors of a CPU and of CUDA. Python's own
parser reads the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from acclimate_port.source.cuda_packages import NEEDED, ONLY_QUERY
from acclimate_port.source.tree import last_python_name, module_of, python_nodes, text_of

MODULE = "<module>"
_USES = re.compile(
    r"cpp_extension|\bctypes\b|\bcffi\b|\bmpi4py\b|dlpack\b|\bas_cuda_array\b|\bfrom_torch\(|\brpc\b|\bsdpa?_kernel\("
    r"|\bProcessPoolExecutor\(|\bshare_memory_?\(|\bProcess\(|\bspawn\(|\.(?:put|send)\(|Dataset\b|[\"']cpu[\"']|\bis_cpu\b"
)
_USES_WORDS = (
    *("cpp_extension", "share_memory", "Process(", "spawn(", ".put(", ".send(", "Dataset", "is_cpu"),
    *('"cpu"', "'cpu'", "ctypes", "cffi", "mpi4py", "dlpack", "as_cuda_array", "from_torch(", "rpc"),
    *("sdp_kernel(", "sdpa_kernel(", "ProcessPoolExecutor("),
)
"""One of these is in each text that the pattern finds; looking for them takes a tenth of its time."""
_PACKAGES = re.compile(
    rf"^[ \t]+(?:from|import)[ \t]+(?:{'|'.join(sorted(NEEDED | ONLY_QUERY))})\b|\bnvmlInit"
    r"|^[ \t]*from[ \t]+numba\b|\bnumba\.cuda\b",
    re.M,
)
"""Imports of packages for NVIDIA's GPUs that may not run when a file is imported, and kernels of numba."""
_PACKAGE_WORDS = (*sorted(NEEDED | ONLY_QUERY), "nvmlInit", "numba")
_OPTIONAL = (ast.If, ast.IfExp, ast.Try, ast.BoolOp, ast.Lambda)
_NATIVE = re.compile(r"^_C$|_C$|_ext$|_cuda(_(lib|kernels?|binding|backend|impl))?$")
"""Names of compiled modules."""
_SETTINGS = re.compile(r"config|default", re.IGNORECASE)
_STARTS_PROCESSES = re.compile(r"[\"'](?:spawn|forkserver)[\"']|\bProcessPoolExecutor\(")
_QUEUE = re.compile(r"queue|pipe|conn|(^|_)q$|pool", re.IGNORECASE)
_SEND = {"share_memory", "share_memory_", "put", "send", "spawn", "Process"}
_NUMBERS = re.compile(r"(float|double|half|bfloat16|u?int|long|short|bool|byte|complex)\d*$|dtype")
_HOMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVE = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_POOLS = {
    "map",
    "submit",
    "imap",
    "imap_unordered",
    "starmap",
    "apply",
    "map_async",
    "apply_async",
    "starmap_async",
}
_FOREIGN_CODE = re.compile(r"^[ \t]*(?:import|from)[ \t]+(?:ctypes|cffi)\b", re.M)
_MEMORY = ("data_ptr", "__cuda_array_interface__")
_TAKE_TENSORS = {"from_dlpack", "as_cuda_array", "from_torch"}
"""Functions of other libraries whose argument is a tensor of torch's."""
_SEND_BY_RPC = {"rpc_sync", "rpc_async", "remote"}
_SEND_BY_MPI = {
    *("Allreduce", "Allgather", "Alltoall", "Bcast", "Gather", "Scatter", "Reduce", "Send", "Recv", "Isend"),
    *("Irecv", "Sendrecv"),
}
"""Methods of mpi4py that take memory; those in small letters take any object."""
_CHOOSE_KERNELS = {"sdp_kernel", "sdpa_kernel"}
_KERNELS_OF_CUDA = {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"}
_KEEP = {
    "detach",
    "clone",
    "contiguous",
    "eval",
    "train",
    "requires_grad_",
    "float",
    "half",
    "view",
    "unsqueeze",
}
"""Methods whose result is on the same device."""


def given_to_cuda(
    source: str | bytes,
    extensions: frozenset[str] = frozenset(),
    *,
    by_workers: bool = False,
    spawns: bool = False,
) -> dict[str, int]:
    """The functions and classes whose code does so, and the first line.

    ``<module>`` stands for code of the module; nothing if this Python cannot parse it.

    Args:
        source: the file.
        extensions: the names of extensions for CUDA that the project builds.
        by_workers: whether the project loads data in other processes, which get what a dataset holds.
        spawns: whether the project starts processes that are no copies of the one that starts them.
    """
    text = text_of(source)
    is_likely = any(word in text for word in _USES_WORDS) and _USES.search(text) is not None
    uses_package = any(word in text for word in _PACKAGE_WORDS) and _PACKAGES.search(text) is not None
    module = module_of(source) if is_likely or uses_package else None
    if module is None:
        return {}
    natives = _natives(module, extensions) if "cpu" in text else set()
    is_parallel = "multiprocessing" in text
    workers = _run_by_workers(module) if _STARTS_PROCESSES.search(text) else None
    found = _built_at_import(module)
    packages = _packages_tried(module) if uses_package else set()
    kernels = _kernels_of_numba(module) if "numba" in text else set()
    for statement in module.body:
        home = statement.name if isinstance(statement, _HOMES) else MODULE
        lines = [*_beside_host(statement, natives)] if natives else []
        if is_parallel or "share_memory" in text:
            lines += _sent(module if home is MODULE else statement, statement, spawns)
        if by_workers and isinstance(statement, ast.ClassDef):
            lines += _held_by_dataset(statement)
        if workers is not None:
            lines += _given_by_worker(statement, workers)
        if uses_package:
            lines += _needing_packages(statement, packages, kernels)
        lines += _taken_by_others(module if home is MODULE else statement, statement, text)
        if lines:
            found.setdefault(home, min(lines))
    return found


# -- native extensions -------------------------------------------------------------------------------


def _built_at_import(module: ast.Module) -> dict[str, int]:
    """All names of a module that builds an extension when it is imported, which fails without CUDA."""
    built = [one for one in module.body if isinstance(one, ast.Assign) and _builds(one.value)]
    if not built:
        return {}
    names = (one.name for one in module.body if isinstance(one, _HOMES))
    return dict.fromkeys((*names, MODULE), built[0].lineno)


def _natives(module: ast.Module, extensions: frozenset[str]) -> set[str]:
    """The names of a module that stand for an extension for CUDA, or for code that calls one."""
    found: set[str] = set()
    for node in python_nodes(module):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            inside = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                parts = [*inside.split("."), *alias.name.split(".")]
                is_one = any(_NATIVE.search(part) or part in extensions for part in parts)
                if is_one and parts[0] != "torch" and not any(map(_SETTINGS.search, parts)):
                    found.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.Assign) and _builds(node.value):
            found |= {last_python_name(target) for target in node.targets}
    own = [one for one in module.body if isinstance(one, _HOMES)]
    count = -1
    while count != len(found):
        count = len(found)
        found |= {one.name for one in own if found & _names(one)} if found else set()
    return found


def _builds(value: ast.AST) -> bool:
    """Whether a call builds an extension of CUDA's language: ``load("op", sources=["op.cu"])``."""
    if not isinstance(value, ast.Call) or last_python_name(value.func) not in ("load", "load_inline"):
        return False
    texts = [one.value for one in python_nodes(value) if isinstance(one, ast.Constant)]
    is_inline = any(one.arg == "cuda_sources" for one in value.keywords)
    return is_inline or any(isinstance(one, str) and one.endswith(".cu") for one in texts)


def _beside_host(statement: ast.AST, natives: set[str]) -> Iterator[int]:
    """The lines of tests for the host whose other side alone calls an extension."""
    for block in _blocks(statement):
        for at, one in enumerate(block):
            if isinstance(one, ast.If) and (on_host := _asks_for_host(one.test, natives)) is not None:
                rest = block[at + 1 :] if isinstance(one.body[-1], _LEAVE) else []
                sides = (one.body, one.orelse or rest)
                host, other = sides if on_host else (sides[1], sides[0])
                if _calls(other, natives) and not _calls(host, natives):
                    yield one.lineno
    for node in python_nodes(statement):
        if isinstance(node, ast.IfExp) and (on_host := _asks_for_host(node.test, natives)) is not None:
            first, second = (node.body, node.orelse) if on_host else (node.orelse, node.body)
            if _calls([second], natives) and not _calls([first], natives):
                yield node.lineno


def _blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a statement, with itself."""
    yield [statement] if isinstance(statement, ast.stmt) else []
    for node in python_nodes(statement):
        yield from (
            held for name in ("body", "orelse") if isinstance(held := getattr(node, name, None), list)
        )


def _asks_for_host(test: ast.AST, natives: set[str]) -> bool | None:
    """Whether a condition is true on the host; ``None`` if it does not ask, or asks for an extension too."""
    if isinstance(test, ast.BoolOp):
        asked = [_asks_for_host(one, natives) for one in test.values]
        return None if natives & _names(test) else next((one for one in asked if one is not None), None)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        asked_below = _asks_for_host(test.operand, natives)
        return None if asked_below is None else not asked_below
    if isinstance(test, ast.Attribute) and test.attr == "is_cpu":
        return True
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        return None
    is_one = any(map(_names_host, (test.left, test.comparators[0])))
    return isinstance(test.ops[0], ast.Eq) if is_one else None


def _names_host(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and last_python_name(node.func) == "device" and len(node.args) == 1:
        node = node.args[0]
    return isinstance(node, ast.Constant) and node.value == "cpu"


def _calls(nodes: Iterable[ast.AST], natives: set[str]) -> bool:
    """Whether code calls something of an extension, or names code that does."""
    return any(natives & _names(one) for one in nodes)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in python_nodes(node) if isinstance(one, ast.Name)}


# -- other processes ---------------------------------------------------------------------------------


def _sent(scope: ast.AST, statement: ast.AST, spawns: bool) -> Iterator[int]:
    """The lines that share a tensor or module on the device with another process, or send it there."""
    calls = [one for one in python_nodes(statement) if isinstance(one, ast.Call)]
    calls = [one for one in calls if last_python_name(one.func) in _SEND]
    moved = moved_names(scope) if calls else set()
    for call in calls:
        name = last_python_name(call.func)
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in ("share_memory", "share_memory_") and owner is not None and _is_moved(owner, moved):
            yield call.lineno
        elif name in ("put", "send") and owner is not None and _QUEUE.search(last_python_name(owner)):
            if any(_is_moved(one, moved) for one in call.args):
                yield call.lineno
        elif name == "spawn" or (name == "Process" and spawns):
            given = next((one.value for one in call.keywords if one.arg == "args"), None)
            elements = given.elts if isinstance(given, (ast.Tuple, ast.List)) else []
            if any(_is_moved(one, moved) for one in elements):
                yield call.lineno


def moved_names(scope: ast.AST) -> set[str]:
    """The names and attributes that a scope puts on a device."""
    found: set[str] = set()
    for node in python_nodes(scope):
        if isinstance(node, ast.Assign) and _is_moved(node.value, found):
            found |= {_text(target) for target in node.targets}
        elif isinstance(node, ast.Expr) and _is_move(node.value):  # `model.cuda()`
            owner = getattr(getattr(node.value, "func", None), "value", node)
            found.add(_text(owner))
    return found - {""}


def _text(node: ast.AST) -> str:
    """A name or an attribute as text; ``""`` for anything else."""
    if isinstance(node, ast.Attribute):
        owner = _text(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _is_moved(value: ast.AST, moved: set[str]) -> bool:
    """Whether a value is on a device: it is moved there, or made there."""
    if isinstance(value, (ast.Name, ast.Attribute)):
        return _text(value) in moved
    if _is_move(value):
        return True
    if not isinstance(value, ast.Call):
        return False
    device = next((one.value for one in value.keywords if one.arg == "device"), None)
    if device is not None and last_python_name(value.func)[:1].islower():
        return not _names_host(device)
    owner = value.func.value if isinstance(value.func, ast.Attribute) else None
    return owner is not None and last_python_name(value.func) in _KEEP and _is_moved(owner, moved)


def _is_move(value: ast.AST) -> bool:
    """Whether a call moves a tensor or module to a device: ``x.cuda()``, ``model.to(device)``."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr == "cuda":
        return True
    given = [*value.args[:1], *(one.value for one in value.keywords if one.arg == "device")]
    is_named = bool(given) and not _names_host(given[0]) and not _NUMBERS.search(last_python_name(given[0]))
    return value.func.attr == "to" and is_named


def _run_by_workers(module: ast.Module) -> set[str]:
    """The functions that new processes run and whose results they send: of pools, and of loaders."""
    found: set[str] = set()
    for call in (one for one in python_nodes(module) if isinstance(one, ast.Call)):
        given = [one.value for one in call.keywords if one.arg == "collate_fn"]
        if last_python_name(call.func) in _POOLS and isinstance(call.func, ast.Attribute):
            given += call.args[:1]
        found |= {last_python_name(one) for one in given}
    return found - {""}


def _given_by_worker(statement: ast.AST, workers: set[str]) -> Iterator[int]:
    """The lines that move what a new process sends back: an item of a dataset, the result of a function."""
    functions = [statement] if isinstance(statement, _FUNCTIONS) and statement.name in workers else []
    if isinstance(statement, ast.ClassDef):
        is_data = any(last_python_name(base).endswith("Dataset") for base in statement.bases)
        names = workers | ({"__getitem__", "__iter__"} if is_data else set())
        functions += [one for one in statement.body if isinstance(one, _FUNCTIONS) and one.name in names]
    for function in functions:
        moved = moved_names(function)
        for node in python_nodes(function):
            if isinstance(node, (ast.Return, ast.Yield)):
                parts = python_nodes(node.value) if node.value is not None else []
                is_moved = any(isinstance(one, ast.expr) and _is_moved(one, moved) for one in parts)
                yield from [node.lineno] if is_moved else []


# -- other libraries -----------------------------------------------------------------------------------


def _taken_by_others(scope: ast.AST, statement: ast.AST, text: str) -> Iterator[int]:
    """The lines in which code that knows no other accelerators gets the memory of tensors, or a tensor."""
    nodes = python_nodes(statement)
    if "data_ptr" in text and _FOREIGN_CODE.search(text):
        compared = {id(one) for node in nodes if isinstance(node, ast.Compare) for one in python_nodes(node)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in _MEMORY and id(node) not in compared:
                is_on_host = isinstance(node.value, ast.Call) and last_python_name(node.value.func) == "cpu"
                yield from [] if is_on_host else [node.lineno]
    for call in (one for one in nodes if isinstance(one, ast.Call)):
        name = last_python_name(call.func)
        owner = _text(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        is_torch = owner.partition(".")[0] == "torch"
        is_taking = name in _TAKE_TENSORS and not is_torch and (owner or _imports_of_others(text, name))
        if is_taking or (name in _CHOOSE_KERNELS and _is_without_math(call)):
            yield call.lineno
        elif name in _SEND_BY_RPC and "rpc" in text:
            given = next((one.value for one in call.keywords if one.arg == "args"), None)
            elements = given.elts if isinstance(given, (ast.Tuple, ast.List)) else []
            yield from ([call.lineno] if any(_is_moved(one, moved_names(scope)) for one in elements) else [])
        elif name in _SEND_BY_MPI and "mpi4py" in text and owner:
            given_all = [part for one in call.args for part in (getattr(one, "elts", [one]))]
            yield from ([call.lineno] if any(_is_moved(one, moved_names(scope)) for one in given_all) else [])


def _packages_tried(module: ast.Module) -> set[str]:
    """The names of packages for NVIDIA's GPUs that a module imports if they are there."""
    tried = [one for one in module.body if isinstance(one, (ast.Try, ast.If))]
    imports = [one for held in tried for one in python_nodes(held)]
    imports += [one for one in module.body if isinstance(one, (ast.Import, ast.ImportFrom))]
    return {name for one in imports for name in _names_of_packages(one, at_import=one in module.body)}


def _names_of_packages(statement: ast.AST, *, at_import: bool = False) -> Iterator[str]:
    """The names that an import binds to what is of a package for NVIDIA's GPUs.

    One that is always imported with the file is known by that, unless only its calls need a GPU.
    """
    packages = ONLY_QUERY if at_import else NEEDED | ONLY_QUERY
    if isinstance(statement, ast.Import):
        yield from (
            one.asname or one.name.partition(".")[0]
            for one in statement.names
            if one.name.partition(".")[0] in packages
        )
    elif isinstance(statement, ast.ImportFrom) and not statement.level:
        is_one = (statement.module or "").partition(".")[0] in packages
        names = [one.asname or one.name for one in statement.names if is_one]
        yield from ["nvmlInit"] if names == ["*"] else names


def _kernels_of_numba(module: ast.Module) -> set[str]:
    """The functions of a module that numba compiles for CUDA."""
    functions = [one for one in module.body if isinstance(one, _FUNCTIONS)]
    marks = {
        one.name: [_text(getattr(mark, "func", mark)) for mark in one.decorator_list] for one in functions
    }
    return {name for name, held in marks.items() if any(mark.endswith("cuda.jit") for mark in held)}


def _needing_packages(statement: ast.stmt, tried: set[str], kernels: set[str]) -> Iterator[int]:
    """The lines that need a package for NVIDIA's GPUs or a kernel wherever their function runs."""
    for function in (one for one in python_nodes(statement) if isinstance(one, _FUNCTIONS)):
        names = {*tried}
        waiting: list[ast.AST] = [*_before_return(function.body)]
        names |= {name for one in function.body for name in _names_of_packages(one)}
        while waiting:
            node = waiting.pop()
            if isinstance(node, (*_OPTIONAL, *_FUNCTIONS)):
                continue
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.Call):
                is_started = isinstance(node.func, ast.Subscript) and _text(node.func.value) in kernels
                if is_started or _text(node.func).partition(".")[0] in names:
                    yield node.lineno


def _before_return(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a function up to a test after which it may return: ``if apex is None: return x``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
            return


def _imports_of_others(text: str, name: str) -> bool:
    """Whether a file imports a function from another library than torch."""
    return (
        re.search(rf"^[ \t]*from[ \t]+(?!torch\b)[\w.]+[ \t]+import\b[^\n]*\b{name}\b", text, re.M)
        is not None
    )


def _is_without_math(call: ast.Call) -> bool:
    """Whether attention may not be computed in the way that each device has."""
    words = {one.arg: getattr(one.value, "value", None) for one in call.keywords}
    if last_python_name(call.func) == "sdp_kernel":
        return words.get("enable_math", True) is False
    said = {one.attr for one in python_nodes(call) if isinstance(one, ast.Attribute)}
    return bool(said & _KERNELS_OF_CUDA) and "MATH" not in said


def _held_by_dataset(owner: ast.ClassDef) -> Iterator[int]:
    """The lines in which a dataset puts a tensor on the device that it holds, before its first item."""
    if not any(last_python_name(base).endswith("Dataset") for base in owner.bases):
        return
    for method in (one for one in owner.body if isinstance(one, _FUNCTIONS) and one.name == "__init__"):
        moved = moved_names(method)
        for node in python_nodes(method):
            if isinstance(node, ast.Assign) and _is_moved(node.value, moved):
                targets = (_text(target) for target in node.targets)
                if any(target.startswith("self.") for target in targets):
                    yield node.lineno
