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

Safe and unsafe edits:

- Before the tool edits a condition on the device, it evaluates the old and the new text, without running code, for three
  machines: one with CUDA, a host without accelerator, and one with another accelerator. A **safe** edit gives the same
  results on the first two, and on the third what CUDA gave. An **unsafe** edit relies on a name, lets other devices take
  a branch written for CUDA, or changes a result on a host; the tool prints which and how. No edit changes a result on
  CUDA.
- On a host, `assert torch.cuda.is_available()` still fails after the edit; with another accelerator it passes. If the
  file has a branch for a device, that device still takes it.
- A branch on missing CUDA, `device == "cuda" and not torch.cuda.is_available()`, is not edited, nor is a list that it
  guards. An edit that would keep it from finding the device is unsafe.
- What chooses a device is safe only in a program of which all code is known: torch, packages of a table
  (`source/known_packages.py`) that follow torch's devices or compute on the host, Python, and files that the tool was
  given. One package that the table does not have, a compiled module, an extension, an operator of the project's own
  (`torch.ops.own.f`), code from a hub or of a model's authors (`trust_remote_code=True`), or a module whose name nothing
  shows makes it unsafe, and the reason names the line.
- A device's name that goes to a library other than torch is not edited, or the edit is unsafe. So is a device that goes to
  a file, a database, a server, the environment or another process, and a flag that goes to a file. So is a device beside
  code that gives a tensor's memory or device to TensorRT, ONNX Runtime, CuPy or PyCUDA, or that calls a function which
  chooses CUDA or the CPU by itself (`torchsummary.summary(model, size)`, Lightning's `Trainer()`), or that gets the
  number of a device (`device_id=rank`). So is a flag or a number of devices that another library, another process or a
  text gets, which may mean CUDA by it, and a device in a file that cannot be imported without a package for NVIDIA GPUs.
- Apple's GPUs have no float64. Where the files of a program show that one comes to the device (numpy's arrays without a
  dtype, `.double()`, a reward of gym, `torchdiffeq.odeint`), the edits that choose the device are unsafe, and the reason
  names the line, if the program takes the host of a Mac today. With `--to torch` the same holds for code that gives
  tensors to torch's process groups (`DistributedDataParallel`, `all_reduce`), which have no kernels for these GPUs, if a
  file of the project names gloo or no backend. In a file whose groups are all of gloo it holds with each target, whatever the
  program takes today.
- The same holds for functions of torch that have no kernel for Apple's GPUs (`ctc_loss`, `linalg.eigh`), and for a test that
  turns on the workers of a data loader in a script that a Mac cannot run in them. What gives tensors on the device to code
  that takes them from CUDA alone makes the device unsafe everywhere: an extension that runs where `x.device.type` is not
  `"cpu"`, a process or queue that gets them, a dataset that holds them for workers.
- A device with an index is not edited where a test expects an error (`with pytest.raises(RuntimeError)`), nor is an index
  of 16 or more. A second device (`"cuda:1"`) of a program that takes the host without CUDA is unsafe.
- `torch.nn.DataParallel` is unsafe where a file of the program reads `model.device_ids`, or where nothing else moves the
  model. A question for CUDA before the program sets `CUDA_VISIBLE_DEVICES` is unsafe with `--to acclimate`: torch has read
  the variable by then, and acclimate has not.
- A checkpoint that only `load_state_dict` gets is loaded to the host, on every machine. Another `torch.load(path)` without
  `map_location`, whatever the file's name, makes the edits of its file unsafe, and of those that run its function, unless
  the programs of the project that save files are ported. Of several loads in one function, all are edited, or it is unsafe. A load is unsafe in a project
  with a module that keeps what it loads (`self.bank = state["bank"]`).

Edits that belong together:

- Some edits are made together or not at all: all parts of a condition; a branch on the device and the pinning in it; a
  condition and the code that it controls through a flag, a parameter or a loop; conditions on moving or wrapping the
  same object; a skip in a test suite and what it skips; all moves among the arguments of one call.
- The code that chooses, counts or asks for a device, or moves something to it, must agree in the whole program. If one
  such place is not edited, or is unsafe, then so are those in the same file, in the files that import it or that it
  imports by name, and in files that a third file imports beside it. The tool names the line. A class counts with its base
  classes, and code that looks up entries of a table with the table, also one that decorators fill. A text counts as an
  import if it is the dotted name of a class or function of the project (`"training.networks.Generator"`), if
  `import_module` gets it (`f"models.{name}"`: each module that fits), or if it is the script of a command. A name that
  only a setting, a YAML file or a pickle knows may be that of each module that no file imports. What a program runs
  through functions, classes and tables of modules in other files counts too. Tensors that ranks exchange are edited with
  the backend of their program. The same holds for memory figures and for states of random numbers, and a memory figure
  stays where a device of its program does. A device also stays where an autocast, a scaler or an event of its program
  does, whatever the reason. It does not hold for seeds, synchronisation, freeing memory and pinning, nor because of code for NVIDIA's hardware, devices of
  other libraries, or lines with `# acclimate: ignore`. But it holds where a test for such code stays whose other side only
  takes tensors of the host (`x.numpy()`, `sort_cpu(x)`), and where a call stays that raises without CUDA. A number of
  devices is unsafe where a function that stays on CUDA is started by it.
- The tool follows a value through all files that it is given, so give it the whole project. An edit is unsafe, with the
  file and line, if another file depends on the old value and is not edited: through a flag, a base class that chooses
  the device too, a function that compares the device that it gets or returns, a compared option or setting, or a
  condition on code that needs CUDA.

What else it does, and does not:

- It imports acclimate where the file imports torch: in the same functions, `try` or `if`. Files that a build script
  imports are not edited, since a build may have no other package.
- Reports about CUDA ("CUDA available?"), conditions on NVIDIA's libraries and choices of a package's build ("+cpu") are
  not edited. What else is told of a device is edited with what chooses the device.
- What torch turns off without CUDA stays off on a host: autocast, `GradScaler`, and the seeds of CUDA's generators.
- A function or module that asks for the accelerator often names it once: `acc = get_accelerator()`. In a module, each
  branch of an `if` has its own name, so that an import looks up no more than before; the cells of a notebook share a
  name that stands with the import of torch. What an f-string prints of its code (`f"{code=}"`) stays the same.
- Everything else stays byte for byte: comments, formatting, line ends. A second run changes nothing more.
- `# acclimate: ignore` keeps a line as it is; `# acclimate: ignore[device-string]` turns off one rule for it.
- The tool lists these without editing them: data that only looks like a device, kernels and builds for one vendor,
  branches that lead to such kernels, calls in code that TorchScript compiles, and YAML. `--check` counts all but the
  data as hardware-specific code.
- It reads and writes only regular files inside the tree. It does not write a file that changed since it was read, and
  `--write` lists the edits of each file as soon as it has written it.
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

pre-commit would install the root of this repository, which is the runtime with torch. So the hook that this repository
declares uses the `acclimate-port` of your environment.

The exit code is 1 if `--check` finds something, 2 if a file could not be ported or an argument is wrong, else 0.
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
