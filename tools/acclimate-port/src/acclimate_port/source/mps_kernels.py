"""Where a program calls functions of torch for which Apple's GPUs have no kernel, by torch 2.13."""

from __future__ import annotations

import ast
import re

from acclimate_port.source.names_of_torch import names_of_torch
from acclimate_port.source.tree import last_python_name, module_of, python_nodes, text_of

MODULE = "<module>"
_OF_LOSSES = {
    *("ctc_loss", "CTCLoss", "multi_margin_loss", "MultiMarginLoss", "multilabel_margin_loss"),
    "MultiLabelMarginLoss",
}
_OF_LAYERS = {
    *("adaptive_max_pool3d", "AdaptiveMaxPool3d", "fractional_max_pool2d", "FractionalMaxPool2d", "RReLU"),
    *("fractional_max_pool3d", "FractionalMaxPool3d", "rrelu", "channel_shuffle", "ChannelShuffle"),
}
_AVERAGES = {"adaptive_avg_pool3d": 1, "AdaptiveAvgPool3d": 0}
"""Layers that have no kernel unless they give one number, with the position of the size that they give."""
_OF_TORCH = {
    *(
        "geqrf",
        "ormqr",
        "matrix_exp",
        "lu_solve",
        "poisson",
        "binomial",
        "heaviside",
        "frexp",
        "mode",
        "take",
    ),
    *("Poisson", "Binomial", "NegativeBinomial", "ndtri", "log_ndtr", "airy_ai"),
    *("segment_reduce", "pdist", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor"),
}
"""Functions with a name that other libraries have too, so that torch has to be named."""
_OF_LINALG = {
    "eig",
    "eigvals",
    "eigh",
    "eigvalsh",
    "lstsq",
    "matrix_exp",
    "lu_solve",
    "ldl_factor",
    "ldl_solve",
}
_OF_TENSORS = {
    *("to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "matrix_exp", "heaviside", "frexp"),
    *("geqrf", "ormqr", "put_"),
}
"""Methods that nothing but a tensor has."""
_NAMES = _OF_LOSSES | _OF_LAYERS | _AVERAGES.keys() | _OF_TORCH | _OF_LINALG | _OF_TENSORS
_CALLS = re.compile(rf"\b(?:{'|'.join(sorted(_NAMES))})\(|\b(?:proj_size|max_norm|logspace)\b")
_WORDS = (*(f"{name}(" for name in sorted(_NAMES)), "proj_size", "max_norm", "logspace")
"""One of these is in each text that the pattern finds; looking for them takes less time."""
_ONE = ("1", "(1, 1, 1)")
_WITH = {
    "LSTM": "proj_size",
    "Embedding": "max_norm",
    "EmbeddingBag": "max_norm",
    "embedding": "max_norm",
    "logspace": "device",
}
"""Layers and functions, with the argument with which they have no kernel."""


def without_mps(source: str | bytes) -> dict[str, int]:
    """The functions and classes that call such a function with tensors which no call takes to the host.

    ``<module>`` stands for code of the module; nothing if this Python cannot parse it.

    Returns:
        The first line that does, for each of them.
    """
    text = text_of(source)
    is_likely = any(word in text for word in _WORDS) and _CALLS.search(text) is not None
    module = module_of(source) if is_likely else None
    if module is None:
        return {}
    full = names_of_torch(module)
    found: dict[str, int] = {}
    for statement in module.body:
        is_home = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        home = getattr(statement, "name", MODULE) if is_home else MODULE
        calls = (one for one in python_nodes(statement) if isinstance(one, ast.Call))
        lines = [one.lineno for one in calls if _has_none(one, full) and not _is_on_host(one)]
        if lines:
            found.setdefault(home, min(lines))
    return found


def _has_none(call: ast.Call, names: dict[str, str]) -> bool:
    """Whether a call is of a function of torch without a kernel for Apple's GPUs."""
    name = last_python_name(call.func)
    if name in _OF_TENSORS and isinstance(call.func, ast.Attribute) and not _is_of_import(call.func):
        return True
    given = (one.value for one in call.keywords if one.arg == _WITH.get(name, ""))
    if any(ast.unparse(one) != "None" for one in given):
        return True
    if name not in _NAMES:
        return False
    owner: ast.AST = call.func
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    full = names.get(owner.id) if isinstance(owner, ast.Name) else None
    if full is None:
        return False
    chain = ast.unparse(call.func).removeprefix(getattr(owner, "id", ""))
    is_of_linalg = f"{full}{chain}".startswith("torch.linalg.")
    if name in _OF_LINALG and (is_of_linalg or name not in _OF_TORCH):
        return is_of_linalg
    if name in _AVERAGES:
        sizes = [one.value for one in call.keywords if one.arg == "output_size"]
        sizes += call.args[_AVERAGES[name] :]
        return not sizes or ast.unparse(sizes[0]) not in _ONE
    return True


def _is_of_import(function: ast.Attribute) -> bool:
    """Whether a function is one of a module by its name: ``np.heaviside``, ``torch.linalg.matrix_exp``."""
    owner = ast.unparse(function.value)
    return owner.partition(".")[0] in ("torch", "np", "numpy", "scipy", "jax", "tf")


def _is_on_host(call: ast.Call) -> bool:
    """Whether the arguments of a call are taken to the host: ``torch.linalg.eigh(x.cpu())``."""
    given = [node for argument in call.args for node in python_nodes(argument)]
    return any(isinstance(one, ast.Call) and last_python_name(one.func) in ("cpu", "numpy") for one in given)
