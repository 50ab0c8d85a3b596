"""Tests for CUDA that must keep meaning CUDA: for its packages, its version, or to find it missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import libcst as cst

from acclimate_port.conditions.branches import (
    branches_of_result,
    controlled_quietly,
    holders_of_result,
    uses_of_result,
)
from acclimate_port.conditions.placements import Placements
from acclimate_port.conditions.skips import skipped
from acclimate_port.conditions.statements import decided_by, whole_condition
from acclimate_port.dataflow.uses import calls_of, uses_of, whole_choice
from acclimate_port.source.cuda_packages import KERNEL_PACKAGES, NEEDED, PACKAGE_IN_TEXT
from acclimate_port.source.tree import (
    Given,
    Span,
    called_name,
    dotted,
    entry_key,
    parts_of_imported_names,
    string_value,
    walk,
)
from acclimate_port.source.vendors import FLAG_WORDS
from acclimate_port.source_file import SourceFile, kept

_PACKAGE = re.compile(r"[-_](gpu|cuda|cpu)\b|CUDA\w*Provider")
_OF_NVIDIA = re.compile(
    r"(?:^|[\W_])(trt|tensorrt|torch_tensorrt|nvml|pynvml|nvidia|cupy|cudnn|cudagraphs?|dali|nvjpeg|nvrtc|cuml|cudf|cueq\w*?)(?:[\W_]|$)",
    re.IGNORECASE,
)
"""Libraries of NVIDIA's in a condition: ``HAS_TRT and torch.cuda.is_available()``."""
_IN_FLAG = re.compile(
    r"(?:^|_)(flash_?attn|flash_?attention|flashinfer|xformers|apex|transformer_engine|mamba_ssm|cueq)(?:_|$)",
    re.IGNORECASE,
)
"""A package for NVIDIA GPUs in the name of a flag: ``is_flashinfer_available``, ``HAS_APEX``."""
_OF_TOOLKIT = re.compile(r"version\.cuda|\bCUDA_(HOME|PATH)\b")
_PROVIDER = re.compile(
    r"(CUDA|Tensorrt)\w*Provider|[\"'](flash_attention|flash_attn|xformers|bitsandbytes|tensorrt|nvfuser)(_?\d)?[\"']"
    r"|[\"']\w+_[48]bit[\"']|[\"'][\w-]+-gpu\b|\bfaiss\.\w*[Gg]pu|\b(cupy|cuml|cudf|pynvml)\.\w|\btvm\.(gpu|cuda)\(|\b(mx|mxnet)\.gpu\(|\bnumba\.cuda\."
    r"|\.(de)?parallelize\(\s*\)|--gpus[= ]|\bnvidia-docker\b|--runtime[= ]nvidia"
    r"|\bBitsAndBytesConfig\b|\bload_in_[48]bit\s*=\s*True|\bEGL_DEVICE_ID\b|[\"']gpu_hist[\"']|[\"']/(device:)?(gpu|GPU):|task_type=[\"']GPU[\"']"
)
"""What chooses a package for NVIDIA GPUs, or calls it: ``CUDAExecutionProvider``, ``"flash_attention_2"``.

``parallelize()`` of a model of transformers spreads its layers over the GPUs that ``torch.cuda`` counts.
``docker run --gpus all`` gives a container the GPUs of NVIDIA.
"""
_BUILD = re.compile(
    r"[\"'][^\"'\n]*\+(cpu|gpu|cu\d+)([\"']|\.html)|[\"']cu\d{2,3}[\"']|\bpip3?[\"'\s,]+install\b|--(extra-)?index-url\b|/whl/"
)
"""A build of a package by its name, ``"+cpu"`` or ``"cu121"``, or a command that installs one."""


def reason_to_keep(file: SourceFile, test: cst.CSTNode) -> str:
    """Why a comparison with CUDA, or a test for it, must keep meaning CUDA; ``""`` if it need not."""
    if "version.cuda" in file.tree.source(whole_condition(file, test)):
        return "it tests the version of CUDA"
    if found := _OF_NVIDIA.search(file.tree.source(whole_condition(file, test))):
        return f"the condition is about {found[1]}, which only NVIDIA GPUs have"
    if asks_capability(file, test):
        return "it tests CUDA's compute capability, which no other accelerator has"
    if flag := _package_flag(file, test):
        return f"other code uses a package for NVIDIA GPUs where `{flag}` is true"
    places = [*branches_of_result(file, test), *skipped(file, test)]
    if any(_OF_TOOLKIT.search(file.tree.source(place)) for place in places):
        return "its branch reads the version of CUDA, or where it is installed"
    if any(_imports_package_within(file, place) for place in places):
        decided = decided_by(file, test)
        is_direct = decided is not None and _imports_package_within(file, file.span(decided))
        what = "its branch imports" if is_direct else "what it sets decides about an import of"
        return f"{what} a package for NVIDIA GPUs"
    if any(uses_cuda_package(file, place) for place in places):
        return "it controls the use of a package for NVIDIA GPUs"
    if _chooses_build(file, test):
        return "it chooses the build of a package, of which CUDA has its own"
    return ""


