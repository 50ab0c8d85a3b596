"""The folders in which a library can be built and loaded, and load() if the cache is not one of them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from building import COMPILER, Workshop, command_line

from quick_parameters import quick

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")

MALLORY = 23457
LOAD = "from tiny_op import builder\nbuilder.TinyBuilder().load()\ntell(answers=builder.answers)"
SCALE = """
import torch
from acclimate import get_accelerator
for _ in range(2):
    module = get_accelerator().create_op_builder("ScaleBuilder").load()
tell(result=module.scale(torch.arange(5.0)).tolist(), plain=len(module.plain_calls))
"""
PLAIN = {"result": [0, 3, 6, 9, 12], "plain": 1}
ACME = {"ACCLIMATE_ACCELERATOR": "acme"}
EVIL = 'extern "C" __attribute__((visibility("default"))) int tiny_answer() { return 666; }\n'


def in_namespace(code: str) -> str:
    """Code that runs where ``mount(folder, flags, options)`` gives a file system of its own."""
    return f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_USER, PRIVATE, NOEXEC = 0x20000, 0x10000000, 0x44000, 8
def mount(folder, flags=0, options="size=16m"):
    os.makedirs(folder, exist_ok=True)
    assert libc.mount(b"none", folder.encode(), b"tmpfs", flags, options.encode()) == 0, ctypes.get_errno()
allowed = libc.unshare(NEW_MOUNTS) == 0 or libc.unshare(NEW_MOUNTS | NEW_USER) == 0
if not (allowed and libc.mount(b"none", b"/", None, PRIVATE, None) == 0):
    tell(refused=True)
    raise SystemExit
{code}
"""


def told(workshop: Workshop, code: str, **env: str) -> tuple[dict[str, object], str]:
    outcome = workshop.run(in_namespace(code), env=env)
    if "refused" in outcome.told:
        pytest.skip("this system refuses a mount namespace")
    return outcome.told, outcome.stderr


# -- other users --------------------------------------------------------------------------------------


