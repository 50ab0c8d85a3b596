"""Count how CUDA-only code uses `torch.cuda`: which names, in which way, with which arguments.

The interface promises that `torch.cuda.X` can become `get_accelerator().X`; this says what X is in practice.

    python benchmarks/cuda_uses.py CHECKOUTS [--only OWNER/NAME=FOLDER] [--json FILE]

CHECKOUTS holds one git checkout per repository, as CHECKOUTS/OWNER/NAME. Python files and the code cells of
notebooks are read, never run. The repositories and commits behind the figures that the tests use are named in
tests/accelerator/data/cuda_uses.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

# `torch.cuda.amp.autocast` is a name of its own; `torch.cuda.Stream.wait_event` is the name `Stream`.
SUBMODULES = {
    *("amp", "amp.autocast_mode", "amp.grad_scaler", "comm", "gds", "graphs", "green_contexts", "jiterator"),
    *("memory", "nccl", "nvtx", "profiler", "random", "sparse", "streams", "tunable", "_sanitizer", "_utils"),
}
MODULE_ITSELF = "(module)"
LOOKUPS = {"getattr", "hasattr", "setattr"}
ANNOTATIONS = {"annotation", "returns"}
DECORATED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CALLS = {"call", "decorator call", "context manager"}
BY_PATTERN = re.compile(r"\btorch\.cuda((?:\.\w+)+)")


@dataclass(frozen=True)
class Use:
    """One use of a name of `torch.cuda`: its kind and, where it is called, the shape of the call."""

    name: str
    kind: str
    positional: int | None = None  # None: not called, or called with *arguments
    keywords: tuple[str, ...] = ()


class CallShape(TypedDict):
    """How often a name is called with so many positional arguments (None: unknown) and these keywords."""

    positional: int | None
    keywords: list[str]
    uses: int


class NameEntry(TypedDict):
    """What is known of one name."""

    uses: int
    repos: int
    by_repository: dict[str, int]
    kinds: dict[str, int]
    keywords: dict[str, int]
    max_positional: int
    calls: list[CallShape]


class RepositoryEntry(TypedDict):
    """What was counted in one repository; folder "" means all of it."""

    repo: str
    commit: str | None
    folder: str
    uses: int


class Counts(TypedDict):
    """All counts; the heaviest name first."""

    repositories: list[RepositoryEntry]
    names: dict[str, NameEntry]


@dataclass
class Source:
    """What one file holds: the syntax trees of its parts, and the text of those that do not parse."""

    trees: list[ast.Module] = field(default_factory=list)
    unparsed: list[str] = field(default_factory=list)


def read(path: Path) -> Source:
    """The parts of a file: the whole of a Python file, each code cell of a notebook."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".ipynb":
        return parse([text])
    try:
        cells = json.loads(text).get("cells", [])
    except ValueError:
        return Source()
    parts = ["".join(cell.get("source", [])) for cell in cells if cell.get("cell_type") == "code"]
    # A line that is a shell or notebook command stays as a statement, so that a block keeps its body.
    return parse([re.sub(r"^(\s*)[%!].*$", r"\1pass", part, flags=re.MULTILINE) for part in parts])


def parse(parts: list[str]) -> Source:
    """Sort the parts of a file into those that this Python can parse and those it cannot."""
    source = Source()
    for part in parts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                source.trees.append(ast.parse(part))
        except (SyntaxError, ValueError):
            source.unparsed.append(re.sub(r"#.*", "", part))
    return source


def cuda_names(trees: list[ast.Module]) -> dict[str, str]:
    """The dotted name behind each name that an import of torch, or from torch.cuda, binds."""
    bound: dict[str, str] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full == "torch.cuda" or full.startswith("torch.cuda."):
                    bound[alias.asname or alias.name] = full
    # A notebook, or a file that gets torch through `from x import *`, still means torch by `torch`.
    return {"torch": "torch"} | bound


