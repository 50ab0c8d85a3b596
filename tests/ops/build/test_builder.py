"""load() gives the op's module on native code: built once, found again, and rebuilt when anything changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from building import COMPILER, Workshop, python_environment

from quick_parameters import quick

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")

LOAD_TINY = "from tiny_op import builder\nbuilder.TinyBuilder().load()\ntell(answers=builder.answers)"
LOAD_SCALE = """
import torch
from acclimate import get_accelerator
module = get_accelerator().create_op_builder("ScaleBuilder").load()
result = module.scale(torch.arange(5.0)).tolist()
tell(result=result, plain=len(module.plain_calls))
"""
ACME = {"ACCLIMATE_ACCELERATOR": "acme"}


def test_an_op_that_was_built_is_not_built_again_in_another_process(workshop: Workshop) -> None:
    assert workshop.run(LOAD_TINY).told == {"answers": [42]}
    assert len(workshop.compiled()) == 2  # its two sources
    assert workshop.run(LOAD_TINY).told == {"answers": [42]}
    assert len(workshop.compiled()) == 2


def test_a_command_says_that_it_compiles_an_op_and_nothing_once_it_is_built(workshop: Workshop) -> None:
    code = "from acclimate.llm.commands.request import messages\nwith messages():\n"
    code += "".join(f"    {line}\n" for line in LOAD_TINY.strip().splitlines())
    first, second = (workshop.run(code).stderr for _ in range(2))
    assert 'acclimate: compiling the op "tiny" (2 files); this happens once\n' in first
    assert "compiling" not in second


def test_a_command_shows_each_step_of_the_compilers(workshop: Workshop) -> None:
    code = "from acclimate.llm.commands.request import messages\nwith messages():\n"
    code += "".join(f"    {line}\n" for line in LOAD_TINY.strip().splitlines())
    steps = re.findall(r"^acclimate: compiled (\d of \d): ", workshop.run(code).stderr, re.MULTILINE)
    assert steps == ["1 of 3", "2 of 3", "3 of 3"]


def test_the_time_for_building_is_counted_by_all_who_watch_and_only_when_something_is_built(
    workshop: Workshop,
) -> None:
    code = (
        "from acclimate.ops.build.compile import watch_builds\n"
        "with watch_builds() as outer, watch_builds() as inner:\n"
        + "".join(f"    {line}\n" for line in LOAD_TINY.strip().splitlines())
        + "tell(outer=outer.seconds, inner=inner.seconds)"
    )
    first, second = (workshop.run(code).told for _ in range(2))
    assert first["outer"] == first["inner"] > 0
    assert second["outer"] == second["inner"] == 0


def test_a_second_load_in_one_process_opens_nothing(workshop: Workshop) -> None:
    outcome = workshop.run(LOAD_TINY + "\ntell(same=builder.TinyBuilder().load() is builder)")
    assert outcome.told == {"answers": [42], "same": True}


@pytest.mark.parametrize("state", ["to be built", "built"])
def test_a_load_asks_the_accelerator_for_its_compiler_once(state: str, workshop: Workshop) -> None:
    if state == "built":
        workshop.run(LOAD_TINY)
    outcome = workshop.run("""
from acclimate.backends.cpu import CPUAccelerator
from tiny_op import builder

class Counting(CPUAccelerator):
    asked = 0
    def op_compiler(self, suffix=".cpp"):
        self.asked += 1
        return super().op_compiler(suffix)

