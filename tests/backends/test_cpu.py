"""The CPU accelerator: real figures of this process, in whatever state it is, and the launcher's numbers."""

from __future__ import annotations

import builtins
import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest
import torch

from acclimate.backends import process_memory
from acclimate.backends.cpu import CPUAccelerator
from acclimate.errors import InvalidEnvironmentError
from acclimate.host import topology
from fake_vendors import BREAKAGES, FakeMachine
from fresh_process import FreshProcesses

MIB = 1 << 20
BIG = 64 * MIB
SLACK = 8 * MIB
"""What the interpreter and other threads may take or give back meanwhile."""

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")


@pytest.fixture
def cpu() -> CPUAccelerator:
    return CPUAccelerator()


@pytest.fixture(autouse=True)
def _outside_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(variable, raising=False)


@contextlib.contextmanager
def touched(size: int = BIG) -> Iterator[None]:
    """Memory of this process's own that is really there, and really gone afterwards."""
    with mmap.mmap(-1, size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
        yield


# -- faults of others that are tests here --------------------------------------------------------------


def test_current_device_is_an_int_when_local_rank_is_set(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert type(cpu.current_device()) is int
    assert cpu.current_device() == 3


def test_device_is_a_context_manager(cpu: CPUAccelerator) -> None:
    with cpu.device(0), cpu.device(None), cpu.device("cpu"), cpu.device(7):
        assert cpu.current_device() == 0


def test_a_state_can_be_set_for_device_0(cpu: CPUAccelerator) -> None:
    state = cpu.get_rng_state(0)
    first = torch.rand(4)
    cpu.set_rng_state(state, 0)
    assert torch.equal(torch.rand(4), first)


def test_the_name_of_the_current_device_is_one_that_torch_takes_in_any_rank(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert cpu.current_device_name() == cpu.device_name(3) == cpu.device_name() == "cpu"
    with cpu.device(cpu.current_device()):
        assert (torch.zeros(2, device=cpu.current_device_name()) + 1).sum().item() == 2


# -- devices and the launcher --------------------------------------------------------------------------


def test_outside_a_launcher_devices_are_memory_nodes(cpu: CPUAccelerator) -> None:
    assert cpu.current_device() == 0
    assert cpu.device_count() == topology.usable_node_count() >= 1


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
@pytest.mark.parametrize(("text", "count"), [("1", 1), ("12", 12), (" 4 ", 4), ("007", 7)])
def test_in_a_launched_rank_devices_are_the_ranks_of_this_host(
    cpu: CPUAccelerator, variable: str, text: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert cpu.device_count() == count


def test_local_world_size_counts_before_local_size(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_SIZE", "5")
    assert cpu.device_count() == 2


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE", "LOCAL_RANK"])
def test_an_empty_variable_is_as_none(
    cpu: CPUAccelerator, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "")
    assert cpu.device_count() == topology.usable_node_count()
    assert cpu.current_device() == 0


BAD = ["-1", "1.5", "two", "+1", "0x2", "1 2", "²"]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        *((variable, text) for variable in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "LOCAL_RANK") for text in BAD),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_SIZE", "0"),
    ],
)
def test_a_number_that_no_launcher_gives_is_refused_with_its_name_and_value(
    cpu: CPUAccelerator, variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidEnvironmentError) as caught:
        cpu.current_device() if variable == "LOCAL_RANK" else cpu.device_count()
    assert f'{variable} is "{text}"' in str(caught.value)
    assert "unset it" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_processor_has_a_name_and_the_cores_of_this_process(cpu: CPUAccelerator) -> None:
    properties = cpu.get_device_properties()
    assert properties.name == cpu.get_device_name()
    assert properties.name.strip()
    assert properties.multi_processor_count == len(os.sched_getaffinity(0))


def test_the_host_is_synchronous(cpu: CPUAccelerator) -> None:
    assert cpu.is_synchronized_device()
    assert cpu.use_host_timers()
    assert cpu.resolves_data_dependency()
    assert cpu.handles_memory_backpressure()


# -- dtypes --------------------------------------------------------------------------------------------


def test_float16_is_what_onednn_reports(cpu: CPUAccelerator) -> None:
    assert cpu.is_fp16_supported() == torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert (torch.float16 in cpu.supported_dtypes()) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_without_onednn_float16_is_not_supported(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu.is_fp16_supported() is False


def test_bfloat16_and_float64_are_supported(cpu: CPUAccelerator) -> None:
    assert cpu.supported_dtypes()[:2] == [torch.float32, torch.bfloat16]
    assert cpu.is_fp64_supported()


# -- memory --------------------------------------------------------------------------------------------


def test_allocated_memory_is_the_resident_set(cpu: CPUAccelerator) -> None:
    expected = psutil.Process().memory_info().rss
    for figure in (cpu.get_rss, cpu.memory_allocated, cpu.memory_reserved, cpu.memory_cached):
        assert abs(figure() - expected) < SLACK


def test_memory_grows_when_touched_and_falls_when_freed(cpu: CPUAccelerator) -> None:
    before = cpu.memory_allocated()
    with touched():
        during = cpu.memory_allocated()
    after = cpu.memory_allocated()
    assert during - before > BIG - SLACK
    assert during - after > BIG - SLACK


TENSORS = f"""
import torch
from acclimate.backends.cpu import CPUAccelerator
cpu = CPUAccelerator()
BIG, SLACK = {BIG}, {SLACK}
torch.ones(100_000)  # what torch itself takes for its first tensors
"""
"""Code that makes large tensors starts with this, in a fresh process.

There the C library asks the system for their memory. After other tests it may hold as much already, freed
below memory that is still in use: such a tensor's memory stays with the process when the tensor is freed.
"""


def test_memory_of_a_tensor_counts(fresh: FreshProcesses) -> None:
    fresh.check(f"""{TENSORS}
before = cpu.memory_allocated()
tensor = torch.ones(BIG, dtype=torch.uint8)
with_tensor = cpu.memory_allocated()
del tensor
after = cpu.memory_allocated()
assert with_tensor - before > BIG - SLACK, (before, with_tensor)
assert after - before < SLACK, (before, after)
""")


def test_a_peak_between_two_readings_is_seen(fresh: FreshProcesses) -> None:
    fresh.check(f"""{TENSORS}
cpu.reset_peak_memory_stats()
before = cpu.memory_allocated()
torch.ones(BIG, dtype=torch.uint8)
after = cpu.memory_allocated()
assert cpu.max_memory_allocated() - before > BIG - SLACK, (before, cpu.max_memory_allocated())
assert cpu.max_memory_reserved() - before > BIG - SLACK, (before, cpu.max_memory_reserved())
assert after - before < SLACK, (before, after)
""")


@pytest.mark.parametrize(
    "reset", ["reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"]
)
def test_a_reset_starts_the_peak_anew(cpu: CPUAccelerator, reset: str) -> None:
    with touched():
        high = cpu.max_memory_allocated()
    getattr(cpu, reset)()
    assert high - cpu.max_memory_allocated() > BIG - SLACK


def test_statistics_agree_with_the_figures(cpu: CPUAccelerator) -> None:
    statistics = cpu.memory_stats()
    assert set(statistics) == {
        f"{pool}_bytes.all.{when}" for pool in ("allocated", "reserved") for when in ("current", "peak")
    }
    assert abs(statistics["allocated_bytes.all.current"] - cpu.memory_allocated()) < SLACK
    assert statistics["allocated_bytes.all.peak"] >= statistics["allocated_bytes.all.current"]


def test_total_and_available_memory_are_the_topologys(cpu: CPUAccelerator) -> None:
    assert cpu.total_memory() == topology.total_memory() <= psutil.virtual_memory().total
    assert 0 < cpu.available_memory() <= cpu.total_memory()
    assert cpu.mem_get_info()[1] == cpu.total_memory()


def test_a_limit_of_the_cgroup_is_the_total(cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "total_memory", lambda: 512 * MIB)
    monkeypatch.setattr(topology, "available_memory", lambda: 100 * MIB)
    assert cpu.total_memory() == cpu.get_device_properties().total_memory == 512 * MIB
    assert cpu.available_memory() == 100 * MIB
    assert cpu.mem_get_info() == (100 * MIB, 512 * MIB)


def own_memory_cgroup() -> Path | None:
    """A folder where this process may make a cgroup that limits memory, if there is one."""
    root = Path("/sys/fs/cgroup")
    for folder in (root / "memory", root):
        limit = "memory.limit_in_bytes" if folder.name == "memory" else "memory.max"
        group = folder / f"acclimate-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            return group
        group.rmdir()
    return None


@needs_linux
def test_a_real_cgroups_limit_is_the_total(fresh: FreshProcesses) -> None:
    group = own_memory_cgroup()
    if group is None:
        pytest.skip("this machine lets us make no cgroup")
    limit = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    code = f"""
import os
from pathlib import Path
Path({str(group)!r}, "cgroup.procs").write_text(str(os.getpid()))
from acclimate.backends.cpu import CPUAccelerator
tell(total=CPUAccelerator().total_memory())
"""
    try:
        (group / limit).write_text(str(1536 * MIB))
        assert fresh.check(code).told["total"] == 1536 * MIB
    finally:
        group.rmdir()


# -- memory where the kernel does not help -------------------------------------------------------------


@pytest.fixture
def _own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this process's own peak alone."""
    monkeypatch.setattr(process_memory, "_sampled", process_memory._Sampled())
    monkeypatch.setattr(process_memory, "_statm", process_memory._Statm())
    monkeypatch.setattr(process_memory, "_kernel_peak_is_reset", True)


def refuse(monkeypatch: pytest.MonkeyPatch, prefix: str, error: type[OSError]) -> None:
    """Makes the kernel refuse to open files, as a sandbox does."""
    real_open, real_os_open = builtins.open, os.open

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def opens(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(prefix):
                raise error(f"refused: {path}")
            return real(path, *args, **kwargs)

        return opens

    monkeypatch.setattr(builtins, "open", guarded(real_open))
    monkeypatch.setattr(os, "open", guarded(real_os_open))


@pytest.mark.usefixtures("_own_samples")
@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_where_a_reset_is_refused_the_peak_is_the_largest_seen(
    cpu: CPUAccelerator, error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    with touched(2 * BIG):
        cpu.memory_allocated()
    refuse(monkeypatch, "/proc/self/clear_refs", error)
    cpu.reset_peak_memory_stats()
    start = cpu.memory_allocated()
    assert abs(cpu.max_memory_allocated() - start) < SLACK, "the kernel's old peak is shown"
    with touched():
        cpu.memory_allocated()
    assert abs(cpu.max_memory_allocated() - start - BIG) < SLACK
    cpu.reset_peak_memory_stats()
    assert abs(cpu.max_memory_allocated() - start) < SLACK


@pytest.mark.usefixtures("_own_samples")
def test_once_a_reset_is_granted_the_kernels_peak_counts_again(
    cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as refusing:
        refuse(refusing, "/proc/self/clear_refs", PermissionError)
        cpu.reset_peak_memory_stats()
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    with touched():
        pass
    assert cpu.max_memory_allocated() - before > BIG - SLACK


@pytest.mark.usefixtures("_own_samples")
def test_without_proc_psutil_tells(cpu: CPUAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    rss = 100 * MIB

    class Process:
        def memory_info(self) -> Any:
            return type("Info", (), {"rss": rss})

    monkeypatch.setattr(psutil, "Process", Process)
    refuse(monkeypatch, "/proc", FileNotFoundError)
    assert cpu.memory_allocated() == cpu.max_memory_allocated() == 100 * MIB
    rss = 300 * MIB
    cpu.memory_allocated()
    rss = 200 * MIB
    assert (cpu.memory_allocated(), cpu.max_memory_allocated()) == (200 * MIB, 300 * MIB)
    cpu.reset_peak_memory_stats()
    assert cpu.max_memory_allocated() == 200 * MIB


@needs_linux
def test_a_read_only_proc_is_survived(fresh: FreshProcesses) -> None:
    told = fresh.check(
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, RDONLY, REMOUNT, BIND, PRIVATE, REC = 0x20000, 1, 32, 4096, 1 << 18, 16384
mount = lambda *a: libc.mount(*a)
try:
    libc.unshare(NEWNS) == 0 or (_ for _ in ()).throw(OSError)
    mount(b"none", b"/", None, REC | PRIVATE, None)
    done = mount(b"/proc", b"/proc", None, BIND | REC, None) == 0
    done = done and mount(b"none", b"/proc", None, REMOUNT | BIND | RDONLY, None) == 0
except OSError:
    done = False
from acclimate.backends.cpu import CPUAccelerator
cpu = CPUAccelerator()
refused = False
try:
    open("/proc/self/clear_refs", "wb").close()
except OSError:
    refused = True
cpu.reset_peak_memory_stats()
block = bytearray(64 << 20)
now = cpu.memory_allocated()
del block
tell(refused=done and refused, now=now, peak=cpu.max_memory_allocated())
"""
    ).told
    if not told["refused"]:
        pytest.skip("this machine does not let us make /proc read-only")
    assert told["peak"] == told["now"] > 64 * MIB


# -- memory of a process that forks, and of one that closes everything ---------------------------------


def in_a_child(code: str) -> str:
    """Code for a fresh process: it forks, the child runs `code`, the parent checks that it went well."""
    return dedent("""
        import os, mmap
        from acclimate.backends.cpu import CPUAccelerator
        cpu = CPUAccelerator()
        MIB = 1 << 20
        def touch(size):
            memory = mmap.mmap(-1, size)
            for page in range(0, size, mmap.PAGESIZE):
                memory[page] = 1
            return memory
    """) + dedent(code)


def test_a_forked_childs_figures_are_its_own(fresh: FreshProcesses) -> None:
    fresh.check(
        in_a_child("""
            before = cpu.memory_allocated()
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                memory = touch(96 * MIB)
                own = cpu.memory_allocated()
                os.write(writing, str(own).encode())
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            childs = int(os.read(reading, 100))
            assert childs > 96 * MIB, childs
            assert abs(cpu.memory_allocated() - before) < 8 * MIB
        """)
    )


@pytest.mark.parametrize("refused", [True, False])
def test_a_forked_child_does_not_have_its_parents_peak(fresh: FreshProcesses, refused: bool) -> None:
    fresh.check(
        in_a_child(f"""
            from acclimate.backends import process_memory
            memory = touch(96 * MIB)
            high = cpu.max_memory_allocated()
            memory.close()
            process_memory._kernel_peak_is_reset = not {refused}  # as after a reset that was refused
            cpu.memory_allocated()
            child = os.fork()
            if child == 0:
                os._exit(int(high - cpu.max_memory_allocated() < 88 * MIB))
            assert os.waitpid(child, 0)[1] == 0
            assert high - cpu.max_memory_allocated() < 8 * MIB
        """)
    )


def test_closing_all_descriptors_changes_no_figure_and_reads_no_foreign_file(fresh: FreshProcesses) -> None:
    fresh.check(
        in_a_child("""
            from acclimate.backends import process_memory
            before = cpu.memory_allocated()
            number = process_memory._statm._fd
            os.closerange(3, 4096)
            with open("decoy", "w") as decoy:
                decoy.write("1 999999999 1 1 1 1 1")
            held = [os.open("decoy", os.O_RDONLY) for _ in range(number + 1)]
            assert number in held
            assert abs(cpu.memory_allocated() - before) < 8 * MIB
            assert os.pread(number, 2, 0) == b"1 ", "a descriptor of the program's was closed"
            memory = touch(64 * MIB)
            assert cpu.memory_allocated() - before > 56 * MIB
        """)
    )


def test_the_descriptor_does_not_pass_to_other_programs(cpu: CPUAccelerator) -> None:
    cpu.memory_allocated()
    assert not os.get_inheritable(process_memory._statm._fd)


def test_many_readings_hold_one_descriptor(cpu: CPUAccelerator) -> None:
    cpu.memory_allocated()
    before = len(os.listdir("/proc/self/fd"))
    threads = [
        threading.Thread(target=lambda: [cpu.max_memory_allocated() for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


# -- communication -------------------------------------------------------------------------------------

BACKEND = """
from acclimate.backends.cpu import CPUAccelerator
tell(backend=CPUAccelerator().communication_backend_name(), again=CPUAccelerator().communication_backend)
"""


def test_without_oneccls_bindings_gloo_serves(fresh: FreshProcesses, machine: FakeMachine) -> None:
    assert fresh.check(BACKEND, path=machine.path).told["backend"] == "gloo"


def test_with_oneccls_bindings_ccl_serves(fresh: FreshProcesses, machine: FakeMachine) -> None:
    machine.write("oneccl_bindings_for_pytorch", "")
    assert fresh.check(BACKEND, path=machine.path).told == {"backend": "ccl", "again": "ccl"}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_with_oneccls_bindings_broken_gloo_serves(
    fresh: FreshProcesses, machine: FakeMachine, breakage: str
) -> None:
    machine.write("oneccl_bindings_for_pytorch", BREAKAGES[breakage])
    assert fresh.check(BACKEND, path=machine.path).told == {"backend": "gloo", "again": "gloo"}


def test_torch_takes_the_backends_name(fresh: FreshProcesses) -> None:
    fresh.check("""
import torch, torch.distributed as dist
from acclimate.backends.cpu import CPUAccelerator
backend = CPUAccelerator().communication_backend_name()
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
total = torch.ones(2)
dist.all_reduce(total)
assert total.tolist() == [1, 1]
""")


def test_variables_of_oneccl_openmp_and_mpi_go_to_other_hosts(cpu: CPUAccelerator) -> None:
    assert {"CCL_", "OMP_", "KMP_", "I_MPI_"} <= set(cpu.export_envs())


# -- threads -------------------------------------------------------------------------------------------


def test_figures_read_by_many_threads_at_once_are_right(fresh: FreshProcesses) -> None:
    fresh.check(
        in_a_child("""
            import threading
            start = threading.Barrier(8)
            figures = []
            def read():
                start.wait()
                figures.extend(cpu.memory_allocated() for _ in range(200))
            threads = [threading.Thread(target=read) for _ in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert len(figures) == 1600
            assert max(figures) - min(figures) < 8 * MIB, (min(figures), max(figures))
        """)
    )
