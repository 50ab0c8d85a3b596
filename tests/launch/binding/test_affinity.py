"""Promises of a binding, kept by real processes that bind themselves and execute."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from acclimate.host.topology import format_cpu_list, read_topology
from acclimate.launch.binding import cores
from acclimate.launch.binding.cores import RankBinding, apply_binding, bind_ranks

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="binding is by system calls of Linux"
)

SRC = Path(cores.__file__).parents[3]

# Binds itself, then becomes another program, which tells how it is bound.
BOUND = """
import json, os, sys
from acclimate.launch.binding.cores import RankBinding
from acclimate.launch.binding.cores import apply_binding
{before}
warning = apply_binding(RankBinding({binding}))
tell = '''
import json, os, re, sys
try:
    with open("/proc/self/numa_maps") as maps:
        policies = sorted({{line.split()[1] for line in maps}})
except FileNotFoundError:
    policies = None
print(json.dumps([sys.argv[1], sorted(os.sched_getaffinity(0)), policies]))
'''
os.execv(sys.executable, [sys.executable, "-I", "-c", tell, warning or ""])
"""

# A filter as containers have: the system calls given fail with the error given.
FILTER = """
import ctypes
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jumps", ctypes.c_uint8 * 2), ("k", ctypes.c_uint32)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction))]
code = [(0x20, (0, 0), 0)]
for call in {calls}:
    code += [(0x15, (0, 1), call), (0x06, (0, 0), 0x00050000 | {error})]
code.append((0x06, (0, 0), 0x7FFF0000))
listed = (Instruction * len(code))(*(Instruction(*each) for each in code))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(len(code), listed)), 0, 0):
    os._exit(77)