accelerator = Counting()
builder.TinyBuilder.for_accelerator(accelerator).load()
tell(asked=accelerator.asked, answers=builder.answers)
""")
    assert outcome.told == {"asked": 1, "answers": [42]}


def test_flags_of_one_source_are_given_to_that_source_only(workshop: Workshop) -> None:
    workshop.run(LOAD_TINY)
    flagged = {
        command.split(" -c ")[1].split()[0]: "-DTINY_FLAG=7" in command for command in workshop.compiled()
    }
    assert {Path(name).name: has_flag for name, has_flag in flagged.items()} == {
        "tiny.cpp": False,
        "flagged.cpp": True,
    }


def write(path: Path, text: str, *, later_s: int) -> None:
    """Writes a file as if so many seconds had passed: Python takes its bytecode of a module of the same size
    and second for current."""
    path.write_text(text)
    now = path.stat().st_mtime
    os.utime(path, (now, now + later_s))


@pytest.mark.parametrize("change", ["source", "header", "flag", "compiler"])
def test_a_change_of(change: str, workshop: Workshop) -> None:
    """A change of any of these rebuilds the op, and going back finds the first library again."""
    workshop.run(LOAD_TINY)
    changed, old, new = {
        "source": (workshop.tiny / "tiny.cpp", "- 7", "- 6"),
        "header": (workshop.tiny / "answer.h", "42", "43"),
        "flag": (workshop.tiny.parent / "builder.py", "TINY_FLAG=7", "TINY_FLAG=8"),
        "compiler": (
            workshop.folder / "watched-c++",
            "exec ",
            'case "$1" in --version) echo new;; esac\nexec ',
        ),
    }[change]
    before = changed.read_text()
    write(changed, before.replace(old, new), later_s=2)
    answer = 42 if change == "compiler" else 43
    assert workshop.run(LOAD_TINY).told == {"answers": [answer]}
    assert len(workshop.libraries()) == 2
    write(changed, before, later_s=4)
    assert workshop.run(LOAD_TINY).told == {"answers": [42]}
    assert len(workshop.compiled()) == 4


def test_a_file_that_no_source_includes_changes_nothing(workshop: Workshop) -> None:
    workshop.run(LOAD_TINY)
    (workshop.tiny / "unused.h").write_text("#define UNUSED\n")
    workshop.run(LOAD_TINY)
    assert len(workshop.compiled()) == 2


def test_an_op_rebuilt_under_a_new_key_is_loaded_into_the_same_process(workshop: Workshop) -> None:
    outcome = workshop.run(
        LOAD_SCALE
        + """
from pathlib import Path
source = Path(module.__file__).parent / "csrc" / "scale.cpp"
source.write_text(source.read_text().replace("ACME_FACTOR", "(1 + ACME_FACTOR)"))
get_accelerator().create_op_builder("ScaleBuilder").load()
tell(rebuilt=module.scale(torch.arange(5.0)).tolist(), plain=len(module.plain_calls))
""",
        env=ACME,
    )
    assert outcome.told == {"result": [0, 3, 6, 9, 12], "rebuilt": [0, 4, 8, 12, 16], "plain": 0}


def test_another_accelerator_never_gets_the_old_module(workshop: Workshop) -> None:
    outcome = workshop.run("""
from acclimate.backends.cpu import CPUAccelerator
from tiny_op import builder

class Other(CPUAccelerator):
    name = "other"
    def op_compile_flags(self, suffix=".cpp", portable=False):
        return [*super().op_compile_flags(suffix, portable), "-DOTHER"]

for accelerator in (CPUAccelerator(), Other(), CPUAccelerator()):
    builder.TinyBuilder.for_accelerator(accelerator).load()
tell(answers=builder.answers)
""")
    assert outcome.told == {"answers": [42, 42]}
    assert len(workshop.libraries()) == 2


def test_a_compile_error_has_the_compilers_message_the_command_and_the_place_of_the_log(
    workshop: Workshop,
) -> None:
    (workshop.tiny / "tiny.cpp").write_text("int answer( { return 42; }\n")
    outcome = workshop.run(f"""
from acclimate.errors import OpBuildError
try:
    exec({LOAD_TINY!r})
except OpBuildError as error:
    tell(message=str(error))
