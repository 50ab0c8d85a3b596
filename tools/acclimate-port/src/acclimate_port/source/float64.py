"""Where a program computes with numbers of 64 bits on its device, which Apple's GPUs refuse.

numpy makes float64 where it gets no dtype, and torch keeps the dtype of an array. What is not known counts as
32 bits: a list of values, a parameter that no call of the project gives such numbers. Python's own parser
reads it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from acclimate_port.source.bindings import Bindings, Bound, dotted, parameters
from acclimate_port.source.tree import parse_as_python, python_nodes, text_of

REASON = "Apple's MPS has no float64: {place} makes a float64 tensor on the device"
_WIDE_TYPES = {
    *("float64", "double", "float_", "longdouble", "complex128", "cdouble", "complex_", "float", "d", "f8"),
    *("<f8", "complex", "np.float", "numpy.float"),
}
_NARROW_TYPE = re.compile(r"[<>=]?(b?float|half|u?int|long|short|bool|byte|f[24]|[iu][1248])\d*_?$")
_NARROW = re.compile(
    r"float32|float16|\bint\b|int64|int32|uint8|\.numpy\(|\bf4\b|librosa|cv2|Image\.|torch\."
)
_MAKE = {
    *("zeros", "ones", "empty", "eye", "identity", "linspace", "logspace", "geomspace", "loadtxt"),
    *("genfromtxt", "hanning", "hamming", "blackman", "bartlett", "kaiser", "float64", "double"),
    *("longdouble", "float_", "complex128", "cdouble", "fftfreq"),
}
"""Functions of numpy whose result is of 64 bits without a dtype."""
_RANDOM = {
    *("rand", "randn", "random", "random_sample", "ranf", "sample", "uniform", "normal", "standard_normal"),
    *("beta", "gamma", "exponential", "dirichlet", "laplace", "lognormal", "multivariate_normal"),
    *("vonmises", "weibull", "pareto", "gumbel", "logistic", "triangular", "rayleigh", "standard_gamma"),
    "standard_t",
}
_COMPUTE = {
    *("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "sin", "cos", "tan", "arcsin", "arccos"),
    *("arctan", "arctan2", "tanh", "sinh", "cosh", "mean", "average", "std", "var", "median", "percentile"),
    *("quantile", "divide", "true_divide", "power", "deg2rad", "radians", "nanmean", "nanstd", "cov"),
    *("corrcoef", "inv", "pinv", "norm", "svd", "qr", "eigh", "eig", "eigvals", "solve", "lstsq", "det"),
    *("cholesky", "interp", "gradient", "trapz", "hypot", "sinc", "logaddexp", "cbrt", "degrees", "rad2deg"),
}
"""Functions of numpy whose result is of 64 bits, unless they get an array of fewer."""
_GIVE_WHOLE = {
    *("argmax", "argmin", "argsort", "argwhere", "nonzero", "flatnonzero", "bincount", "digitize"),
    *("indices", "searchsorted", "count_nonzero", "unravel_index", "ravel_multi_index", "triu_indices"),
    *("tril_indices", "lexsort", "argpartition", "isnan", "isinf", "isfinite", "isin", "isclose"),
    *("logical_and", "logical_or", "logical_not", "any", "all", "equal", "greater", "less", "randint"),
    *("integers", "shape", "size", "ndim", "unpackbits", "packbits", "load", "save", "frombuffer", "int64"),
    *("int32", "float32", "float16", "uint8", "finfo", "iinfo", "dtype", "array_equal", "allclose"),
}
"""Functions of numpy whose result has not the dtype of what they get. That of all others has."""
_DTYPE_AT = {"zeros": 1, "ones": 1, "empty": 1, "array": 1, "asarray": 1, "full": 2, "loadtxt": 1, "eye": 3}
"""The position of the dtype among the arguments."""
_OF_OTHERS = re.compile(
    r"scipy\.(linalg|sparse\.(eye|identity|diags|rand|random)|stats|spatial|signal\.(windows|get_window|gaussian)|interpolate|integrate|optimize|special\.\w+"
    r"|io\.loadmat)\b|sklearn\.(datasets|preprocessing|decomposition)\b|skimage\.transform\.(resize|rescale|warp)"
    r"|skimage\.(util\.)?img_as_float$|pandas\.read_\w+|soundfile\.read$|networkx\.(to_numpy_\w+|adjacency_spectrum)"
    r"|sklearn\.utils\.class_weight\.compute_\w+|pyworld\.|python_speech_features\.|cv2\.(get\w*(Transform|RotationMatrix2D)|invertAffineTransform|findHomography"
    r"|Rodrigues|estimateAffine\w+)"
)
"""Functions of other libraries whose results are of 64 bits."""
_METHODS_OF_OTHERS = {"get_fdata", "to_numpy", "get_positions", "get_scaled_positions", "GetPositions"}
_WHOLE = {"numpy.bincount", "numpy.arange", "numpy.histogram"}
_WHOLE_IF_GIVEN = {"numpy.array", "numpy.asarray", "numpy.ascontiguousarray", "numpy.copy", "numpy.squeeze"}
_OF_ANY = {"numpy.array", "numpy.asarray"}
_WHOLE_METHODS = {"transpose", "copy", "reshape", "squeeze", "convert", "resize", "crop"}
"""Methods of arrays and images whose result has the numbers of the same type."""
_SHAPES = {"trimesh": {"vertices", "vertex_normals"}, "open3d": {"points", "vertices", "normals"}}
"""Attributes of the shapes of other libraries that are of 64 bits."""
_IMAGES_READ = re.compile(r"(cv2|imageio(\.v\d)?|skimage\.io)\.imread$|PIL\.Image\.open$|cv2\.imdecode$")
_IMAGES_KEPT = re.compile(r"cv2\.(cvtColor|resize|flip|rotate|copyMakeBorder|warpAffine)$|numpy\.transpose$")
_VIEWS = {
    *("unsqueeze", "squeeze", "view", "reshape", "permute", "transpose", "contiguous", "clone", "expand"),
    *("repeat", "flatten", "t", "detach", "requires_grad_"),
}
"""Methods of a tensor, and functions of torch, whose result has the same dtype."""
_WHOLE_NUMBERS = re.compile(
    r"label|target|cls|class|idx|ind(ex|ices)|mask|(^|_)ids?$|tok|count|len|seq|act|num|edge|perm|done|^[ijkny]$"
)
"""Names of arrays that often hold whole numbers."""
_SOLVERS = {"torchdiffeq.odeint", "torchdiffeq.odeint_adjoint", "torchdiffeq.odeint_event"}
_FIXED_STEPS = {"euler", "midpoint", "rk4", "explicit_adams", "implicit_adams", "heun2", "heun3"}
_WIDE_INSIDE = re.compile(
    r"torchmetrics(\.\w+)*\.(FrechetInceptionDistance|KernelInceptionDistance|FID)$"
    r"|torch_harmonics(\.\w+)*\.(Inverse)?Real(Vector)?SHT$"
)
"""Modules of other libraries that compute with 64 bits on their device."""
_GAME = re.compile(
    r"^(r|rew|rewards?|s|s_|state|states|obs|obses|observations?|ob|next_?(state|states|obs|observations?)"
    r"|state_?batch|obs_?batch|reward_?batch|batch_?(state|states|obs|rewards?)|(state|obs)_(next|prime)"
    r"|returns|discounted\w*|advantages?|\w+_(rewards?|obs|states?))$"
)
"""Names of what a game of gym gives, which may be of 64 bits."""
_GAMES = {"gym", "gymnasium", "gym3", "pybullet_envs", "dm_control", "mujoco_py", "roboschool", "pettingzoo"}
_KEEP_TENSOR = {
    "from_pretrained",
    *("Variable", "Parameter", "stack", "cat", "concat", "log", "exp", "sqrt", "unsqueeze", "squeeze"),
    *("abs", "transpose", "reshape", "clamp", "cumsum", "cumprod", "flip", "sum", "mean", "square", "diag"),
    *("vstack", "hstack", "atleast_1d", "tile", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("pow", "mul", "add"),
}
"""Functions of torch whose tensor has the dtype of their first argument."""
_FROM_VALUE = {"tensor", "as_tensor", "from_numpy", "asarray"}
_MAKERS = {
    *("zeros", "ones", "empty", "full", "rand", "randn", "arange", "linspace", "logspace", "eye", "tensor"),
    *("as_tensor", "from_numpy", "asarray", "normal", "hann_window", "randint", "randperm"),
    *("scalar_tensor", "load", "Tensor", "FloatTensor", "DoubleTensor", "LongTensor", "frombuffer"),
}
"""Functions of torch that make a tensor on the host if they get no device."""
_NARROW_METHODS = {"float", "half", "bfloat16", "long", "int", "bool", "byte", "short", "char"}
_NO_TENSOR = {
    *("numpy", "item", "tolist", "size", "dim", "argmax", "argmin", "nelement", "numel", "eq", "ne", "lt"),
    *("gt", "le", "ge", "any", "all", "shape", "dtype", "device", "ndim", "split", "cpu_count", "join"),
    "format",
}
"""Methods and attributes whose result is no tensor or array of the same dtype."""
_RESULT = "="
"""Ends the symbol of what a function gives, and goes before the number of its part."""
_DEPTH = 12

SURE, SCALAR, GAME, BATCH = "float64", "float64 scalar", "game", "batch"
Evidence = frozenset[str]
"""Why a value may be of 64 bits: the words above, or the symbols of parameters that may get such numbers."""
_NONE: Evidence = frozenset()


@dataclass(frozen=True)
class Float64:
    """The numbers of 64 bits of a file."""

    on_device: dict[str, int] = field(default_factory=dict)
    """The functions, classes and names of the module whose code brings some to the device, and the line."""
    lines: frozenset[int] = frozenset()
    """All lines that do."""
    given: dict[str, int] = field(default_factory=dict)
    """The parameters that get some, as texts of symbols, and the line."""
    taken: tuple[tuple[str, str], ...] = ()
    """Pairs of a parameter, or of the games that a program plays, and what brings it to the device."""
    passed: tuple[tuple[str, str], ...] = ()
    """Pairs of a parameter, and one of another function that gets its value."""


GAMES = "any:(game)"
"""The symbol of what the games of a program give."""
BATCHES = "any:(batch)"
VALUES = "any:(value of a batch)"
"""A sample whose values may be numbers of Python, of which a loader makes float64."""
"""The symbol of what the data sets of a program give."""
_OF_SYMBOLS = {GAME: GAMES, BATCH: BATCHES}
_JOIN = ("concatenate", "stack", "vstack", "hstack", "column_stack")
_GIVES_BATCHES = re.compile(r"Loader$|^(enumerate|tqdm|trange|iter|list|zip|prepare)$")
"""Functions that give the batches of a dataset, or of a loader."""
_LOADS = re.compile(r"load|batch|data|iter|train|test|val", re.IGNORECASE)
"""What a loop over batches goes over."""


_READ = {ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Dict, ast.Call}
"""What brings numbers somewhere."""


@lru_cache(maxsize=1024)
def float64(source: str | bytes) -> Float64:
    """The numbers of 64 bits of a file; none if this Python cannot parse it. A text is read once."""
    text = text_of(source)
    if "torch" not in text and "numpy" not in text and "gym" not in text:
        return Float64()
    try:
        return _Reader(text, parse_as_python(source)).read()
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # reading may nest too deeply as well
        return Float64()


class _Reader(Bindings):
    """Reads one module.

    Args:
        text: its source.
        module: its tree.
    """

    def __init__(self, text: str, module: ast.Module) -> None:
        self._text = text
        self._lines = text.splitlines()
        super().__init__(module)
        self._known: dict[int, Evidence] = {}
        self._functions = {one.name: one for one in module.body if isinstance(one, ast.FunctionDef)}

    # -- dtypes ------------------------------------------------------------------------------------------

    def _is_wide_type(self, node: ast.AST | None, depth: int = 3) -> bool | None:
        """Whether a dtype is of 64 bits; ``None`` if it is not known."""
        if isinstance(node, ast.Constant):
            text = node.value if isinstance(node.value, str) else ""
            return True if text in _WIDE_TYPES else False if _NARROW_TYPE.match(text) else None
        if isinstance(node, ast.IfExp):
            sides = [self._is_wide_type(one, depth) for one in (node.body, node.orelse)]
            return any(sides) if any(one is not None for one in sides) else None
        text = self._full(node) if node is not None else ""
        owner, _, last = text.rpartition(".")
        if text in ("float", "complex", "int", "bool"):
            return last in _WIDE_TYPES
        if owner in ("torch", "numpy") and (last in _WIDE_TYPES or _NARROW_TYPE.match(last)):
            return last in _WIDE_TYPES and text != "torch.float"
        if isinstance(node, ast.Name) and depth:
            values = [value for _, value, part in self._bindings(node) if value is not None and part < 0]
            values += self._default_of(node)
            known = [self._is_wide_type(one, depth - 1) for one in values]
            return any(known) if any(one is not None for one in known) else None
        return None

    def _default_of(self, name: ast.Name) -> list[ast.AST]:
        """The default of a parameter."""
        function = self._scope(name)
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return []
        given = function.args
        listed = [*given.posonlyargs, *given.args]
        pairs = [*zip(reversed(listed), reversed(given.defaults), strict=False)]
        words = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        pairs += [(one, value) for one, value in words if value is not None]
        return [value for one, value in pairs if one.arg == name.id]

    def _dtype_of(self, call: ast.Call, at: int | None = None) -> bool | None:
        """Whether the dtype that a call gets is of 64 bits; ``None`` if it gets none."""
        given = _word(call, "dtype")
        if given is None and at is not None and len(call.args) > at:
            given = call.args[at]
        if given is None:
            return None
        known = self._is_wide_type(given)
        return known if known is not None else False

    def _has_dtype(self, call: ast.Call, at: int | None = None) -> bool:
        return _word(call, "dtype") is not None or (at is not None and len(call.args) > at)

    # -- values ------------------------------------------------------------------------------------------

    def _numbers(self, node: ast.AST | None, depth: int = _DEPTH) -> Evidence:
        """Why a value of numpy or of Python is of 64 bits."""
        if node is None or not depth:
            return _NONE
        known = self._known.get(id(node))
        if known is None:
            self._known[id(node)] = _NONE  # a value that is computed from itself
            known = self._known[id(node)] = self._numbers_of(node, depth - 1)
        return known

    def _numbers_of(self, node: ast.AST, depth: int) -> Evidence:
        if isinstance(node, ast.Name):
            found: Evidence = frozenset(self._parameter(node))
            held = self._bindings(node)
            for _, value, part in held:
                found |= self._part(value, part, depth)
            return found | self._of_game(node.id, held)
        if isinstance(node, ast.Attribute):
            if node.attr in _NO_TENSOR:
                return _NONE
            text = dotted(node)
            if text.startswith("self.") and text.count(".") == 1:
                found, held = _NONE, self._bound.get((0, text), [])
                for _, value, part in held:
                    found |= self._part(value, part, depth)
                return found | self._of_game(node.attr, held)
            is_part = node.attr in ("T", "values", "data", "flat", "real")
            own = self._numbers(node.value, depth) - {GAME} if is_part else _NONE
            is_of_shape = any(node.attr in names and one in self._packages for one, names in _SHAPES.items())
            own |= frozenset({SURE}) if is_of_shape else _NONE
            return own | self._of_game(node.attr, [])
        if isinstance(node, ast.Subscript):
            if self._full(node.value) in ("numpy.mgrid", "numpy.ogrid", "numpy.r_", "numpy.c_"):
                parts = [one for one in python_nodes(node.slice) if isinstance(one, ast.Constant)]
                is_float = any(isinstance(one.value, (float, complex)) for one in parts)
                return frozenset({SURE}) if is_float else _NONE
            is_edges = isinstance(node.value, ast.Call) and self._full(node.value.func) == "numpy.histogram"
            if is_edges and ast.unparse(node.slice) == "1":
                return frozenset({SURE})
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            is_game = isinstance(key, str) and _GAME.match(key)
            return self._numbers(node.value, depth) | (frozenset({GAME}) if is_game else _NONE)
        if isinstance(node, ast.BinOp):
            sides = (node.left, node.right)
            is_float = isinstance(node.op, ast.Div) or any(map(_is_float, sides))
            is_whole = is_float and any(map(self._is_whole, sides))
            made = frozenset({SURE}) if is_whole or self._is_share(node) else _NONE
            return made | self._numbers(node.left, depth) | self._numbers(node.right, depth)
        if isinstance(node, ast.UnaryOp):
            return self._numbers(node.operand, depth)
        if isinstance(node, ast.IfExp):
            return self._numbers(node.body, depth) | self._numbers(node.orelse, depth)
        if isinstance(node, (ast.List, ast.Tuple)):
            return frozenset().union(*(self._numbers(one, depth) for one in node.elts))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self._numbers(node.elt, depth)
        if isinstance(node, (ast.For, ast.comprehension)):  # a number of an array, which keeps its type
            return self._numbers(node.iter, depth) & frozenset({SURE})
        if isinstance(node, ast.Starred):
            return self._numbers(node.value, depth)
        return self._numbers_of_call(node, depth) if isinstance(node, ast.Call) else _NONE

    def _is_whole(self, node: ast.AST | None, depth: int = _DEPTH) -> bool:
        """Whether a value is an array of whole numbers, which a division makes one of float64: an image's."""
        if isinstance(node, ast.Name):
            return depth > 0 and any(self._is_bound_to_whole(one, depth - 1) for one in self._bindings(node))
        if isinstance(node, ast.Subscript):
            return self._is_whole(node.value, depth)
        if isinstance(node, ast.UnaryOp):
            return self._is_whole(node.operand, depth)
        if isinstance(node, (ast.List, ast.Tuple)):
            return bool(node.elts) and all(_is_number(one) and not _is_float(one) for one in node.elts)
        if not isinstance(node, ast.Call):
            return False
        full, is_typed = self._full(node.func), _word(node, "dtype") is not None or len(node.args) > 1
        if full in _WHOLE or _IMAGES_READ.match(full):
            return True
        if _IMAGES_KEPT.match(full) or (full in _WHOLE_IF_GIVEN and not is_typed):
            return self._is_whole(node.args[0] if node.args else None, depth)
        is_kept = isinstance(node.func, ast.Attribute) and node.func.attr in _WHOLE_METHODS
        return is_kept and isinstance(node.func, ast.Attribute) and self._is_whole(node.func.value, depth)

    def _is_share(self, node: ast.BinOp) -> bool:
        """Whether an array that is made of any values is divided by its sum: ``x = np.asarray(counts)``."""
        if not isinstance(node.op, ast.Div) or not isinstance(node.left, ast.Name):
            return False
        sums = [one for one in python_nodes(node.right) if isinstance(one, ast.Call)]
        is_sum = any(dotted(one.func).rpartition(".")[2] == "sum" for one in sums)
        is_own = any(isinstance(one, ast.Name) and one.id == node.left.id for one in python_nodes(node.right))
        made = [value for _, value, part in self._bindings(node.left) if part < 0]
        calls = [one for one in made if isinstance(one, ast.Call) and self._full(one.func) in _OF_ANY]
        is_typed = any(self._has_dtype(one, 1) or _is_narrow(self._source(one)) for one in calls)
        return is_sum and is_own and bool(calls) and not is_typed

    def _is_bound_to_whole(self, bound: Bound, depth: int) -> bool:
        _, value, part = bound
        is_sound = isinstance(value, ast.Call) and self._full(value.func) == "scipy.io.wavfile.read"
        return part == 1 if is_sound else part < 0 and self._is_whole(value, depth)

    def _of_game(self, name: str, held: list[Bound]) -> Evidence:
        """Whether a name is one of what a game gives, and the file does not show numbers of fewer bits."""
        if not _GAME.match(name):
            return _NONE
        is_typed = any(self._is_typed(value) for _, value, _ in held)
        return _NONE if is_typed else frozenset({GAME})

    def _is_typed(self, value: ast.AST | None, depth: int = 4) -> bool:
        """Whether the file shows the type of a value: ``np.empty(n, dtype=kind)``, also of a part of it."""
        while isinstance(value, ast.Subscript):
            value = value.value
        if isinstance(value, (ast.For, ast.comprehension)):
            return False
        if isinstance(value, (ast.Name, ast.Attribute)) and depth:
            text = dotted(value)
            held = self._bindings(value) if isinstance(value, ast.Name) else self._bound.get((0, text), [])
            return any(self._is_typed(one, depth - 1) for _, one, _ in held)
        if isinstance(value, ast.Call) and depth:
            parts = [*value.args, *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
            if any(self._is_typed(one, depth - 1) for one in parts if not isinstance(one, ast.Constant)):
                return True
        source = self._source(value)
        return "dtype" in source or _is_narrow(source)

    def _part(self, value: ast.AST | None, part: int, depth: int) -> Evidence:
        """Why what an assignment binds is of 64 bits: a value, or one of its parts."""
        if isinstance(value, ast.AugAssign):
            return self._numbers(value.value, depth)
        if part >= 0 and isinstance(value, ast.Call):
            called = value.func.attr if isinstance(value.func, ast.Attribute) else ""
            if called == "step":
                return frozenset({GAME}) if part < 2 else _NONE
            return frozenset(
                one for one in self._numbers(value, depth) if not _is_result(one)
            ) | self._result(value, part)
        return self._numbers(value, depth)

    def _numbers_of_call(self, call: ast.Call, depth: int) -> Evidence:
        full, sure = self._full(call.func), frozenset({SURE})
        if full.startswith("numpy."):
            return self._of_numpy(call, full, depth)
        if _OF_OTHERS.match(full):
            return sure if self._dtype_of(call) is not False else _NONE
        if isinstance(call.func, ast.Attribute):
            name, held = call.func.attr, call.func.value
            if name == "astype":
                given = call.args[0] if call.args else _word(call, "dtype")
                return sure if self._is_wide_type(given) else _NONE
            if name in _METHODS_OF_OTHERS:
                return _NONE if _is_narrow(self._source(call)) else sure
            if name in ("fit_transform", "transform", "inverse_transform"):
                return self._numbers(held, depth) & sure
            if name in ("reset", "step") and re.search(r"env", dotted(held)):
                return frozenset({GAME})
            if name in _RANDOM and isinstance(held, (ast.Name, ast.Attribute, ast.Call)):
                makers = self._values(held)
                if any("RandomState" in one or "default_rng" in one for one in makers):
                    return sure if self._dtype_of(call) is not False else _NONE
            if name == "numpy":
                return self._tensor(held, depth) & sure
            if (own := self._method(call)) is not None:
                return self._returned(own, depth) | self._result(call)
            first = self._full(call.func).partition(".")[0]
            if name not in _NO_TENSOR and first not in ("torch", "math", "random"):
                return self._numbers(held, depth) | self._result(call)
        if isinstance(call.func, ast.Name) and call.func.id in self._functions:
            return self._returned(self._functions[call.func.id], depth)
        if full == "map" and call.args and dotted(call.args[0]) == "float":
            return sure
        if full.rpartition(".")[2] in ("train_test_split", "list", "tuple", "zip", "reversed", "sorted"):
            return frozenset().union(*(self._numbers(one, depth) for one in call.args)) - {GAME}
        return self._result(call)

    def _returned(self, function: ast.FunctionDef, depth: int) -> Evidence:
        """Why what a function of the file gives back is of 64 bits, whatever it gets."""
        returned = (one.value for one in python_nodes(function) if isinstance(one, ast.Return))
        found = frozenset().union(*(self._numbers(one, depth) for one in returned))
        return frozenset(one for one in found if one == SURE or _is_result(one))

    def _method(self, call: ast.Call) -> ast.FunctionDef | None:
        """The method of the class around a call that it runs: ``self.filter(n)``."""
        if not isinstance(call.func, ast.Attribute) or dotted(call.func.value) != "self":
            return None
        owner = next((one for one in self._ancestors(call) if isinstance(one, ast.ClassDef)), None)
        own = (one for one in (owner.body if owner is not None else ()) if isinstance(one, ast.FunctionDef))
        return next((one for one in own if one.name == call.func.attr), None)

    def _result(self, call: ast.Call, part: int = -1) -> Evidence:
        """The symbol of what a function of the project gives, or of one part of it."""
        called = self._called(call)
        return frozenset({f"{called}({_RESULT}{'' if part < 0 else part})"}) if called else _NONE

    def _values(self, node: ast.AST) -> list[str]:
        """The full names of the calls whose result a name holds."""
        if isinstance(node, ast.Call):
            return [self._full(node.func)]
        held = self._bindings(node) if isinstance(node, ast.Name) else self._bound.get((0, dotted(node)), [])
        return [self._full(value.func) for _, value, _ in held if isinstance(value, ast.Call)]

    def _of_numpy(self, call: ast.Call, full: str, depth: int) -> Evidence:
        name = full.rpartition(".")[2]
        at = _DTYPE_AT.get(name)
        if self._has_dtype(call, at):
            return frozenset({SURE}) if self._dtype_of(call, at) else _NONE
        if full.startswith("numpy.fft."):
            return frozenset({SURE}) if name == "fftfreq" else _NONE
        if ".random." in full and name in _RANDOM:
            return frozenset({SURE})
        if name in _MAKE:
            return frozenset({SURE})
        if name == "full" and len(call.args) > 1:
            return frozenset({SURE}) if _is_float(call.args[1]) else self._numbers(call.args[1], depth)
        values = [*call.args, *(one.value for one in call.keywords if one.arg in (None, "a", "x"))]
        held = frozenset().union(*(self._numbers(one, depth) for one in values))
        if name in _COMPUTE:
            is_number = bool(values) and (all(map(_is_number, values)) or any(map(self._is_whole, values)))
            if is_number or SURE in held:
                return frozenset({SURE})
            is_narrow = any(_is_narrow(self._source(one)) or self._is_narrow_array(one) for one in values)
            return held if is_narrow else frozenset({SCALAR}) | held
        if name in ("arange", "full_like") and any(map(self._is_float, values)):
            return frozenset({SURE})
        if name == "fromstring":
            return frozenset({SURE})
        if name not in _GIVE_WHOLE:
            others = values[1:] if name == "where" else values
            is_float = any(map(_is_float, others))
            is_made = is_float and all(map(_is_number, others))
            if is_made or (is_float and any(map(self._is_whole, others))):
                return frozenset({SURE})
            is_list = bool(values) and isinstance(values[0], (ast.List, ast.ListComp, ast.Tuple))
            is_made = name in ("array", "asarray", "asanyarray") and is_list
            is_made = is_made and (_holds_float(values[0]) or SCALAR in held)
            return held | (frozenset({SURE}) if is_made else _NONE)
        return _NONE

    def _is_float(self, node: ast.AST) -> bool:
        """Whether a value is a number with a point, also that of a name: ``n = 16 / 4``."""
        held = self._bindings(node) if isinstance(node, ast.Name) else []
        values = (value for _, value, part in held if value is not None and part < 0)
        return self._is_of_floats(node) or any(map(_is_float, values))

    def _is_narrow_array(self, node: ast.AST) -> bool:
        """Whether the last assignment to a name shows numbers of fewer bits."""
        if not isinstance(node, ast.Name):
            return False
        return any(_is_narrow(self._source(value)) for _, value, _ in self._bindings(node))

    def _tensor(self, node: ast.AST | None, depth: int = _DEPTH) -> Evidence:
        """Why a tensor is of 64 bits."""
        if node is None or not depth:
            return _NONE
        key = -id(node)
        known = self._known.get(key)
        if known is None:
            self._known[key] = _NONE
            known = self._known[key] = self._tensor_of(node, depth - 1)
        return known

    def _tensor_of(self, node: ast.AST, depth: int) -> Evidence:
        if isinstance(node, ast.Name):
            found: Evidence = _NONE
            for _, value, part in self._bindings(node):
                given = value.value if isinstance(value, ast.AugAssign) else value
                is_known = part < 0 or isinstance(given, (ast.Call, ast.For, ast.comprehension))
                of_whole = self._tensor(given, depth)
                found |= of_whole if is_known else of_whole & {BATCH}  # `x, y = batch`
                found |= self._result(given, part) if part >= 0 and isinstance(given, ast.Call) else _NONE
            return found
        if isinstance(node, (ast.For, ast.comprehension)):
            batches = frozenset({BATCH}) if self._gives_batches(node.iter) else _NONE
            made = [*self._made_for(node.iter, depth), *self._entries(node.iter)]
            return batches.union(*(self._tensor(one, depth) for one in made))
        if isinstance(node, ast.Attribute):
            if node.attr in _NO_TENSOR:
                return _NONE
            text = dotted(node)
            if text.startswith("self.") and text.count(".") == 1:
                held = self._bound.get((0, text), [])
                return frozenset().union(*(self._tensor(value, depth) for _, value, part in held if part < 0))
            is_part = node.attr in ("T", "data", "grad", "mT", "real")
            return self._tensor(node.value, depth) if is_part else _NONE
        if isinstance(node, ast.Subscript):
            return self._tensor(node.value, depth)
        if isinstance(node, ast.BinOp):
            return self._tensor(node.left, depth) | self._tensor(node.right, depth)
        if isinstance(node, ast.UnaryOp):
            return self._tensor(node.operand, depth)
        if isinstance(node, ast.IfExp):
            return self._tensor(node.body, depth) | self._tensor(node.orelse, depth)
        if isinstance(node, (ast.List, ast.Tuple)):
            return frozenset().union(*(self._tensor(one, depth) for one in node.elts))
        if isinstance(node, ast.ListComp):
            return self._tensor(node.elt, depth)
        return self._tensor_of_call(node, depth) if isinstance(node, ast.Call) else _NONE

    def _tensor_of_call(self, call: ast.Call, depth: int) -> Evidence:
        full = self._full(call.func)
        name, sure = full.rpartition(".")[2], frozenset({SURE})
        if full.startswith("torch."):
            dtype = self._dtype_of(call)
            if dtype is not None:
                return sure if dtype else _NONE
            if name in ("DoubleTensor", "double"):
                return sure
            if name in _FROM_VALUE and call.args:
                values = self._numbers(call.args[0], depth) | self._tensor(call.args[0], depth)
                if SCALAR in values:
                    is_scalar = name != "from_numpy"
                    values = (values - {SCALAR}) | (sure if is_scalar else _NONE)
                return values
            return self._tensor(call.args[0], depth) if name in _KEEP_TENSOR and call.args else _NONE
        if name in ("Variable", "Parameter") and call.args:
            return self._tensor(call.args[0], depth)
        if full == "next" and call.args:
            return frozenset({BATCH})
        if isinstance(call.func, ast.Name):
            return self._result(call)
        if isinstance(call.func, ast.Attribute):
            held = call.func.value
            if call.func.attr == "double":
                return sure
            if call.func.attr in _NARROW_METHODS or call.func.attr in _NO_TENSOR:
                return _NONE
            if call.func.attr in ("to", "type"):
                given = [*call.args, *(one.value for one in call.keywords if one.arg == "dtype")]
                known = [self._is_wide_type(one) for one in given]
                if True in known or any("DoubleTensor" in self._source(one) for one in given):
                    return sure
                is_typed = call.func.attr == "type" or False in known or _word(call, "dtype") is not None
                return _NONE if is_typed else self._tensor(held, depth)
            is_of_module = isinstance(held, ast.Name) and held.id in self._imports
            return self._result(call) if is_of_module else self._tensor(held, depth)
        return _NONE

    # -- devices -----------------------------------------------------------------------------------------

    def read(self) -> Float64:
        """What the module does with numbers of 64 bits."""
        on_device: dict[str, int] = {}
        of_batches: dict[str, int] = {}
        lines: set[int] = set()
        given: dict[str, int] = {}
        taken: dict[tuple[str, str], None] = {}
        passed: dict[tuple[str, str], None] = {}
        plays = not _GAMES.isdisjoint(self._packages)
        for node in self._nodes:
            if type(node) not in _READ:
                continue
            if isinstance(node, ast.ClassDef):
                self._items(node, given)
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._results(node, given, passed)
                continue
            if isinstance(node, ast.Dict) and self._is_for_device(node):
                found: Evidence = frozenset({SURE})
            elif isinstance(node, ast.Call):
                self._arguments(node, given, passed)
                found = self._brought(node)
            else:
                continue
            if not found or self._knows_apple(node):
                continue
            for home in self._home(node):
                if SURE in found or (plays and GAME in found):
                    lines |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
                    on_device.setdefault(home, node.lineno)
                if BATCH in found:
                    of_batches.setdefault(home, node.lineno)
                    if self._is_cast(node):
                        taken[VALUES, home] = None
                for text in sorted(found - {SURE, SCALAR}):
                    taken[_OF_SYMBOLS.get(text, text), home] = None
        if plays:
            given[GAMES] = next(
                (n for n, line in enumerate(self._lines, 1) if re.search(r"\b(import|from)\s+gym", line)), 1
            )
        if BATCHES in given:
            on_device = {**of_batches, **on_device}
        return Float64(on_device, frozenset(lines), given, tuple(taken), tuple(passed))

    def _results(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        given: dict[str, int],
        passed: dict[tuple[str, str], None],
    ) -> None:
        """Notes what of 64 bits a function gives back."""
        owner = self._around.get(id(function))
        if isinstance(owner, ast.Module):
            texts = [f"here:{function.name}"]
        elif isinstance(owner, ast.ClassDef) and not function.name.startswith("__"):
            texts = [f"self:{owner.name}.{function.name}", f"any:{function.name}"]
        else:
            return
        is_batch = "collate" in function.name.lower()
        for one in python_nodes(function):
            if not isinstance(one, ast.Return) or one.value is None or self._scope(one) is not function:
                continue
            parts = [("", one.value)]
            if isinstance(one.value, ast.Tuple):
                parts = [(str(at), part) for at, part in enumerate(one.value.elts)]
            for end, value in parts:
                found = self._numbers(value) | self._tensor(value)
                if is_batch and SURE in found:
                    given.setdefault(BATCHES, value.lineno)
                for text in texts:
                    if SURE in found and not self._is_scaled(value):
                        given.setdefault(f"{text}({_RESULT}{end})", value.lineno)
                    for other in sorted(found - {SURE, SCALAR, GAME, BATCH}):
                        passed[other, f"{text}({_RESULT}{end})"] = None

    def _is_scaled(self, node: ast.AST) -> bool:
        """Whether a number of numpy changes a value, which leaves a tensor its dtype: ``x / np.log(2)``."""
        if not isinstance(node, ast.BinOp):
            return False
        sides = (node.left, node.right)
        scalars = [one for one in sides if isinstance(one, ast.Call) and all(map(_is_number, one.args))]
        others = [one for one in sides if one not in scalars]
        return bool(scalars) and all(SURE not in self._numbers(one) or self._is_scaled(one) for one in others)

    def _items(self, owner: ast.ClassDef, given: dict[str, int]) -> None:
        """Notes the items of 64 bits of a data set; a loader makes float64 of Python's own numbers, too."""
        methods = {one.name: one for one in owner.body if isinstance(one, ast.FunctionDef)}
        # A loader takes any object with a length and items.
        is_like_one = not owner.bases and "__len__" in methods
        is_set = is_like_one or any("Dataset" in dotted(base) for base in owner.bases)
        waiting: list[ast.AST | None] = []
        if is_set and "__getitem__" in methods:
            found = python_nodes(methods["__getitem__"])
            waiting += [one.value for one in found if isinstance(one, ast.Return)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, (ast.Tuple, ast.List)):
                waiting += value.elts
            elif isinstance(value, ast.Dict):
                waiting += value.values
            elif value is not None and (
                self._is_of_floats(value) or SURE in self._numbers(value) | self._tensor(value)
            ):
                given.setdefault(BATCHES, getattr(value, "lineno", owner.lineno))

        self._values_of_samples(owner, given)

    def _is_of_floats(self, node: ast.AST) -> bool:
        """Whether a value is a number with a point, also one of a list: ``self.labels[index]``."""
        held: list[Bound] = []
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            held = self._bindings(node.value)
        elif isinstance(node, ast.Subscript):
            held = self._bound.get((0, dotted(node.value)), [])
        return _is_float(node) or any(value is not None and _holds_float(value) for _, value, _ in held)

    def _values_of_samples(self, owner: ast.ClassDef, given: dict[str, int]) -> None:
        """Notes what a data set or a transform takes as it is from a record: ``item["scores"]["total"]``."""
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name not in ("__getitem__", "__call__"):
                continue
            for sample in (one for one in python_nodes(method) if isinstance(one, ast.Dict)):
                for value in sample.values:
                    if isinstance(value, ast.Subscript) and _is_text(value.slice):
                        given.setdefault(VALUES, value.lineno)

    def _is_cast(self, move: ast.AST) -> bool:
        """Whether a tensor becomes float32 after it is moved, and so may be anything before."""
        method = self._around.get(id(move))
        call = self._around.get(id(method)) if isinstance(method, ast.Attribute) else None
        if not isinstance(method, ast.Attribute) or not isinstance(call, ast.Call):
            return False
        is_typed = method.attr in ("to", "type") and _is_narrow(self._source(call).rpartition("(")[2])
        return method.attr == "float" or is_typed

    def _brought(self, call: ast.Call) -> Evidence:
        """Why a call brings numbers of 64 bits to a device; nothing if it does not."""
        full, sure = self._full(call.func), frozenset({SURE})
        name = full.rpartition(".")[2]
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        held = call.func.value if isinstance(call.func, ast.Attribute) else None
        if full in ("torch.set_default_dtype", "torch.set_default_tensor_type") and call.args:
            named = self._source(call.args[0])
            return sure if self._is_wide_type(call.args[0]) or re.search("Double|float64", named) else _NONE
        if full in _SOLVERS:
            method_given = _word(call, "method")
            is_fixed = isinstance(method_given, ast.Constant) and method_given.value in _FIXED_STEPS
            return _NONE if is_fixed else sure
        if _WIDE_INSIDE.match(full) or full == "torch.cuda.DoubleTensor":
            return sure
        device = _word(call, "device")
        if device is not None and not _is_host(device) and method != "to":
            if self._dtype_of(call) and not full.startswith(("numpy.", "jax.")):
                return sure
            return self._tensor_of_call(call, _DEPTH) if full.startswith("torch.") else _NONE
        if method in ("to", "cuda") and held is not None and self._moves(call, method):
            found = self._tensor(held) | self._tensor(call)
            # A function that moves what it gets may get a batch.
            found |= frozenset({BATCH}) if self._is_given(held) else _NONE
            if self._is_cast(call) and self._may_be_wide(held):
                return found | sure
            return found | sure if self._is_of_unknown_array(held) and self._makes_wide_arrays else found
        if method == "new_tensor" and call.args:
            return self._numbers(call.args[0]) & sure
        if method == "register_buffer" and len(call.args) > 1:
            return self._tensor(call.args[1])
        if name == "Parameter" and call.args:
            return self._tensor(call.args[0]) & sure
        is_wide = method == "double" and not call.args
        if method in ("to", "type") and held is not None:
            given = [*call.args, *(one.value for one in call.keywords if one.arg == "dtype")]
            is_wide = any(self._is_wide_type(one) for one in given if not isinstance(one, ast.Constant))
        if is_wide and held is not None:
            return _NONE if self._is_on_host(held) else sure
        if full.startswith("torch.") and name not in _MAKERS and self._dtype_of(call) and call.args:
            return _NONE if self._is_on_host(call.args[0]) else sure
        return _NONE

    def _is_given(self, node: ast.AST) -> bool:
        """Whether a value is a parameter, also of a lambda or of a function inside another."""
        scope = self._scope(node) if isinstance(node, ast.Name) else None
        return isinstance(node, ast.Name) and scope is not None and node.id in parameters(scope)

    def _is_of_unknown_array(self, node: ast.AST | None, depth: int = 6) -> bool:
        """Whether a tensor is made of an array, as it is, whose dtype the module does not show."""
        if not depth or node is None:
            return False
        if isinstance(node, ast.Subscript):
            return self._is_of_unknown_array(node.value, depth - 1)
        if isinstance(node, ast.Name):
            held = self._bindings(node)
            return len(held) == 1 and held[0][2] < 0 and self._is_of_unknown_array(held[0][1], depth - 1)
        if not isinstance(node, ast.Call):
            return False
        full = self._full(node.func)
        name = full.rpartition(".")[2]
        if full == "torch.from_numpy" and node.args:
            return self._is_unknown_array(node.args[0])
        if full.startswith("torch."):
            return name in _VIEWS and bool(node.args) and self._is_of_unknown_array(node.args[0], depth - 1)
        is_view = isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS
        return (
            is_view
            and isinstance(node.func, ast.Attribute)
            and self._is_of_unknown_array(node.func.value, depth - 1)
        )

    def _may_be_wide(self, node: ast.AST | None) -> bool:
        """Whether a batch is of arrays whose dtype the module does not show.

        Asked where the batch becomes float32 after it is moved, so that its author expects numpy's default.
        """
        while isinstance(node, ast.Subscript):
            node = node.value
        held = self._bindings(node) if isinstance(node, ast.Name) else ()
        loops = [value for _, value, _ in held if isinstance(value, ast.For)]
        for made in (one for loop in loops for one in self._made_for(loop.iter, 6)):
            if isinstance(made, ast.Call) and self._full(made.func) == "torch.from_numpy" and made.args:
                array = made.args[0]
                is_joined = isinstance(array, ast.Call) and dotted(array.func).rpartition(".")[2] in _JOIN
                array = array.args[0] if is_joined and isinstance(array, ast.Call) and array.args else array
                if self._is_unknown_array(array):
                    return True
        return False

    def _gives_batches(self, node: ast.AST, depth: int = 6) -> bool:
        """Whether a loop may go over batches, by its words or those of what is bound to a name in them."""
        if _LOADS.search(self._source(node)):
            return True
        if isinstance(node, ast.Name) and depth:
            bound = [(value, part) for _, value, part in self._bindings(node)]
            held = [one.iter for one, _ in bound if isinstance(one, ast.For)]
            held += [one for one, part in bound if part < 0 and isinstance(one, ast.Call)]
            return any(self._gives_batches(one, depth - 1) for one in held)
        is_one = isinstance(node, ast.Call) and _GIVES_BATCHES.search(dotted(node.func).rpartition(".")[2])
        return bool(is_one) and any(self._gives_batches(one, depth) for one in getattr(node, "args", ()))

    def _made_for(self, node: ast.AST | None, depth: int) -> list[ast.expr]:
        """The tensors of the dataset whose batches a loop gets."""
        if node is None or not depth:
            return []
        if isinstance(node, ast.Name):
            held = (value for _, value, part in self._bindings(node) if part < 0)
            return [one for value in held for one in self._made_for(value, depth - 1)]
        if not isinstance(node, ast.Call):
            return []
        name = dotted(node.func).rpartition(".")[2]
        if name == "TensorDataset":
            return node.args
        dataset = node.args[0] if node.args else _word(node, "dataset")
        return self._made_for(dataset, depth - 1) if _GIVES_BATCHES.search(name) else []

    def _entries(self, node: ast.expr) -> list[ast.expr]:
        """The values of a dictionary that is written out, whose items a loop gets."""
        held = (
            node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        )
        bound = self._bindings(held) if isinstance(held, ast.Name) else []
        return [one for _, value, _ in bound if isinstance(value, ast.Dict) for one in value.values]

    def _is_unknown_array(self, node: ast.AST) -> bool:
        """Whether an array is a parameter, an attribute or a function's result of which no dtype is seen."""
        if isinstance(node, ast.Subscript):
            return self._is_unknown_array(node.value)
        if isinstance(node, ast.Call):
            text = dotted(node.func)
            return (
                bool(self._called(node))
                and not _WHOLE_NUMBERS.search(text)
                and not _is_narrow(self._source(node))
            )
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return False
        name = dotted(node).rpartition(".")[2]
        if not name or _WHOLE_NUMBERS.search(name.lower()) or self._is_typed(node):
            return False
        held = self._bindings(node) if isinstance(node, ast.Name) else self._bound.get((0, dotted(node)), [])
        if isinstance(node, ast.Name) and not held:
            return bool(self._parameter(node))
        return all(value is not None and isinstance(value, (ast.Name, ast.Attribute)) for _, value, _ in held)

    @cached_property
    def _makes_wide_arrays(self) -> bool:
        """Whether the module makes arrays of 64 bits that it keeps: numpy's default, or such a dtype."""
        return any(isinstance(one, ast.Call) and self._keeps_wide(one) for one in self._nodes)

    def _keeps_wide(self, call: ast.Call) -> bool:
        full = self._full(call.func)
        name = full.rpartition(".")[2]
        is_made = full.startswith("numpy.") and (
            name in _MAKE or (name in _RANDOM and bool(call.args or call.keywords))
        )
        is_made = is_made or (full.startswith("numpy.") and name in ("array", "asarray", "full"))
        if name in ("uniform", "normal") and _word(call, "size") is None and len(call.args) < 3:
            return False
        if not is_made or SURE not in self._numbers(call):
            return False
        for around in self._ancestors(call):
            if isinstance(around, (ast.Compare, ast.Subscript)):
                return False
            if isinstance(around, ast.stmt):
                return isinstance(around, (ast.Assign, ast.AnnAssign, ast.Return))
            if isinstance(around, ast.Call) and _is_narrow(self._source(around)):
                return False
        return False

    def _moves(self, call: ast.Call, method: str) -> bool:
        """Whether a call moves a tensor to a device: ``x.cuda()``, ``x.to(device)``."""
        if method == "cuda":
            return True
        device = _word(call, "device") or (call.args[0] if call.args else None)
        if device is None or _is_host(device) or self._is_wide_type(device) is not None:
            return False
        typed = _word(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
        if typed is not None and self._is_wide_type(typed) is False:
            return False
        source = self._source(device)
        return "dtype" not in source and not self._full(device).startswith("torch.float")

    def _is_on_host(self, node: ast.AST, depth: int = 8) -> bool:
        """Whether a tensor is on the host: ``x.cpu()``, ``torch.zeros(3)``, what numpy gives."""
        if not depth:
            return False
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Call):
            full = self._full(node.func)
            if full.startswith(("numpy.", "scipy.", "math.", "random.")):
                return True
            if full.startswith("torch."):
                name = full.rpartition(".")[2]
                device = _word(node, "device")
                if name in _MAKERS:
                    return device is None or _is_host(device)
                return bool(node.args) and self._is_on_host(node.args[0], depth - 1)
            if isinstance(node.func, ast.Attribute):
                if node.func.attr in ("cpu", "numpy", "item", "tolist"):
                    return True
                if node.func.attr == "cuda" or (node.func.attr == "to" and self._moves(node, "to")):
                    return False
                if node.func.attr == "to" and node.args and _is_host(node.args[0]):
                    return True
                return self._is_on_host(node.func.value, depth - 1)
            return False
        if isinstance(node, ast.Name):
            held = self._bindings(node)
            return bool(held) and all(
                value is not None and part < 0 and self._is_on_host(value, depth - 1)
                for _, value, part in held
            )
        if isinstance(node, ast.BinOp):
            return self._is_on_host(node.left, depth - 1) and self._is_on_host(node.right, depth - 1)
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return self._is_on_host(node.value, depth - 1)
        return isinstance(node, ast.UnaryOp) and self._is_on_host(node.operand, depth - 1)

    def _is_for_device(self, options: ast.Dict) -> bool:
        """Whether a dictionary of options holds a device and a dtype of 64 bits."""
        keys = [one.value if isinstance(one, ast.Constant) else None for one in options.keys]
        if "device" not in keys or "dtype" not in keys:
            return False
        return bool(self._is_wide_type(options.values[keys.index("dtype")]))

    def _knows_apple(self, node: ast.AST) -> bool:
        """Whether the function around a node names Apple's device, and so may do something else there."""
        around = self._scope(node)
        source = self._source(around) if around is not None else self._source(node)
        return "mps" in source

    def _arguments(self, call: ast.Call, given: dict[str, int], passed: dict[tuple[str, str], None]) -> None:
        """Notes the functions of the project that get numbers of 64 bits, or a parameter of the caller."""
        if self._full(call.func).endswith("TensorDataset") and any(
            SURE in self._tensor(one) for one in call.args
        ):
            given.setdefault(BATCHES, call.lineno)
        called = self._called(call)
        if not called:
            return
        held = [(f"#{at}", one) for at, one in enumerate(call.args) if not isinstance(one, ast.Starred)]
        held += [(one.arg, one.value) for one in call.keywords if one.arg is not None]
        for end, value in held:
            found = self._numbers(value)
            if SURE in found:
                given.setdefault(f"{called}({end})", value.lineno)
            for text in sorted(found - {SURE, SCALAR, GAME, BATCH}):
                passed[text, f"{called}({end})"] = None

    def _source(self, node: ast.AST | None) -> str:
        """The lines of a node, from its first to its last column."""
        if not isinstance(node, (ast.expr, ast.stmt)):
            return ""
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        if first == last and self._lines[first].isascii():
            return self._lines[first][node.col_offset : node.end_col_offset]
        return "\n".join(self._lines[first : last + 1])


def _is_result(text: str) -> bool:
    """Whether a piece of evidence is the symbol of what a function gives."""
    return f"({_RESULT}" in text


def _word(call: ast.Call, word: str) -> ast.AST | None:
    return next((one.value for one in call.keywords if one.arg == word), None)


def _is_host(node: ast.AST) -> bool:
    """Whether a device is the host's name: ``"cpu"``, ``torch.device("cpu")``."""
    if isinstance(node, ast.Call) and node.args and dotted(node.func).endswith("device"):
        return _is_host(node.args[0])
    return isinstance(node, ast.Constant) and str(node.value).partition(":")[0] in ("cpu", "None", "meta")


def _is_float(node: ast.AST) -> bool:
    """Whether a value is a number with a point: ``0.5``, ``-1e-3``."""
    if isinstance(node, ast.UnaryOp):
        return _is_float(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_float(node.left) or _is_float(node.right) or isinstance(node.op, ast.Div)
    is_call = isinstance(node, ast.Call) and dotted(node.func) == "float"
    return is_call or (isinstance(node, ast.Constant) and isinstance(node.value, float))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_number(node: ast.AST) -> bool:
    """Whether a value is a number of Python."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.Call):
        return dotted(node.func) in ("float", "int", "len")
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _holds_float(node: ast.AST) -> bool:
    """Whether a list holds a number with a point, or a list with one."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return any(_is_float(one) or _holds_float(one) for one in node.elts)
    return isinstance(node, ast.ListComp) and (_is_float(node.elt) or _holds_float(node.elt))


def _is_narrow(source: str) -> bool:
    """Whether code names a type of fewer bits, or takes an array from a tensor."""
    return _NARROW.search(source) is not None
