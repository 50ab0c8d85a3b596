"""Writes docs/interface.md from the docstrings of the interface.

python docs/make_interface.py            writes it
python docs/make_interface.py --check    exits 1 when it is not up to date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from acclimate.accelerator import CATEGORIES
from acclimate.accelerator.devices import Devices

TARGET = Path(__file__).with_name("interface.md")
BLOCKS = ("Delegates to", "CPU", "CUDA", "Args", "Raises")
INTRODUCTION = """\
# The interface

This page lists every method of `acclimate.Accelerator`, the class of the object that `get_accelerator()`
returns. `python docs/make_interface.py` generates it from the docstrings; a test keeps it up to date.

*Delegates to* names the function of torch that the default method calls; a backend may override it.
`torch.<device>` is torch's module for the device type (`torch.cuda`, `torch.xpu`, or the module that a
vendor's package registers). *CPU* and *CUDA* say what these two accelerators do. All sizes are bytes. A
device argument (`DeviceLike`) is an index, a name such as `"cuda:1"`, a `torch.device`, or `None` for the
current device.

The interface extends `torch.accelerator`: if torch has a device-independent call that does the whole work,
the method is that call. The method does more if `torch.accelerator` has no such function (dtypes, graphs on
every torch release, op builders, launching), or raises an error because the process has no accelerator, as on
a host.

A backend declares `device_type` and `communication_backend`; all other members have a default.
"""


@dataclass
class Entry:
    """One public name of the interface."""

    heading: str
    text: str
    blocks: dict[str, str] = field(default_factory=dict)


def entry(name: str, member: object, owner: type[Devices], source: dict[str, str]) -> Entry:
    """The documentation of one name.

    Raises:
        ValueError: it has no docstring, or the docstring does not say what CPU and CUDA do.
    """
    if isinstance(member, property):
        kind, documentation = "property", member.__doc__
        annotation = inspect.signature(member.fget).return_annotation if member.fget else "Any"
        heading = f"{name}: {annotation}"
    elif callable(member) and not isinstance(member, type):
        kind, documentation = "method", member.__doc__
        heading = name + written(inspect.signature(member))
    else:
        kind, documentation = "attribute", source.get(name)
        heading = f"{name}: {inspect.get_annotations(owner).get(name, 'Any')}"
        heading = re.sub(r"ClassVar\[(.*)\]", r"\1", heading)
    if not documentation:
        raise ValueError(f"{owner.__name__}.{name} ({kind}) has no docstring.")
    text, blocks = split(inspect.cleandoc(documentation))
    missing = [block for block in ("CPU", "CUDA") if block not in blocks]
    if missing:
        raise ValueError(f"The docstring of {owner.__name__}.{name} lacks {' and '.join(missing)}.")
    return Entry(heading, text, blocks)


class Source(str):
    """Source code that shows itself without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def written(signature: inspect.Signature) -> str:
    """A method's signature as in its source, without ``self``."""
    _self, *parameters = signature.parameters.values()
    bare = [parameter.replace(annotation=Source(parameter.annotation)) for parameter in parameters]
    return str(signature.replace(parameters=bare, return_annotation=Source(signature.return_annotation)))


def split(documentation: str) -> tuple[str, dict[str, str]]:
    """A docstring as its free text and its labelled blocks.

    Raises:
        ValueError: a block goes on without being indented, and would be torn in two.
    """
    text: list[str] = []
    blocks: dict[str, list[str]] = {}
    current = text
    for line in documentation.splitlines():
        label, colon, rest = line.partition(":")
        if colon and label in BLOCKS:
            current = blocks.setdefault(label, [])
            current.append(rest.strip())
            continue
        if line and not line.startswith(" "):
            if current is not text and current[-1]:
                raise ValueError(f'"{line}" goes on with what is above it; indent it.')
            current = text
        current.append(line)
    return "\n".join(text).strip(), {label: "\n".join(lines).strip() for label, lines in blocks.items()}


def attribute_docstrings(owner: type[Devices]) -> dict[str, str]:
    """The strings below a class's attributes, by attribute name."""
    pattern = re.compile(r'^    (\w+): ClassVar\[.*?\] = .*?\n    """(.*?)"""', re.MULTILINE | re.DOTALL)
    return {
        name: "\n".join(line.removeprefix("    ") for line in text.splitlines())
        for name, text in pattern.findall(inspect.getsource(owner))
    }


def plain(text: str) -> str:
    """reStructuredText roles and literals as Markdown, on one line per paragraph."""
    text = re.sub(r":(?:class|meth|attr|func):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(" ".join(line.strip() for line in paragraph.splitlines()) for paragraph in paragraphs)


def items(block: str) -> list[str]:
    """The entries of an ``Args`` or ``Raises`` block, each on one line."""
    entries: list[str] = []
    for line in inspect.cleandoc("\n" + block).splitlines():
        if line and not line.startswith(" "):
            entries.append(line)
        elif entries:
            entries[-1] += " " + line.strip()
    return [re.sub(r"^(\w+): ", r"`\1`: ", plain(item)) for item in entries]


def render(found: Entry) -> str:
    """One entry as Markdown."""
    lines = [f"### `{found.heading}`", "", plain(found.text), ""]
    lines += [f"- {item}" for item in items(found.blocks.get("Args", ""))]
    if "Args" in found.blocks:
        lines.append("")
    lines += ["| delegates to | CPU | CUDA |", "|---|---|---|"]
    cells = [
        plain(found.blocks.get(block, "—")).replace("|", "\\|") for block in ("Delegates to", "CPU", "CUDA")
    ]
    lines += [f"| {' | '.join(cells)} |", ""]
    if "Raises" in found.blocks:
        lines += ["Raises " + "; ".join(items(found.blocks["Raises"])), ""]
    return "\n".join(lines)


def document() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for category in CATEGORIES:
        summary = (inspect.getmodule(category).__doc__ or "").strip().split("\n\n")[0]
        parts.append(f"## {category.__name__}\n\n{plain(summary)}\n")
        source = attribute_docstrings(category)
        for name, member in vars(category).items():
            if not name.startswith("_"):
                parts.append(render(entry(name, member, category, source)))
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    args = parser.parse_args()
    page = document()
    if args.check:
        current = TARGET.exists() and TARGET.read_text() == page
        state = "up to date" if current else "out of date: run python docs/make_interface.py"
        print(f"{TARGET.name} is {state}.")
        return 0 if current else 1
    TARGET.write_text(page)
    print(f"wrote {TARGET.name}: {page.count('### ')} names")
    return 0


if __name__ == "__main__":
    sys.exit(main())