""")
    message = outcome.told["message"]
    assert message.startswith(
        'The op "tiny" was not built: csrc/tiny.cpp failed: the compiler ended with exit code 1.'
    )
    assert re.search(r"tiny\.cpp:1:\d+: error: ", message)
    assert re.search(rf"^Command: {workshop.folder}/watched-c\+\+ .*tiny\.cpp", message, re.MULTILINE)
    log = Path(message.rpartition("Log: ")[2])
    assert "error: " in log.read_text()
    assert not workshop.leftovers()


def test_a_source_that_does_not_exist_is_named_with_where_it_was_looked_for(workshop: Workshop) -> None:
    (workshop.tiny / "flagged.cpp").unlink()
    outcome = workshop.run(f"""
from acclimate.errors import OpBuildError
try:
    exec({LOAD_TINY!r})
except OpBuildError as error:
    tell(message=str(error))
""")
    folder = workshop.tiny.parent
    assert f"needs csrc/flagged.cpp, but there is none in {folder}" in outcome.told["message"]


# -- no compiler -------------------------------------------------------------------------------------


def test_without_a_compiler_the_op_runs_on_plain_torch_and_says_so_once(workshop: Workshop) -> None:
    again = "\nget_accelerator().create_op_builder('ScaleBuilder').load()"
    outcome = workshop.run(LOAD_SCALE + again, env=ACME | workshop.without_compiler)
    assert outcome.told == {"result": [0, 3, 6, 9, 12], "plain": 1}
    assert outcome.stderr.count("runs on plain torch") == 1
    assert "there is no C++ compiler: none of c++, g++, clang++ is on PATH" in outcome.stderr


def test_without_a_compiler_a_library_that_was_built_before_is_used(workshop: Workshop) -> None:
    assert workshop.run(LOAD_SCALE, env=ACME).told["plain"] == 0
    outcome = workshop.run(LOAD_SCALE, env=ACME | workshop.without_compiler)
    assert outcome.told == {"result": [0, 3, 6, 9, 12], "plain": 0}
    assert "plain torch" not in outcome.stderr


def test_cxx_that_is_no_program_is_named(workshop: Workshop) -> None:
    code = "from tiny_op.builder import TinyBuilder\ntell(why=TinyBuilder().incompatibility())"
    outcome = workshop.run(code, env={"CXX": "gxx --fast"})
    assert outcome.told["why"].startswith('CXX is "gxx --fast", but there is no such program on PATH.')


# -- a cache that is damaged or cannot be written -------------------------------------------------


@pytest.mark.parametrize("damage", quick(("truncated", "empty", "changed", "removed"), "changed", "removed"))
def test_a_library_in_the_cache_is_rebuilt_when(damage: str, workshop: Workshop) -> None:
    workshop.run(LOAD_TINY)
    (library,) = workshop.libraries()
    content = library.read_bytes()
    damaged = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "changed": content[:-1] + bytes([content[-1] ^ 1]),
    }
    if damage == "removed":
        library.unlink()
    else:
        library.write_bytes(damaged[damage])
    assert workshop.run(LOAD_TINY).told == {"answers": [42]}
    assert library.read_bytes() == content
    assert len(workshop.compiled()) == 4


# A file system of this process's own, on which nobody else's files are.
MOUNT = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_USER, PRIVATE, READ_ONLY = 0x20000, 0x10000000, 0x44000, 1
def mount(folder, options, flags=0):
    os.makedirs(folder, exist_ok=True)
    return libc.mount(b"none", folder.encode(), b"tmpfs", flags, options.encode()) == 0
allowed = libc.unshare(NEW_MOUNTS) == 0 or libc.unshare(NEW_MOUNTS | NEW_USER) == 0
allowed = allowed and libc.mount(b"none", b"/", None, PRIVATE, None) == 0
"""
TWO_OPS = f"""
if allowed:
    {LOAD_TINY.replace(chr(10), chr(10) + "    ")}
    tell(cached=os.listdir(CACHE))
    class Second(builder.TinyBuilder):
        name = "second"
    Second().load()
    tell(answers=builder.answers)
else:
    tell(refused=True)
"""