def uses(source: Source) -> Iterator[Use]:
    """Every use of a name of `torch.cuda` in a file; an import alone is none, what it binds counts."""
    names = cuda_names(source.trees)
    for tree in source.trees:
        yield from uses_in_tree(tree, names)
    for text in source.unparsed:
        for match in BY_PATTERN.finditer(text):
            yield Use(public_name(match[1].split(".")[1:]), "unparsed")


def public_name(parts: list[str]) -> str:
    """The name of `torch.cuda` that a chain of attributes begins with."""
    length = 1
    while length < len(parts) and ".".join(parts[:length]) in SUBMODULES:
        length += 1
    return ".".join(parts[:length]) or MODULE_ITSELF


def uses_in_tree(tree: ast.AST, names: dict[str, str]) -> Iterator[Use]:
    """The uses in one syntax tree."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and in_annotation(node, parents):
            try:
                quoted = ast.parse(node.value, mode="eval")
            except (SyntaxError, ValueError):
                continue
            yield from (Use(use.name, "annotation") for use in uses_in_tree(quoted, names))
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        path = dotted(node, names)
        if path is None or path[:2] != ["torch", "cuda"]:
            continue
        above = parents.get(node)
        if isinstance(above, ast.Attribute) and (len(path) == 2 or ".".join(path[2:]) in SUBMODULES):
            continue  # a longer chain is the name
        if len(path) > 2 and public_name(path[2:]) != ".".join(path[2:]):
            continue  # goes on beyond the name, which was counted by itself
        yield describe(node, path[2:], parents)


def dotted(node: ast.expr, names: dict[str, str]) -> list[str] | None:
    """The full dotted path of a chain of attributes that begins with a name bound by an import."""
    tail: list[str] = []
    while isinstance(node, ast.Attribute):
        tail.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id].split(".") + tail
    return None


def describe(node: ast.expr, path: list[str], parents: dict[ast.AST, ast.AST]) -> Use:
    """In which way a name is used where it stands."""
    name = public_name(path)
    above = parents.get(node)
    if isinstance(above, ast.Call) and node is above.func:
        return called(name, above, parents.get(above))
    if isinstance(above, ast.Call):
        function = getattr(above.func, "id", None) or getattr(above.func, "attr", None)
        if function in LOOKUPS and (not path or name in SUBMODULES):
            match above.args[:2]:
                case [first, ast.Constant(value=str(attribute))] if first is node:
                    return Use(public_name([*path, attribute]), "looked up")
        if is_type_check(above):
            return Use(name, "isinstance")
    if isinstance(above, DECORATED):
        if node in above.decorator_list:
            return Use(name, "decorator")
        if isinstance(above, ast.ClassDef) and node in above.bases:
            return Use(name, "subclass")
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        return Use(name, "assigned")
    if isinstance(above, ast.Tuple) and is_type_check(parents.get(above)):
        return Use(name, "isinstance")
    return Use(name, "annotation" if in_annotation(node, parents) else "attribute")


def called(name: str, call: ast.Call, above: ast.AST | None) -> Use:
    """The use that a call makes of the name it calls."""
    kind = "call"
    if isinstance(above, DECORATED) and call in above.decorator_list:
        kind = "decorator call"
    elif isinstance(above, ast.withitem) and call is above.context_expr:
        kind = "context manager"
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    keywords = tuple(sorted(keyword.arg or "**" for keyword in call.keywords))
    return Use(name, kind, None if starred else len(call.args), keywords)


def is_type_check(node: ast.AST | None) -> bool:
    """Whether a node is a call of isinstance or issubclass."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"isinstance", "issubclass"}


