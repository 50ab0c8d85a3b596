"""Writes docs/port/ from the rules of `acclimate port`: a page for each rule, and a list.

python docs/make_port.py            writes them
python docs/make_port.py --check    exits with 1 if they are not up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from acclimate_port.rules import RULES, Example, Rule

TARGET = Path(__file__).with_name("port")
BY_HAND = "people.md"
INTRODUCTION = """\
# Porting

`acclimate port` turns source that only runs on CUDA into source for any accelerator. It reads the code without running
it, and needs neither torch nor a GPU. `python docs/make_port.py` generates this page from the rules; a test keeps it up
to date.

```
pip install ./tools/acclimate-port   # in a clone; then acclimate-port, or acclimate port where acclimate is installed
acclimate port repo/                 # shows a diff, and why other lines stay; writes nothing
acclimate port repo/ --write         # applies the safe edits; --unsafe adds edits that need judgement
acclimate port repo/ --to torch      # the same with torch only: no new dependency
acclimate port repo/ --check         # exits with 1 if hardware-specific code is left; --format text|json|sarif|github
acclimate port repo/ --report out.html   # also shows what edits that need --unsafe would give; --statistics counts by rule
```

- Before the tool offers an edit of a test or a choice, it evaluates the old and the new text, without running code, on
  three machines: one with CUDA, a host without accelerator, and one with another accelerator. A **safe** edit gives the
  same on the first two, and on the third what CUDA gave. An **unsafe** edit relies on a name, lets other devices take a
  branch written for CUDA, or differs on a host; the tool prints which and how. No edit changes a result on CUDA.
- A test keeps its result on a host: what asserts `torch.cuda.is_available()` ends there as before, and runs on other
  accelerators. If the file has its own code for a device, that device keeps it.
- A search for missing CUDA, `device == "cuda" and not torch.cuda.is_available()`, stays whole, with the list that it
  guards, and a device that it would not find on a host any more is unsafe.
- A device's name given to a library that is not torch's stays, or is unsafe, also through methods of the file.
- Edits that must go together are made together or not at all: all parts of a condition, a branch on the device and the
  pinning in it, a test and the code that it decides about through a flag, a parameter or a loop.
- What chooses, counts, asks for or moves to a device is safe only if its whole file, and the code that the file imports
  by name, is ported: an edit is unsafe, and names the line, if another such place stays or is unsafe there, in a file
  that imports its code, or in one that a third file imports beside it. What a class uses, or inherits from,
  counts as its own code; so does what a table holds for the code that looks its entries up. Tensors that ranks exchange
  are ported with the backend of their program. The same holds for autocasts and scalers, for
  figures of memory, and for states of random numbers. Seeds, waiting, freeing memory and pinning are edited all the same.
  Code for NVIDIA's hardware, devices of other libraries and lines with `# acclimate: ignore` hold no other edit back.
- Decisions are followed over the files that are given together. An edit is unsafe, and names the file and line, if its other end
  stays there: what a flag decides about in another file, a base class that chooses the device too, a function that
  compares the device which it gets or returns, an option or an entry of settings that another file compares, a guard of
  code that needs CUDA. Files without code for a device are read too, if they pass such a value on. Give the
  whole project, as of a single file only its own code is known.
- acclimate is imported where the file imports torch: in the same functions, the same `try` or the same `if`. Files that a
  build script imports stay, as a build may have no other package.
- A report about CUDA ("CUDA available?") and a condition about a library of NVIDIA's stay.
- Tests that decide about moving or wrapping the same object, or objects that meet, are one decision, with the code after an
  early return. So are a skip in a test suite and what it skips, the parts of an option, and moves that one call gets.
- What torch turns off without CUDA stays off on a host: autocast, `GradScaler`, and the seeds of CUDA's generators.
- A function or module that asks for the accelerator often names it once: `acc = get_accelerator()`.
- Everything else stays byte for byte: comments, formatting, line ends. A second run changes nothing more.
- `# acclimate: ignore` keeps a line as it is; `# acclimate: ignore[device-string]` turns off one rule for it.
- The tool lists these without editing them: data that only looks like a device, kernels and builds for one vendor,
  branches that lead to such kernels, calls in code that TorchScript compiles, and YAML. All but the data count as left.