@pytest.mark.parametrize(("state", "options", "flags"), [("read-only", "", 1), ("full", "size=4k", 0)])
def test_where_the_cache_is(state: str, options: str, flags: int, workshop: Workshop, tmp_path: Path) -> None:
    """Read-only or full: the process builds in a folder of its own, warns once, and leaves nothing."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = (
        f"{MOUNT}\nCACHE = {str(workshop.cache)!r}\nallowed = allowed and mount(CACHE, {options!r}, {flags})"
    )
    end = "\nimport atexit; atexit._run_exitfuncs()  # a run ends without them"
    outcome = workshop.run(code + TWO_OPS + end, env={"TMPDIR": str(temporary)})
    if "refused" in outcome.told:
        pytest.skip("this system refuses a mount namespace")
    assert outcome.told["answers"] == [42, 42]
    assert outcome.stderr.count("cannot be written") == 1
    assert "Set ACCLIMATE_CACHE" in outcome.stderr
    assert not list(temporary.iterdir())


def test_a_read_only_cache_with_the_library_in_it_is_used_without_a_word(workshop: Workshop) -> None:
    workshop.run(LOAD_TINY)
    remount = f"""
CACHE, BIND, REMOUNT = {str(workshop.cache)!r}.encode(), 0x1000, 0x20
allowed = allowed and libc.mount(CACHE, CACHE, None, BIND, None) == 0
allowed = allowed and libc.mount(b"none", CACHE, None, BIND | REMOUNT | READ_ONLY, None) == 0
"""
    outcome = workshop.run(f"{MOUNT}{remount}\nif allowed: exec({LOAD_TINY!r})\nelse: tell(refused=True)")
    if "refused" in outcome.told:
        pytest.skip("this system refuses a mount namespace")
    assert outcome.told == {"answers": [42]}
    assert len(workshop.compiled()) == 2
    assert "cannot be written" not in outcome.stderr


def test_a_cache_and_a_compiler_given_by_relative_paths_are_found_from_anywhere(workshop: Workshop) -> None:
    env = {"ACCLIMATE_CACHE": "cache", "CXX": "./watched-c++"}
    outcome = workshop.run(f"import os\nos.chdir({str(workshop.folder)!r})\n{LOAD_TINY}", env=env)
    assert outcome.told == {"answers": [42]}
    assert len(workshop.libraries()) == 1


# -- where libraries come from -----------------------------------------------------------------------


def test_an_extensions_op_builds_from_its_own_folder_with_its_accelerators_flags(workshop: Workshop) -> None:
    outcome = workshop.run(LOAD_SCALE, env=ACME)
    assert outcome.told == {"result": [0, 3, 6, 9, 12], "plain": 0}
    (command,) = workshop.compiled()
    assert "-DACME_FACTOR=3" in command
    assert str(workshop.folder / "acme" / "acme" / "ops" / "csrc" / "scale.cpp") in command


def test_a_library_built_ahead_into_the_package_needs_neither_compiler_nor_cache(workshop: Workshop) -> None:
    workshop.run(
        f"""
import os, setuptools
from acclimate import get_accelerator
accelerator = get_accelerator()
setuptools.setup(
    name="acme",
    ext_modules=[accelerator.create_op_builder("ScaleBuilder").builder()],
    cmdclass={{"build_ext": accelerator.build_extension()}},
    script_args=["-q", "build_ext", "--build-lib", {str(workshop.folder / "acme")!r}],
)
""",
        env=ACME,
    )
    assert list((workshop.folder / "acme" / "acme" / "ops").glob("acme_scale_*.so"))
    shutil.rmtree(workshop.cache)
    outcome = workshop.run(LOAD_SCALE, env=ACME | workshop.without_compiler)
    assert outcome.told == {"result": [0, 3, 6, 9, 12], "plain": 0}
    assert not workshop.libraries()


def test_a_library_built_ahead_is_not_used_once_the_source_changed(workshop: Workshop) -> None:
    folder = workshop.folder / "acme" / "acme" / "ops"
    workshop.run(LOAD_SCALE, env=ACME)
    (library,) = workshop.libraries()
    shutil.copy(library, folder / f"acme_scale_{library.parent.name.partition('-')[0]}.so")
    source = folder / "csrc" / "scale.cpp"
    source.write_text(source.read_text().replace("ACME_FACTOR", "(1 + ACME_FACTOR)"))
    assert workshop.run(LOAD_SCALE, env=ACME).told["result"] == [0, 4, 8, 12, 16]


def test_a_subclass_in_another_folder_shares_the_library(workshop: Workshop) -> None:
    outcome = workshop.run("""
