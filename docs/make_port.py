"""Writes docs/port/ from the rules of `acclimate port`: a page each, and a list.

python docs/make_port.py            writes them
python docs/make_port.py --check    exits 1 when they are not up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from acclimate.port.rules import RULES, Example, Rule

TARGET = Path(__file__).with_name("port")
BY_HAND = "people.md"
INTRODUCTION = """\
# Porting

`acclimate port` turns source that only runs on CUDA into source for any accelerator. It reads the code and runs none
of it, and needs no GPU. Made from the rules by `python docs/make_port.py`; a test holds it up to date.

```
acclimate port repo/                 # shows a diff and what is left, and why; writes nothing
acclimate port repo/ --write         # applies the safe edits; --unsafe adds those that you must review
acclimate port repo/ --to torch      # the same with torch alone: no new dependency
acclimate port repo/ --check         # exit 1 when hardware-specific code is left; --format text|json|sarif|github
acclimate port repo/ --report out.html
```

- A **safe** edit means the same on CUDA as before, and the code shows it. An **unsafe** one rests on a name, or changes
  which branch other devices take; the reason is printed.
- A program behaves on a CPU as before: `torch.cuda.is_available()` becomes a test that is true there only if the program
  would otherwise end, or if the code after it does the same on a CPU. Code for other devices is kept too.
- Edits that must go together, such as a branch on the device and the pinning in it, are made together or not at all.
- Everything else stays byte for byte: comments, formatting, line ends. A second run changes nothing more.
- `# acclimate: ignore` on a line keeps it; `# acclimate: ignore[device-string]` keeps it from one rule.
- Data that only looks like a device, kernels and builds for one vendor, what leads to such kernels, calls in what
  TorchScript compiles, and YAML are listed and not edited.
- Notebooks are ported cell by cell. A file that cannot be read or parsed is named, and the others go on.

`--to torch` uses only what torch has had since 2.10. `torch.accelerator` raises on a machine without an accelerator, so
calls get a test around them, and a file that names a device gets a function `accelerator_type()` of three lines.

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
# .pre-commit-config.yaml; it uses the acclimate of your environment, as one of its own would hold a torch of its own
- repo: URL-OF-THIS-REPOSITORY
  rev: main
  hooks: [{id: acclimate-port}]
```

The exit code is 0, or 1 where `--check` finds something, or 2 where a file could not be ported or an argument is wrong.
[guide.md](../guide.md) says what each conversion is for; [people.md](people.md) compares the tool with pull requests.

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
        for rule in sorted(RULES, key=lambda each: each.code)
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
