"""When DeepSpeed gets its accelerator, seen with a package that imports in DeepSpeed's order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FILES = {
    "__init__.py": "from deepspeed.ops import builders",
    "accelerator/__init__.py": "from .real_accelerator import get_accelerator",
    "accelerator/abstract_accelerator.py": """
import abc

class DeepSpeedAccelerator(abc.ABC):
    def __init__(self):
        self._name = None

    @abc.abstractmethod
    def device_name(self, device_index): ...

    @property
    @abc.abstractmethod
    def Event(self): ...

    @abc.abstractmethod
    def visible_devices_envs(self): ...

    @abc.abstractmethod
    def default_generator(self, device_index): ...

    def is_fp64_supported(self):
        return "a default that ours replaces"

    def of_a_later_release(self):
        return "a default that ours does not have"

    _torch_pins_host_memory = True

    def pin_memory(self, tensor):
        return ("through DeepSpeed", self._torch_pin_memory(tensor), self._torch_pins_host_memory)
""",
    "accelerator/real_accelerator.py": """
ds_accelerator = None

def get_accelerator():
    return ds_accelerator or "its own"
""",
    "ops/__init__.py": "",
    "ops/builders.py": "from deepspeed.accelerator import get_accelerator\nfixed = get_accelerator()",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in _FILES.items():
        path = tmp_path / "deepspeed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def printed(folder: Path, program: str) -> list[str]:
    done = run(folder, "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_USE = """
import deepspeed, torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
accelerator = deepspeed.builders.fixed
print(isinstance(accelerator, DeepSpeedAccelerator), accelerator._name, accelerator.device_name())
print(accelerator.is_fp64_supported(), accelerator.of_a_later_release())
print(accelerator.visible_devices_envs(), accelerator.Event.__name__)
print(accelerator.default_generator(0) is torch.default_generator)
print(accelerator.pin_memory("host")[0], accelerator.get_rss() > 0)
"""
_SEEN = [
    "True cpu cpu",
    "True a default that ours does not have",
    "['CUDA_VISIBLE_DEVICES'] HostEvent",
    "True",
    "through DeepSpeed True",
]


@pytest.mark.usefixtures("warm_starts")
def test_the_accelerator_is_set_while_deepspeed_is_imported(folder: Path) -> None:
    register = "import acclimate.compat.deepspeed as d; d.register(); d.register()\n"
    assert printed(folder, register + _USE) == _SEEN


@pytest.mark.usefixtures("warm_starts")
def test_the_accelerator_that_deepspeed_has_can_be_pickled_and_copied(folder: Path) -> None:
    program = """
import acclimate.compat.deepspeed as d; d.register()
import copy, deepspeed, pickle
accelerator = deepspeed.builders.fixed
accelerator.set_compile_backend("eager")
accelerator.setting = 7
for copied in (pickle.loads(pickle.dumps(accelerator)), copy.deepcopy(accelerator)):
    print(copied, copied.setting, copied.get_compile_backend(), copied.device_count() > 0)
"""
    assert printed(folder, program) == ["<AcclimateAccelerator cpu> 7 eager True"] * 2


@pytest.mark.usefixtures("warm_starts")
def test_without_register_nothing_of_deepspeed_changes(folder: Path) -> None:
    program = "import acclimate.compat.deepspeed, deepspeed; print(deepspeed.builders.fixed)"
    assert printed(folder, program) == ["its own"]


@pytest.mark.usefixtures("warm_starts")
def test_register_after_the_import_is_an_error_that_says_what_to_do(folder: Path) -> None:
    done = run(folder, "-c", "import deepspeed, acclimate.compat.deepspeed as d; d.register()")
    assert "ImportOrderError: deepspeed was imported before" in done.stderr
    assert "acclimate run --deepspeed" in done.stderr


@pytest.mark.usefixtures("warm_starts")
def test_a_choice_of_ops_after_the_import_is_an_error_and_the_same_choice_is_not(folder: Path) -> None:
    program = """
import acclimate.compat.deepspeed as d
d.register()
import deepspeed
d.register(ops=False)
d.register(ops=True)
"""
    done = run(folder, "-c", program)
    assert "line 6, in <module>" in done.stderr
    assert "ImportOrderError: deepspeed was imported before" in done.stderr


@pytest.mark.usefixtures("warm_starts")
def test_with_the_variable_set_importing_acclimate_is_enough(folder: Path) -> None:
    program = """