"""
SET_AFFINITY = {"x86_64": 203, "aarch64": 122}.get(platform.machine())
SET_MEMPOLICY = cores._CALL_NUMBER


def bound(binding: RankBinding, before: str = "") -> tuple[str, list[int], list[str]]:
    """What a process bound so sees of itself: the warning, its processors, its memory policies."""
    fields = (binding.cpus, binding.cores, binding.memory_nodes, binding.preferred_memory_node)
    code = BOUND.format(before=before, binding=", ".join(map(repr, fields)))
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode == 77:
        pytest.skip("this kernel lets no process filter its own system calls (seccomp)")
    assert ended.returncode == 0, ended.stderr
    warning, cpus, policies = json.loads(ended.stdout)
    if policies is None:
        pytest.skip("this kernel has no memory policies (/proc/self/numa_maps)")
    return warning, cpus, policies


def refusing(calls: list[int | None], error: int) -> str:
    if None in calls:
        pytest.skip(f"the numbers of the system calls of {platform.machine()} are not known to this test")
    return FILTER.format(calls=calls, error=error)


@pytest.fixture(scope="module")
def policies_work() -> None:
    """This machine lets a process set its memory policy; some containers do not."""
    warning, *_ = bound(RankBinding(tuple(os.sched_getaffinity(0)), 1, allowed_nodes(), None))
    if warning:
        pytest.skip(f"memory cannot be bound here: {warning}")


def allowed_nodes() -> tuple[int, ...]:
    topology = read_topology()
    return tuple(
        node.index
        for node in topology.nodes
        if node.memory_bytes and node.index in topology.allowed_memory_nodes
    )


@pytest.mark.usefixtures("policies_work")
def test_a_rank_runs_on_its_cpus_with_memory_of_its_nodes_through_exec() -> None:
    for binding in bind_ranks(read_topology(), len(read_topology().usable_cores())):
        expected = [f"bind:{format_cpu_list(binding.memory_nodes)}"] if binding.memory_nodes else ["default"]
        assert bound(binding) == ("", list(binding.cpus), expected)


@pytest.mark.usefixtures("policies_work")
def test_a_fast_node_is_preferred_and_not_bound_to() -> None:
    cpu, node = min(os.sched_getaffinity(0)), allowed_nodes()[0]
    assert bound(RankBinding((cpu,), 1, (), node)) == ("", [cpu], [f"prefer:{node}"])


@pytest.mark.usefixtures("policies_work")
def test_the_policy_is_left_alone_where_there_is_nothing_to_bind_to() -> None:
    cpu = max(os.sched_getaffinity(0))
    assert bound(RankBinding((cpu,), 1, (), None)) == ("", [cpu], ["default"])


@pytest.mark.usefixtures("policies_work")
@pytest.mark.parametrize("absent", [63, 64, 1000])
def test_high_node_numbers_reach_the_kernel(absent: int) -> None:
    # The kernel passes over nodes that are not there, as long as one is, but refuses a mask it cannot read.
    cpu, node = max(os.sched_getaffinity(0)), allowed_nodes()[0]
    assert bound(RankBinding((cpu,), 1, (node, absent), None)) == ("", [cpu], [f"bind:{node}"])


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_container_that_refuses_policies_gets_cores_bound_and_one_sentence(error: int) -> None:
    cpu = max(os.sched_getaffinity(0))
    before = refusing([SET_MEMPOLICY], error)
    warning, cpus, policies = bound(RankBinding((cpu,), 1, allowed_nodes(), None), before)
    assert (cpus, policies) == ([cpu], ["default"])
    assert warning.startswith(
        f"memory is not bound to memory nodes: set_mempolicy is refused ({os.strerror(error)})"
    )
    assert ("CAP_SYS_NICE" in warning) == (error == errno.EPERM)


def test_a_container_that_refuses_everything_lets_ranks_run_unbound() -> None:
    before = refusing([SET_AFFINITY, SET_MEMPOLICY], errno.EPERM)
    cpu = max(os.sched_getaffinity(0))
    warning, cpus, policies = bound(RankBinding((cpu,), 1, allowed_nodes(), None), before)
    assert (set(cpus), policies) == (os.sched_getaffinity(0), ["default"])
    assert "ranks are not bound to cores: sched_setaffinity is refused (Operation not permitted)" in warning
    assert "memory is not bound to memory nodes" in warning


def test_the_sentence_is_the_same_for_every_rank() -> None:
    before = refusing([SET_MEMPOLICY], errno.EPERM)
    cpus = sorted(os.sched_getaffinity(0))
    first, *_ = bound(RankBinding((cpus[0],), 1, allowed_nodes(), None), before)
    last, *_ = bound(RankBinding((cpus[-1],), 1, allowed_nodes()[:1], None), before)
    assert first == last != ""


@pytest.mark.parametrize("cpus", [(), (4095,), (-1,)])
def test_cpus_that_are_not_there_are_a_sentence_and_no_error(cpus: tuple[int, ...]) -> None:
    warning, still, _ = bound(RankBinding(cpus, 1, (), None))
    assert warning.startswith("ranks are not bound to cores: ")
    assert set(still) == os.sched_getaffinity(0)


@pytest.mark.parametrize("nodes", [(4000,), (10**6,)])
def test_memory_nodes_that_are_not_there_are_a_sentence_and_no_error(nodes: tuple[int, ...]) -> None:
    cpu = max(os.sched_getaffinity(0))
    warning, cpus, policies = bound(RankBinding((cpu,), 1, nodes, None))
    assert warning.startswith("memory is not bound to memory nodes: set_mempolicy is refused (")
    assert (cpus, policies) == ([cpu], ["default"])


@pytest.mark.usefixtures("policies_work")
def test_the_last_node_of_a_word_is_not_cut_off() -> None:
    if 63 in allowed_nodes():
        pytest.skip("this machine has a memory node 63")
    # With that bit lost the kernel would see no node at all, which it takes for a wish for the nearest.
    warning, _, policies = bound(RankBinding((max(os.sched_getaffinity(0)),), 1, (), 63))
    assert "set_mempolicy is refused" in warning
    assert policies == ["default"]


def test_a_forked_child_binds_itself_and_not_its_parent() -> None:
    before = os.sched_getaffinity(0)
    cpu = max(before)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        apply_binding(RankBinding((cpu,), 1, (), None))
        os.write(writing, json.dumps(sorted(os.sched_getaffinity(0))).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert json.load(pipe) == [cpu]
    assert os.waitpid(child, 0)[1] == 0
    assert os.sched_getaffinity(0) == before


def test_a_processor_whose_system_calls_are_not_known_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_CALL_NUMBER", None)
    binding = RankBinding(tuple(os.sched_getaffinity(0)), 1, (0,), None)
    assert apply_binding(binding) == (
        "memory is not bound to memory nodes: set_mempolicy is refused"
        f" (not implemented for {platform.machine()})"
    )


def test_a_system_without_affinity_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")  # as on macOS
    warning = apply_binding(RankBinding((0,), 1, (0,), None))
    assert warning is not None
    assert "does not let a process choose its cores" in warning


def test_the_number_of_the_system_call_is_the_kernel_s(tmp_path: Path) -> None:
    header = tmp_path / "number.h"
    header.write_text("#include <asm/unistd.h>\nNUMBER __NR_set_mempolicy\n")
    try:
        ended = subprocess.run(["cc", "-E", "-P", header], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs a C compiler to read the kernel's headers")
    if ended.returncode != 0:
        pytest.skip("needs the kernel's headers (linux-libc-dev)")
    assert f"NUMBER {SET_MEMPOLICY}" in ended.stdout
    assert ctypes.sizeof(ctypes.c_void_p) == 8