import pathlib, sys
folder = pathlib.Path("elsewhere").absolute()
folder.mkdir()
(folder / "own_builder.py").write_text(
    "from tiny_op.builder import TinyBuilder\\nclass OwnBuilder(TinyBuilder): pass\\n"
)
sys.path.insert(0, str(folder))
from own_builder import OwnBuilder
from tiny_op.builder import TinyBuilder
tell(keys=[kind().recipe().source_key for kind in (OwnBuilder, TinyBuilder)])
""")
    own, inherited = outcome.told["keys"]
    assert own == inherited


def test_two_torch_versions_share_a_library_of_the_stable_abi_and_no_other(workshop: Workshop) -> None:
    outcome = workshop.run("""
import torch
from tiny_op.builder import TinyBuilder

class OfThisTorch(TinyBuilder):
    stable_abi = False

def keys():
    return [kind().recipe().source_key for kind in (TinyBuilder, OfThisTorch)]

here = keys()
torch.__version__ = "2.99.0"
tell(here=here, there=keys())
""")
    here, there = outcome.told["here"], outcome.told["there"]
    assert here[0] == there[0]
    assert here[1] != there[1]


def test_a_library_built_with_one_torch_runs_with_another(workshop: Workshop) -> None:
    other = os.environ.get("ACCLIMATE_OTHER_TORCH_PYTHON")
    if not other:
        pytest.skip("ACCLIMATE_OTHER_TORCH_PYTHON names no Python with another torch (2.10 or later)")
    assert workshop.run(LOAD_SCALE, env=ACME).told["plain"] == 0
    tell = "def tell(**values): print(values)\n"
    run = subprocess.run(
        [other, "-c", tell + LOAD_SCALE],
        env=python_environment(workshop) | ACME,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "{'result': [0.0, 3.0, 6.0, 9.0, 12.0], 'plain': 0}\n", run.stderr
    assert len(workshop.compiled()) == 1


def test_loading_a_cached_op_takes_less_than_50_ms_of_a_fresh_process(workshop: Workshop) -> None:
    # The processor's time, as the machine may be busy; what is waited for besides is a few small files.
    timed = f"""
import time
from acclimate import get_accelerator
get_accelerator()
start = time.process_time()
{LOAD_TINY}
tell(seconds=time.process_time() - start)
"""
    env = {"CXX": str(COMPILER)}
    workshop.run(timed, env=env)
    # One time of ten is enough: other work on the same core costs the caches, and so processor time.
    assert any(workshop.run(timed, env=env).told["seconds"] < 0.05 for _ in range(10))


@pytest.mark.slow  # torch's headers take half a minute to compile
@pytest.mark.slow
def test_source_that_includes_all_of_torch_becomes_a_python_module(workshop: Workshop) -> None:
    (workshop.folder / "whole.py").write_text("""
import sys
from acclimate.ops import OpBuilder

class WholeBuilder(OpBuilder):
    name = "whole"
    stable_abi = False

    def sources(self):
        return ["whole.cpp"]

    def open_library(self, path):
        self.native = self.import_library(path)

    def module(self):
        return self.native
""")
    (workshop.folder / "whole.cpp").write_text("""
#include <torch/extension.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", [](at::Tensor x) { return x * 2; }); }
""")
    outcome = workshop.fresh.check(
        "import torch, whole\ntell(result=whole.WholeBuilder().load().twice(torch.arange(3.0)).tolist())",
        path=[workshop.folder],
        env=workshop.env,
        timeout_s=280,
    )
    assert outcome.told == {"result": [0, 2, 4]}