import os
os.environ["ACCLIMATE_DEEPSPEED"] = "1"
import acclimate, deepspeed
print(deepspeed.builders.fixed)
"""
    assert printed(folder, program) == ["<AcclimateAccelerator cpu>"]


@pytest.mark.slow
def test_a_process_that_is_started_later_has_it_too(folder: Path) -> None:
    program = f"""
import subprocess, sys, acclimate.compat.deepspeed as d
d.register(ops=True)
sys.exit(subprocess.run([sys.executable, "-c", {_USE!r}]).returncode)
"""
    assert printed(folder, program) == _SEEN


@pytest.mark.slow  # that of the names starts a script in the same way
def test_acclimate_run_does_it_for_a_script_that_knows_nothing_of_it(folder: Path) -> None:
    (folder / "train.py").write_text("import deepspeed; print(deepspeed.builders.fixed)")
    done = run(folder, "-m", "acclimate", "run", "--deepspeed", "--num_accelerators", "1", "train.py")
    assert done.stdout == "<AcclimateAccelerator cpu>\n", done.stderr


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no huge pages to ask for",
)
@pytest.mark.slow  # torch reads the variable when it is imported
@pytest.mark.parametrize(("set_before", "asked"), [("", True), ("0", False)])
def test_large_host_tensors_ask_for_huge_pages_unless_the_user_said_otherwise(
    set_before: str, asked: bool, folder: Path
) -> None:
    program = f"""
import os
if {set_before!r}:
    os.environ["THP_MEM_ALLOC_ENABLE"] = {set_before!r}
import acclimate.compat.deepspeed as d
d.register()
import torch
tensor = torch.empty(32 << 20)
with open("/proc/self/smaps") as file:
    for line in file:
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
        elif first == "VmFlags:" and begin <= tensor.data_ptr() < end:
            print("hg" in rest.split())
"""
    assert printed(folder, program) == [str(asked)]


@pytest.mark.usefixtures("warm_starts")
def test_an_impossible_value_of_the_variable_is_an_error(folder: Path) -> None:
    program = (
        "import os, acclimate.compat.deepspeed as d; os.environ['ACCLIMATE_DEEPSPEED'] = 'yes'; d.start()"
    )
    assert 'must be 0, 1 or names. Value "yes" is not supported.' in run(folder, "-c", program).stderr


@pytest.mark.usefixtures("warm_starts")
def test_the_two_options_contradict_each_other(folder: Path) -> None:
    done = run(folder, "-m", "acclimate", "run", "--deepspeed", "--deepspeed_names", "train.py")
    assert done.returncode != 0
    assert "give only one of them" in done.stderr


_OF_OTHER_RELEASES = """
    @abc.abstractmethod
    def a_name_of_2030(self, value): ...

    @property
    @abc.abstractmethod
    def a_property_of_2030(self): ...

    @abc.abstractmethod
    def _a_hook_of_2030(self): ...

    @abc.abstractmethod
    def is_pinned(self, tensor): ...

    @abc.abstractmethod
    def pin_memory(self, tensor, align_bytes=1): ...
"""


@pytest.mark.usefixtures("warm_starts")
def test_a_name_that_only_another_release_has_raises_when_it_is_used_and_says_which(folder: Path) -> None:
    with (folder / "deepspeed" / "accelerator" / "abstract_accelerator.py").open("a") as file:
        file.write(_OF_OTHER_RELEASES)
    program = """
import acclimate.compat.deepspeed as d; d.register()
import deepspeed, torch
from acclimate.errors import UnsupportedError
accelerator = deepspeed.builders.fixed
for use in (lambda: accelerator.a_name_of_2030(3), lambda: accelerator.a_property_of_2030,
            lambda: accelerator._a_hook_of_2030()):
    try:
        use()
    except UnsupportedError as error:
        print(str(error).partition(" of its")[0])
data = torch.arange(5)
print(accelerator.is_pinned(data), torch.equal(accelerator.pin_memory(data, 0), data),
      torch.equal(accelerator.pin_memory(data, align_bytes=0), data))
"""
    assert printed(folder, program) == [
        "This release of DeepSpeed uses a_name_of_2030",
        "This release of DeepSpeed uses a_property_of_2030",
        "This release of DeepSpeed uses _a_hook_of_2030",
        "False True True",
    ]