def in_annotation(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a node stands within the type annotation of a variable, an argument or a result."""
    while (above := parents.get(node)) is not None and not isinstance(above, ast.stmt | ast.arg):
        node = above
    return any(getattr(above, place, None) is node for place in ANNOTATIONS)


def commit(checkout: Path) -> str | None:
    """The commit that a checkout stands at, or None where git does not say."""
    found = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if found.returncode == 0 else None


def count(checkouts: Path, only: dict[str, str]) -> Counts:
    """The counts over all checkouts."""
    repositories: list[RepositoryEntry] = []
    total: dict[str, Counter[str]] = {}
    shapes: dict[str, Counter[Use]] = {}
    for marker in sorted(checkouts.glob("*/*/.git"), key=lambda path: str(path).lower()):
        checkout = marker.parent
        repo = checkout.relative_to(checkouts).as_posix()
        folder = only.get(repo, "")
        found = [
            use
            for path in sorted((checkout / folder).rglob("*"))
            if path.suffix in {".py", ".pyi", ".ipynb"} and path.is_file() and not path.is_symlink()
            for use in uses(read(path))
        ]
        repositories.append({"repo": repo, "commit": commit(checkout), "folder": folder, "uses": len(found)})
        for use in found:
            total.setdefault(use.name, Counter())[repo] += 1
            shapes.setdefault(use.name, Counter())[use] += 1
    heaviest_first = sorted(total, key=lambda name: (-total[name].total(), name))
    return {
        "repositories": repositories,
        "names": {name: summary(total[name], shapes[name]) for name in heaviest_first},
    }


def summary(by_repository: Counter[str], shapes: Counter[Use]) -> NameEntry:
    """Counts of one name, from its uses by repository and by shape."""
    kinds: Counter[str] = Counter()
    keywords: Counter[str] = Counter()
    calls: Counter[tuple[int | None, tuple[str, ...]]] = Counter()
    for use, times in shapes.items():
        kinds[use.kind] += times
        keywords.update(dict.fromkeys(use.keywords, times))
        if use.kind in CALLS:
            calls[use.positional, use.keywords] += times
    return {
        "uses": by_repository.total(),
        "repos": len(by_repository),
        "by_repository": dict(sorted(by_repository.items())),
        "kinds": dict(kinds.most_common()),
        "keywords": dict(keywords.most_common()),
        "max_positional": max((positional or 0 for positional, _ in calls), default=0),
        "calls": [
            {"positional": positional, "keywords": list(names), "uses": times}
            for (positional, names), times in sorted(calls.items(), key=lambda call: (-call[1], str(call[0])))
        ],
    }


def as_json(counts: Counts) -> str:
    """JSON with one line per repository and per name, so that a recount differs line by line."""
    repositories = ",\n".join(f"  {json.dumps(entry)}" for entry in counts["repositories"])
    names = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in counts["names"].items()
    )
    return f'{{\n "repositories": [\n{repositories}\n ],\n "names": {{\n{names}\n }}\n}}\n'


def table(names: dict[str, NameEntry]) -> Iterator[str]:
    """Lines for people: each name, its uses and the share of all uses reached with it."""
    everything = sum(entry["uses"] for entry in names.values())
    reached = 0
    yield f"{'name':34} {'uses':>5} {'repos':>5} {'share':>7}  positional, keywords, kinds"
    for name, entry in names.items():
        reached += entry["uses"]
        notes = f"{entry['max_positional']}  {json.dumps(entry['keywords'])}  {json.dumps(entry['kinds'])}"
        yield f"{name:34} {entry['uses']:>5} {entry['repos']:>5} {reached / everything:>7.2%}  {notes}"


def main() -> int:
    """Count, print the table, and write the data file where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", type=Path, help="folder that holds OWNER/NAME git checkouts")
    parser.add_argument("--only", action="append", default=[], metavar="OWNER/NAME=FOLDER")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    arguments = parser.parse_args()
    counts = count(arguments.checkouts, dict(entry.split("=", 1) for entry in arguments.only))
    if not counts["repositories"]:
        parser.error(f"no OWNER/NAME git checkout in {arguments.checkouts}")
    if arguments.json:
        arguments.json.write_text(as_json(counts), encoding="utf-8")
    print("\n".join(table(counts["names"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