def uses_cuda_package(file: SourceFile, code: cst.CSTNode | Span | None) -> bool:
    """Whether code chooses or calls a package for NVIDIA GPUs."""
    return code is not None and _PROVIDER.search(file.tree.source(code)) is not None


def _chooses_build(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a branch of a test, or of a use of its result, installs a package or names a build of one."""
    decided = (decided_by(file, one) for one in (test, *uses_of_result(file, test)))
    return any(one is not None and _BUILD.search(file.tree.source(one)) for one in decided)


def _package_flag(file: SourceFile, test: cst.CSTNode) -> str:
    """The name of a test's result that stands for a package for NVIDIA GPUs, also in other files."""
    holders = holders_of_result(file, test) if isinstance(test, cst.Call) else ()
    names = (dotted(holder).rpartition(".")[2] for holder in holders)
    is_one = (name for name in names if name in file.survey.package_flags or _IN_FLAG.search(name))
    return next(is_one, "")


def asks_capability(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a condition tests for CUDA and for its compute capability: it finds a kind of CUDA device."""
    return "get_device_capability(" in file.tree.source(whole_condition(file, test))


def _imports_package_within(file: SourceFile, place: Span) -> bool:
    """Whether the code in a range imports a package for NVIDIA GPUs."""
    return any(place.start <= one.start and one.end <= place.end for one in _imports_of_packages(file))


@kept
def _imports_of_packages(file: SourceFile) -> list[Span]:
    """Where the file imports packages for NVIDIA GPUs."""
    imports = file.tree.imports
    packages = KERNEL_PACKAGES | NEEDED
    return [file.span(one) for one in imports if packages & set(parts_of_imported_names(one))]


_OF_LIBRARIES = {
    *("driver", "cudnn_enabled", "use_cudnn", "load_in_8bit", "load_in_4bit", "use_tensorrt", "use_xformers"),
    *("use_flash_attn", "use_flash_attention", "use_flash_attention_2", "enable_xformers"),
}


def chooses_for_library(file: SourceFile, test: cst.CSTNode) -> str | None:
    """Why a test that chooses an argument for CUDA's libraries stays: ``driver="gesvd" if x.is_cuda …``."""
    for below, around in file.tree.upwards(test):
        if isinstance(around, cst.Arg):
            word = around.keyword.value if around.keyword is not None else ""
            return f"only CUDA's libraries have the argument `{word}`" if word in _OF_LIBRARIES else None
        if isinstance(around, cst.IfExp) and below is around.body:
            return None
        if not isinstance(around, (cst.IfExp, cst.BooleanOperation, cst.UnaryOperation, cst.Comparison)):
            return None
    return None


_GPU = ("gpu", "GPU")
_COUNTS = re.compile(r"^(n|num)?_?gpus$")


def word_of_library(file: SourceFile, test: cst.CSTNode) -> str:
    """The word by which a test tells another library to use CUDA: ``accelerator="gpu"``, ``gpus=1``."""
    whole = whole_choice(file, whole_condition(file, test))
    choice = file.tree.parent(whole)
    whole = choice if isinstance(choice, cst.IfExp) and choice.test is whole else whole
    if any(_COUNTS.match(one.word) for one in _given_to_libraries(file, whole)):
        return "the number of GPUs"
    return '`"gpu"`' if any(_reaches_library(file, word) for word in _words_chosen(file, test)) else ""


def returns_word(file: SourceFile, test: cst.CSTNode) -> bool:
    """Whether a function gives ``"gpu"`` by a test: what its callers make of it may be CUDA alone."""
    used = (use for word in _words_chosen(file, test) for use in uses_of(file, word, in_functions=False))
    return any(isinstance(file.tree.parent(use), cst.Return) for use in used)


@kept
def _words(file: SourceFile) -> list[cst.CSTNode]:
    """The words ``"gpu"`` of the file."""
    return [one for one in file.tree.of_type(cst.SimpleString) if string_value(one) in _GPU]


def _words_chosen(file: SourceFile, test: cst.CSTNode) -> list[cst.CSTNode]:
    """The words ``"gpu"`` in the code that a test, or a use of its result, controls."""
    places = branches_of_result(file, test)
    starts = ((word, file.span(word).start) for word in (_words(file) if places else ()))
    return [word for word, at in starts if any(place.start <= at < place.end for place in places)]


def _reaches_library(file: SourceFile, word: cst.CSTNode) -> bool:
    """Whether a library gets a value, or an entry ``accelerator`` of the arguments for one does."""
    for use in uses_of(file, word, in_functions=False):
        at = file.tree.parent(use)
        keys = [entry_key(one.target) for one in at.targets] if isinstance(at, cst.Assign) else []
        keys += [string_value(at.key)] if isinstance(at, cst.DictElement) else []
        keys += [at.keyword.value] if isinstance(at, cst.Arg) and at.keyword is not None else []
        if "accelerator" in keys:
            return True
    return any(_given_to_libraries(file, word))


def _given_to_libraries(file: SourceFile, value: cst.CSTNode) -> Iterator[Given]:
    """The calls that get a value, of functions that are imported and neither torch's nor the project's."""
    for use in uses_of(file, value, in_functions=False):
        given = file.tree.given_to(use)
        packages = {name.partition(".")[0] for name in file.tree.may_be(given.call.func)} if given else set()
        if given is not None and packages - {"", "torch", *file.survey.modules, *sys.stdlib_module_names}:
            yield given


def is_flag_beside_others(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether the test sets one of several flags: ``is_cuda_available`` beside ``is_npu_available``.

    Code that reads the flags takes the first true one, so the flag for CUDA must mean CUDA.
    """
    assigned = file.tree.parent(question)
    if isinstance(assigned, cst.Return):
        function = file.tree.function(assigned)
        name = function.name if isinstance(function, cst.FunctionDef) else None
    else:
        targets = assigned.targets if isinstance(assigned, cst.Assign) else []
        name = next((target.target for target in targets if isinstance(target.target, cst.Name)), None)
    flag = name.value if name is not None else ""
    if "nvidia" in flag.lower():
        return True
    before, cuda, after = flag.lower().partition("cuda")
    others = {f"{before}{kind}{after}" for kind in FLAG_WORDS}
    return bool(cuda) and not others.isdisjoint(_names_in_lower_case(file))


@kept
def _names_in_lower_case(file: SourceFile) -> set[str]:
    return {name.lower() for name in file.names}


def flag_for_others(file: SourceFile, test: cst.CSTNode | None) -> str:
    """The name under which code elsewhere gets a test's result, if it says CUDA; ``""`` if there is none.

    ``build(cuda=torch.cuda.is_available())``, ``self.cuda = …`` or ``def has_cuda(): return …``.
    """
    holder = file.tree.parent(whole_condition(file, test)) if test is not None else None
    while isinstance(holder, (cst.IfExp, cst.BooleanOperation)):
        holder = file.tree.parent(holder)
    name = ""
    if isinstance(holder, cst.Arg) and holder.keyword is not None:
        call = file.tree.parent(holder)
        called = file.tree.qualified(call.func) if isinstance(call, cst.Call) else None
        name = "" if (called or "").startswith("torch.") else holder.keyword.value
    elif isinstance(holder, cst.Return):
        function = file.tree.function(holder)
        is_used = isinstance(function, cst.FunctionDef) and calls_of(file, function)
        name = function.name.value if isinstance(function, cst.FunctionDef) and not is_used else ""
    elif isinstance(holder, cst.Assign) and isinstance(holder.targets[0].target, cst.Attribute):
        target = holder.targets[0].target
        others = (one for one in file.attributes[target.attr.value] if one is not target)
        is_read = any(file.tree.qualified(one) is None for one in others)
        name = "" if is_read else target.attr.value
    return name if "cuda" in name.lower() else ""


# -- a test that reports -----------------------------------------------------------------------------

REPORTS = "it reports whether there is CUDA, and says so"


def reports_cuda(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a question for CUDA is printed or kept as a text that says so: ``("CUDA available?", …)``.

    A name may hold the answer, if the program does not put anything on a device by it.
    """
    if _is_reported(file, question) or _only_says_so(file, question):
        return True
    target = file.tree.holder_of(question)
    reads = file.tree.reads(target) if isinstance(target, cst.Name) else []
    if not any(_is_reported(file, read) for read in reads if not _chooses(file, read)):
        return False
    return not Placements(file).are_within(controlled_quietly(file, question))


def _only_says_so(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether all that runs for a true answer prints that there is CUDA."""
    for below, around in file.tree.upwards(question):
        if isinstance(around, cst.If):
            lines = around.body.body if below is around.test and around.orelse is None else ()
            said = [
                _printed(one)
                for line in lines
                if isinstance(line, cst.SimpleStatementLine)
                for one in line.body
            ]
            return len(said) == len(lines) > 0 and all(map(_CUDA_IS_THERE.search, said))
        if not (isinstance(around, cst.BooleanOperation) and isinstance(around.operator, cst.And)):
            return False
    return False


def _printed(statement: cst.CSTNode) -> str:
    """The text that a statement prints; ``""`` if it does anything else."""
    call = statement.value if isinstance(statement, cst.Expr) else None
    if not isinstance(call, cst.Call) or not _tells(called_name(call) or "") or not call.args:
        return ""
    return string_value(call.args[0].value) or ""


def _chooses(file: SourceFile, read: cst.CSTNode) -> bool:
    """Whether a read decides what else a text says: ``torch.version.cuda if ok else ""``."""
    choice = file.tree.parent(read)
    return isinstance(choice, cst.IfExp) and choice.test is read


def _is_reported(file: SourceFile, question: cst.CSTNode) -> bool:
    for below, around in file.tree.upwards(question):
        if isinstance(around, cst.FormattedString):
            parts: list[cst.CSTNode] = list(around.parts)
            before = parts[parts.index(below) - 1] if below in parts[1:] else None
            return isinstance(before, cst.FormattedStringText) and _says_cuda(before.value)
        if isinstance(around, (cst.Tuple, cst.List)):
            return any(_says_cuda(string_value(one.value)) for one in around.elements if one is not below)
        if isinstance(around, cst.DictElement):
            return below is around.value and _says_cuda(string_value(around.key))
        if isinstance(around, cst.Assign):  # `info["CUDA available"] = …`
            keys = [entry_key(target.target) or "" for target in around.targets]
            return any(_says_cuda(key) and re.search(r"[\s?:]", key) for key in keys)
        if isinstance(around, cst.BinaryOperation):
            texts = [_text(file, one) for one in walk(around.left)]
            return below is around.right and any(map(_says_cuda, texts))
        if isinstance(around, cst.Call) and isinstance(below, cst.Arg):
            given = [one.value for one in around.args if one is not below]
            given += [around.func.value] if isinstance(around.func, cst.Attribute) else []
            if any(_says_cuda(_text(file, one)) for one in given):
                name = called_name(around) or ""
                return _tells(name)
            if called_name(around) not in ("str", "bool", "repr"):
                return False
        elif not isinstance(around, (cst.Arg, cst.Attribute, cst.Call, cst.Element, *_OF_TEXT)):
            return False
    return False


def _text(file: SourceFile, node: cst.CSTNode) -> str | None:
    """A string, also that of a name that holds nothing else."""
    held = file.bound_values(node) if isinstance(node, cst.Name) else [node]
    return string_value(held[0]) if len(held) == 1 else None


_OF_TEXT = (cst.FormattedStringExpression, cst.IfExp)
_PRINTS = re.compile(r"print|log|echo|report", re.IGNORECASE)
"""Names of a program's own functions that print: ``printt("cuda_is_available: %s", …)``."""
_CUDA_IS_THERE = re.compile(
    r"\bCUDA( device| GPU)?s? (is|are) (available|present|there)|\bfound CUDA", re.IGNORECASE
)
_REPORT = {"print", "info", "debug", "warn", "warning", "error", "write", "format", "append"}


def _tells(name: str) -> bool:
    """Whether a function of a name prints or keeps a text."""
    return name in _REPORT or _PRINTS.search(name) is not None


def _says_cuda(text: str | None) -> bool:
    """Whether a text is a label that says CUDA, and no name of a flag or a device."""
    return (
        text is not None
        and re.search(r"cuda", text, re.IGNORECASE) is not None
        and (re.search(r"[\s?:=]|avail|version|count|number|num|name", text, re.IGNORECASE) is not None)
    )


# -- a test that chooses a package -------------------------------------------------------------------


def chooses_package(file: SourceFile, question: cst.CSTNode) -> bool:
    """Whether a test controls only the use of a package for NVIDIA GPUs."""
    uses = direct_uses(file, question)
    return bool(uses) and all(_chooses_package(file, use) for use in uses)


def direct_uses(file: SourceFile, question: cst.CSTNode) -> list[cst.CSTNode]:
    """The test itself; the reads of a name instead, if an assignment gives it the test's result."""
    assigned = file.tree.around(question, cst.BaseSmallStatement)  # type: ignore[type-abstract]
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
    for below, around in file.tree.upwards(question):
        if isinstance(around, cst.IfExp):
            sides = (around.body, around.orelse)
            strings = (string_value(node) for side in sides for node in walk(side) if below is around.test)
            texts = " ".join(text for text in strings if text)
            return _PACKAGE.search(texts) is not None and "device" not in texts
        if isinstance(around, cst.Assert):
            return around.msg is not None and PACKAGE_IN_TEXT.search(file.tree.source(around.msg)) is not None
        if isinstance(around, cst.If):
            ends = below is around.test and len(around.body.body) == 1
            text = file.tree.source(around.body.body[0]) if ends else ""
            return text.startswith("raise ") and PACKAGE_IN_TEXT.search(text) is not None
        if not isinstance(around, (cst.UnaryOperation, cst.BooleanOperation)):
            return False
    return False