- It reads and writes regular files inside the tree only. A file that changed since it was read is not written, and
  `--write` lists the edits of each file as soon as it is written.
- Notebooks are ported cell by cell. If a file cannot be read or parsed, the tool names it and continues with the others.

`--to torch` uses only functions that torch has had since 2.10. `torch.accelerator` raises an error on a machine without
an accelerator, so its calls are put behind a test, and a file that names a device gets a function `accelerator_type()`
of three lines.

```toml
# pyproject.toml
[tool.acclimate.port]
to = "torch"                 # default: "acclimate"
select = ["ACC1", "ACC201"]  # default: all; a code, a name, or the first letters of a family
ignore = ["visible-devices"]
exclude = ["third_party/*"]
unsafe = false
```

```yaml
# .pre-commit-config.yaml: an environment of its own, of 45 MB and without torch
- repo: local
  hooks:
    - id: acclimate-port
      name: acclimate port
      language: python
      additional_dependencies: ["acclimate-port @ git+URL-OF-THIS-REPOSITORY@main#subdirectory=tools/acclimate-port"]
      entry: acclimate-port --check
      types_or: [python, pyi, jupyter]
```

pre-commit installs the root of a repository that is named as `repo:`, which here is the runtime, with torch. The hook
that this repository itself declares therefore uses the `acclimate-port` of your environment.

The exit code is 0; 1 if `--check` finds something; 2 if a file could not be ported or an argument is wrong.
[guide.md](../guide.md) explains each conversion; [people.md](people.md) compares the tool with pull requests, and lists
the faults that readers found.

| code | rule | what it finds |
|---|---|---|
"""


def main() -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    pages = {"README.md": index()} | {f"{rule.code}.md": page(rule) for rule in RULES}
    if parser.parse_args().check:
        stale = [name for name, text in pages.items() if not has(TARGET / name, text)]
        stale += [path.name for path in TARGET.glob("*.md") if path.name not in {*pages, BY_HAND}]
        for name in stale:
            print(f"docs/port/{name} is not up to date; run python docs/make_port.py")
        return 1 if stale else 0
    TARGET.mkdir(exist_ok=True)
    for name, text in pages.items():
        (TARGET / name).write_text(text, encoding="utf-8")
    return 0


def has(path: Path, text: str) -> bool:
    """Whether a file holds a text."""
    return path.exists() and path.read_text(encoding="utf-8") == text


def index() -> str:
    """The list of all rules."""
    rows = [
        f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.summary.replace('|', chr(92) + '|')} |"
        for rule in sorted(RULES, key=lambda rule: rule.code)
    ]
    rows.append("| ACC701 | yaml | a device or a backend in a YAML file; reported, never edited |")
    return INTRODUCTION + "\n".join(rows) + "\n"


def page(rule: Rule) -> str:
    """The page of one rule."""
    parts = [f"# {rule.code}: {rule.name}\n", f"Finds {rule.summary}.\n", f"{rule.explanation}\n"]
    for example in rule.examples:
        parts.append(shown("Before", example.before))
        parts += [shown(title, text) for title, text in after(rule, example)]
    return "\n".join(parts)


def after(rule: Rule, example: Example) -> list[tuple[str, str]]:
    """What the targets make of an example."""
    told = []
    for target, text in (("acclimate", example.acclimate), ("torch", example.torch)):
        if target in rule.targets and text is not None:
            told.append((f"With `--to {target}`", text))
    return told or [("Left as it is", "")]


def shown(title: str, text: str) -> str:
    """A titled snippet."""
    return f"{title}:\n```python\n{text}```\n" if text else f"{title}.\n"


if __name__ == "__main__":
    sys.exit(main())