def plant(workshop: Workshop) -> Path:
    """Puts another user's library, with a record that fits, where the next load() looks for its own."""
    workshop.run(LOAD)
    (library,) = workshop.libraries()
    source = workshop.folder / "evil.cpp"
    source.write_text(EVIL)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    record = library.with_name("build.json")
    content = library.read_bytes()
    record.write_text(json.dumps({"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}))
    return library


def test_a_planted_library_would_be_loaded_where_nothing_gave_it_away(workshop: Workshop) -> None:
    """So the tests below show that it is the owner and the mode that do."""
    plant(workshop)
    assert workshop.run(LOAD).told == {"answers": [666]}


@as_root
@pytest.mark.parametrize("belonging", quick(("cache", "folder", "library", "record"), "folder", "record"))
def test_code_is_not_loaded_that_another_user_owns(belonging: str, workshop: Workshop) -> None:
    library = plant(workshop)
    paths = {"cache": workshop.cache, "folder": library.parent, "library": library,
             "record": library.with_name("build.json")}  # fmt: skip
    os.chown(paths[belonging], MALLORY, MALLORY)
    outcome = workshop.run(LOAD)
    assert outcome.told == {"answers": [42]}
    assert f'"{paths[belonging]}" belongs to the user with uid {MALLORY}' in outcome.stderr


@pytest.mark.parametrize("opened", quick(("cache", "ops", "op", "folder", "library"), "cache", "library"))
def test_code_is_not_loaded_that_every_user_could_have_put_there(opened: str, workshop: Workshop) -> None:
    library = plant(workshop)
    paths = dict(zip(["library", "folder", "op", "ops", "cache"], [library, *library.parents], strict=False))
    paths[opened].chmod(0o777)
    outcome = workshop.run(LOAD)
    assert outcome.told == {"answers": [42]}
    assert f'"{paths[opened]}" can be changed by every user' in outcome.stderr


def test_a_process_of_multiprocessing_removes_what_it_built_for_itself(workshop: Workshop) -> None:
    workshop.cache.mkdir(parents=True)
    workshop.cache.chmod(0o777)  # so that it is not used
    temporary = workshop.folder / "temporary"
    temporary.mkdir()
    outcome = workshop.run(
        """
import multiprocessing
from tiny_op import builder
child = multiprocessing.get_context("fork").Process(target=builder.TinyBuilder().load)
child.start()
child.join()
tell(code=child.exitcode)
""",
        env={"TMPDIR": str(temporary)},
    )
    assert outcome.told == {"code": 0}
    assert f"compiles ops for itself alone, in {temporary}" in outcome.stderr
    assert list(temporary.glob("acclimate-ops-*")) == []


def test_without_a_compiler_code_from_an_open_cache_is_not_loaded_either(workshop: Workshop) -> None:
    workshop.run(SCALE, env=ACME)
    workshop.cache.chmod(0o777)
    outcome = workshop.run(SCALE, env=ACME | workshop.without_compiler)
    assert outcome.told == PLAIN
    assert outcome.stderr.count(f'"{workshop.cache}" can be changed by every user') == 1


def test_a_link_as_lock_file_is_not_written_through(workshop: Workshop) -> None:
    workshop.run(LOAD)
    (library,) = workshop.libraries()
    (lock,) = library.parents[1].glob(".*.lock")
    precious = workshop.folder / "precious"
    precious.write_text("precious")
    lock.unlink()
    lock.symlink_to(precious)
    library.unlink()
    assert workshop.run(LOAD).told == {"answers": [42]}
    assert precious.read_text() == "precious"


def test_clean_does_not_follow_links_out_of_the_cache(workshop: Workshop) -> None:
    home = workshop.folder / "home"
    (home / "photos").mkdir(parents=True)
    (workshop.cache / "ops").mkdir(parents=True)
    (workshop.cache / "ops/evil").symlink_to(home)
    (workshop.cache / "ops/op").mkdir()
    (workshop.cache / "ops/op/key").symlink_to(home)
    assert workshop.run(command_line("ops", "clean")).told == {"code": 0}
    assert (home / "photos").is_dir()


def test_clean_refuses_a_cache_that_every_user_can_write_to(workshop: Workshop) -> None:
    (workshop.cache / "ops/op/key").mkdir(parents=True)
    workshop.cache.chmod(0o777)
    outcome = workshop.run(command_line("ops", "clean"))
    assert outcome.told == {"code": 2}
    assert "can be changed by every user" in outcome.stderr
    assert (workshop.cache / "ops/op/key").is_dir()


def test_where_temporary_files_are_open_to_all_too_the_op_runs_on_plain_torch(workshop: Workshop) -> None:
    temporary = workshop.folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    workshop.cache.mkdir()
    workshop.cache.chmod(0o777)
    outcome = workshop.run(SCALE, env=ACME | {"TMPDIR": str(temporary)})
    assert outcome.told == PLAIN
    assert "there is no folder to build in" in outcome.stderr


# -- a cache that is no place for libraries ----------------------------------------------------------


def test_on_a_noexec_mount_the_op_runs_on_plain_torch_and_the_reason_is_told_once(workshop: Workshop) -> None:
    told_, stderr = told(workshop, f"mount({str(workshop.cache)!r}, NOEXEC)\n{SCALE}", **ACME)
    assert told_ == PLAIN
    assert stderr.count('mounted "noexec"') == 1
    assert workshop.compiled() == []


def test_a_library_that_was_built_before_on_what_is_now_noexec_is_not_an_error(workshop: Workshop) -> None:
    code = f"""
cache = {str(workshop.cache)!r}.encode()
def run():
    exec({SCALE!r}, {{"tell": tell}})
mount(cache.decode())
if os.fork() == 0:
    run()
    os._exit(0)
assert os.wait()[1] == 0
assert libc.mount(b"none", cache, None, 0x20 | NOEXEC, None) == 0
run()
"""
    told_, stderr = told(workshop, code, **ACME)
    assert told_ == PLAIN
    assert stderr.count('mounted "noexec"') == 1


def test_ops_lists_why_nothing_can_be_loaded_from_a_noexec_mount(workshop: Workshop) -> None:
    code = f"mount({str(workshop.cache)!r}, NOEXEC)\n" + command_line("ops", "--json")
    outcome = workshop.run(in_namespace(code), env=ACME)
    if "refused" in outcome.told:
        pytest.skip("this system refuses a mount namespace")
    (op,) = json.loads(outcome.stdout)["ops"]
    assert (op["state"], 'mounted "noexec"' in op["reason"]) == ("cannot be built", True)


@pytest.mark.parametrize("size", quick(("4k", "64k", "128k"), "4k", "64k"))
def test_a_disk_that_is_full_before_or_while_building_is_told_and_another_is_used(
    size: str, workshop: Workshop, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    code = f"mount({str(workshop.cache)!r}, 0, 'size={size}')\n{LOAD}"
    # Objects of this size do not fit, and libraries neither.
    source = workshop.tiny / "tiny.cpp"
    source.write_text(source.read_text() + "\nchar ballast[300000] = {1};\n")
    told_, stderr = told(workshop, code, TMPDIR=str(tmp_path / "tmp"))
    assert told_ == {"answers": [42]}
    assert "The cache is not used: it cannot be written (No space left on device" in stderr
    assert not list((tmp_path / "tmp").iterdir())


def test_a_file_as_cache_is_named_and_another_place_used(workshop: Workshop, tmp_path: Path) -> None:
    workshop.cache.touch()
    outcome = workshop.run(LOAD, env={"TMPDIR": str(tmp_path)})
    assert outcome.told == {"answers": [42]}
    assert f'"{workshop.cache}" is a file. Set ACCLIMATE_CACHE to a folder' in outcome.stderr
    outcome = workshop.run(command_line("ops", "clean"))
    assert outcome.told == {"code": 2}
    assert "is a file" in outcome.stderr


def test_without_a_home_the_op_is_built_for_this_process_alone(workshop: Workshop, tmp_path: Path) -> None:
    code = f"import os\nfor name in ('ACCLIMATE_CACHE', 'XDG_CACHE_HOME'): os.environ.pop(name, None)\n{LOAD}"
    env = {"HOME": "", "ACCLIMATE_CACHE": "~no-such-user/cache", "TMPDIR": str(tmp_path)}
    outcome = workshop.run(code.replace("'ACCLIMATE_CACHE', ", ""), env=env)
    assert outcome.told == {"answers": [42]}
    assert "Set ACCLIMATE_CACHE to an absolute path" in outcome.stderr


# -- what compilers said ------------------------------------------------------------------------------


DAMAGED = {
    "empty": b"", "list": b"[]", "null": b"null", "number": b"7", "numbers": b'{"a": 7}',
    "truncated": b'{"half": "', "binary": b"\xff\xfe\x00", "deep": b"[" * 100_000, "objects": b'{"a": {}}',
}  # fmt: skip


@pytest.mark.parametrize("content", quick(DAMAGED, "list", "numbers", "truncated", "binary", "deep"))
def test_a_damaged_memory_of_compilers_is_made_anew(content: bytes, workshop: Workshop) -> None:
    memory = workshop.cache / "ops/compilers.json"
    memory.parent.mkdir(parents=True)
    memory.write_bytes(content)
    env = {"CXX": os.path.realpath(str(COMPILER))}  # a script is asked each time
    assert workshop.run(LOAD, env=env).told == {"answers": [42]}
    known = json.loads(memory.read_bytes())
    assert any(key.startswith(os.path.realpath(str(COMPILER))) for key in known)


@pytest.mark.parametrize("plant", ["folder", "fifo", "link"])
def test_something_else_in_place_of_the_memory_is_left_alone(plant: str, workshop: Workshop) -> None:
    memory = workshop.cache / "ops/compilers.json"
    memory.parent.mkdir(parents=True)
    {"folder": memory.mkdir, "fifo": lambda: os.mkfifo(memory),
     "link": lambda: memory.symlink_to("/etc/passwd")}[plant]()  # fmt: skip
    assert workshop.run(LOAD, env={"CXX": os.path.realpath(str(COMPILER))}).told == {"answers": [42]}


# -- compilers that misbehave -------------------------------------------------------------------------


def hanging(workshop: Workshop, when: str) -> str:
    """A compiler that does not end, nor does its child, where one of its arguments is ``when``.

    Until then it writes empty files at once, so that the time limit can be short.
    """
    path = workshop.folder / "hanging-c++"
    path.write_text(
        f'#!/bin/sh\ncase " $* " in *" {when} "*)\n'
        f"  sleep 300 & echo $! $$ > {workshop.folder}/started; sleep 300;;\nesac\n"
        'echo 1\nfor one; do case $before in -o) : > "$one";; esac; before=$one; done\n'
    )
    path.chmod(0o755)
    return str(path)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("when", ["--version", "-c", "-shared"])
def test_a_compiler_that_hangs_is_ended_with_its_children_and_named(when: str, workshop: Workshop) -> None:
    compiler = hanging(workshop, when)
    code = (
        "from acclimate.errors import OpBuildError\nfrom tiny_op.builder import TinyBuilder\n"
        "try: TinyBuilder().load()\nexcept OpBuildError as error: tell(message=str(error))"
    )
    outcome = workshop.run(code, env={"CXX": compiler, "ACCLIMATE_BUILD_TIMEOUT": "1"})
    assert f"{compiler} did not end within" in outcome.told["message"]
    assert "Set ACCLIMATE_BUILD_TIMEOUT to a longer time" in outcome.told["message"]
    pids = [int(pid) for pid in (workshop.folder / "started").read_text().split()]
    deadline = time.monotonic() + 240
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "the compiler or its child runs on"
        time.sleep(0.05)
    assert not workshop.leftovers()


def test_the_first_failure_ends_the_compilers_that_still_run(workshop: Workshop) -> None:
    (workshop.tiny / "flagged.cpp").write_text("#error no\n")
    path = workshop.folder / "slow-c++"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *tiny.cpp*)\n echo $$ > {workshop.folder}/started; sleep 300;;\nesac\n'
        f'case "$*" in *flagged.cpp*)\n until [ -s {workshop.folder}/started ]; do sleep 0.02; done;;\nesac\n'
        f'exec {COMPILER} "$@"\n'
    )
    path.chmod(0o755)
    code = (
        "from acclimate.errors import OpBuildError\nfrom tiny_op.builder import TinyBuilder\n"
        "try: TinyBuilder().load()\nexcept OpBuildError as error: tell(message=str(error))"
    )
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core compiles one source at a time")
    assert "#error no" in workshop.run(code, env={"CXX": str(path)}, timeout_s=100).told["message"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("#!/bin/sh\nexit 3\n", "with --version it ended with exit code 3"),
        ("#!/bin/sh\nkill -9 $$\n", "with --version it was killed by SIGKILL"),
        ("#!/no/such/interpreter\n", "cannot be run"),
        ("\x7fELF not really", "cannot be run"),
        ("", "cannot be run"),
    ],
    ids=["fails", "is killed", "has no interpreter", "is no program", "is empty"],
)
def test_a_compiler_is_named_that(content: str, complaint: str, workshop: Workshop) -> None:
    path = workshop.folder / "broken-c++"
    path.write_text(content)
    path.chmod(0o755)
    code = (
        "from acclimate.errors import AcclimateError\nfrom tiny_op.builder import TinyBuilder\n"
        "try: TinyBuilder().load()\nexcept AcclimateError as error: tell(message=str(error))"
    )
    message = workshop.run(code, env={"CXX": str(path)}).told["message"]
    assert message.startswith(f"The compiler {path} ")
    assert complaint in message


def test_a_compiler_that_writes_no_file_is_named_and_the_cache_not_blamed(workshop: Workshop) -> None:
    path = workshop.folder / "idle-c++"
    path.write_text("#!/bin/sh\necho 1\n")
    path.chmod(0o755)
    code = (
        "from acclimate.errors import OpBuildError\nfrom tiny_op.builder import TinyBuilder\n"
        "try: TinyBuilder().load()\nexcept OpBuildError as error: tell(message=str(error))"
    )
    outcome = workshop.run(code, env={"CXX": str(path)})
    assert "failed: the compiler ended with exit code 0, but wrote no output file" in outcome.told["message"]
    assert str(path) in outcome.told["message"]


@pytest.mark.parametrize("text", ['"g++', "g++ 'x", "g++ \\"])
def test_cxx_with_an_open_quotation_mark_is_named(text: str, workshop: Workshop) -> None:
    code = "from tiny_op.builder import TinyBuilder\ntell(why=TinyBuilder().incompatibility())"
    assert f'CXX is "{text}", which is not a command: ' in workshop.run(code, env={"CXX": text}).told["why"]


def test_what_a_compiler_says_in_any_encoding_is_told_and_logged(workshop: Workshop) -> None:
    path = workshop.folder / "german-c++"
    path.write_bytes(
        b'#!/bin/sh\ncase "$*" in *-c*) printf "Fehler: \\374ber \\303\\274ber\\n"; exit 1;; esac\necho 1\n'
    )
    path.chmod(0o755)
    code = (
        "from acclimate.errors import OpBuildError\nfrom tiny_op.builder import TinyBuilder\n"
        "try: TinyBuilder().load()\nexcept OpBuildError as error: tell(message=str(error))"
    )
    env = {"CXX": str(path), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "Fehler: �ber über" in workshop.run(code, env=env).told["message"]
    (log,) = workshop.cache.glob("ops/tiny/*.log")
    assert "Fehler: �ber über" in log.read_text(encoding="utf-8")


def test_a_deleted_working_directory_is_no_hindrance(workshop: Workshop) -> None:
    gone = workshop.folder / "gone"
    code = f"import os\nfor do in (os.mkdir, os.chdir, os.rmdir): do({str(gone)!r})\n{LOAD}"
    assert workshop.run(code).told == {"answers": [42]}
    assert workshop.run(code, env={"ACCLIMATE_CACHE": "relative"}).told == {"answers": [42]}
