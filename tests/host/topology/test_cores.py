"""Promises of acclimate.host.topology.cores: hardware threads, packages and kinds of cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from this_machine import assert_consistent, needs_linux, run_python

from acclimate.host.topology import (
    format_cpu_list,
    read_topology,
)
from machine_trees import (
    machine,
    write_tree,
)


def test_second_hardware_threads_are_found_four_numbers_away(recorded):
    cores = read_topology(recorded("64fake-4n2s2ca2c2t")).usable_cores(node=0)
    assert [core.cpus for core in cores] == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
        (8, 12),
        (9, 13),
        (10, 14),
        (11, 15),
    ]


def test_packages_of_interleaved_cores_are_told_apart(recorded):
    cores = read_topology(recorded("40intel64-2g2n4c+pcilocality")).cores
    assert [core.package for core in cores[:5]] == [0, 1, 2, 3, 0]


def test_performance_and_efficiency_cores_of_a_gb10_are_told_apart(recorded):
    cores = read_topology(recorded("nvidia-dgx-gb10")).cores
    fast = [core.cpus[0] for core in cores if core.kind == "performance"]
    assert format_cpu_list(fast) == "5-9,15-19"
    assert (cores[0].capacity, cores[19].capacity) == (718, 1024)


def test_cores_of_equal_frequency_are_all_performance_cores(recorded):
    cores = read_topology(recorded("48amd64-4pa2n6c-sparse")).cores
    assert {(core.capacity, core.kind) for core in cores} == {(1700000, "performance")}


def test_without_sys_the_cpus_of_cpuinfo_are_one_node(tmp_path):
    root = write_tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nflags\t: x\n\nprocessor\t: 2\n"})
    assert [node.cpus for node in read_topology(root).nodes] == [(0, 2)]


def test_256_threads_are_128_cores_on_two_nodes(tmp_path):
    siblings = {cpu: f"{cpu % 128},{cpu % 128 + 128}" for cpu in range(256)}
    nodes = {0: ("0-63,128-191", 512), 1: ("64-127,192-255", 512)}
    read = read_topology(write_tree(tmp_path, machine(nodes, ["10 32", "32 10"], siblings)))
    assert [core.cpus for core in read.usable_cores(node=1)] == [(cpu, cpu + 128) for cpu in range(64, 128)]
    assert_consistent(read)


def test_siblings_are_read_from_masks_where_there_are_no_lists(tmp_path):
    files = {"sys/devices/system/cpu/online": "0-1,32-33"}
    for cpu, mask in (
        (0, "00000001,00000001"),
        (1, "00000002,00000002"),
        (32, "1,00000001"),
        (33, "2,00000002"),
    ):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus"] = mask
    assert [core.cpus for core in read_topology(write_tree(tmp_path, files)).cores] == [(0, 32), (1, 33)]


def test_core_ids_make_cores_where_siblings_are_missing_and_repeat_across_nodes(tmp_path):
    files = {k: v for k, v in machine({0: ("0-1", 1), 1: ("2-3", 1)}).items() if "siblings" not in k}
    files |= {f"sys/devices/system/cpu/cpu{cpu}/topology/core_id": "0" for cpu in range(4)}
    assert [core.cpus for core in read_topology(write_tree(tmp_path, files)).cores] == [(0, 1), (2, 3)]


def test_an_offline_sibling_is_no_thread_of_its_core(tmp_path):
    files = machine({0: ("0-3", 4)}, siblings=dict.fromkeys((0, 1), "0-1") | dict.fromkeys((2, 3), "2-3"))
    root = write_tree(tmp_path, files | {"sys/devices/system/cpu/online": "0,2-3"})
    assert [core.cpus for core in read_topology(root).cores] == [(0,), (2, 3)]


def test_efficiency_cores_that_intel_declares_are_told_apart(tmp_path):
    files = machine({0: ("0-5", 16)}, siblings=dict.fromkeys((0, 1), "0-1") | dict.fromkeys((2, 3), "2-3"))
    files |= {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-5"}
    kinds = [(core.cpus, core.kind) for core in read_topology(write_tree(tmp_path, files)).cores]
    performance, efficiency = "performance", "efficiency"
    assert kinds == [((0, 1), performance), ((2, 3), performance), ((4,), efficiency), ((5,), efficiency)]


def test_cores_that_are_not_declared_efficient_are_performance_cores(tmp_path):
    files = machine({0: ("0-3", 16)}) | {"sys/devices/cpu_atom/cpus": "2-3,9"}
    kinds = [core.kind[0] for core in read_topology(write_tree(tmp_path, files)).cores]
    assert kinds == ["p", "p", "e", "e"]


def test_efficiency_cores_are_told_apart_by_frequency_where_nothing_else_is_known(tmp_path):
    khz = {0: 5_400_000, 1: 5_100_000, 2: 3_800_000, 3: 3_800_000}
    files = {f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq": str(f) for cpu, f in khz.items()}
    cores = read_topology(write_tree(tmp_path, machine({0: ("0-3", 16)}) | files)).cores
    assert [core.kind[0] for core in cores] == ["p", "p", "e", "e"]


def kinds(values: Mapping[str, Sequence[int]], tmp_path: Path) -> str:
    """The kinds of 5 cores, an initial each, where each file in their folders has these values."""
    files = machine({0: ("0-4", 16)})
    for name, of_cpu in values.items():
        files |= {f"sys/devices/system/cpu/cpu{cpu}/{name}": str(value) for cpu, value in enumerate(of_cpu)}
    return "".join(core.kind[0] for core in read_topology(write_tree(tmp_path, files)).cores)


LAKEFIELD = {
    "cpufreq/cpuinfo_max_freq": [2_800_000] * 4 + [3_000_000],
    "acpi_cppc/highest_perf": [28] * 4 + [43],
    "acpi_cppc/nominal_perf": [14] * 4 + [20],
}


def test_efficiency_cores_are_told_apart_by_the_firmware_s_scale_where_frequencies_are_alike(tmp_path):
    assert kinds(LAKEFIELD, tmp_path) == "eeeep"


def test_efficiency_cores_are_told_apart_where_the_kernel_s_scale_says_they_are_alike(tmp_path):
    assert kinds({"cpu_capacity": [1024] * 5} | LAKEFIELD, tmp_path) == "eeeep"


def test_the_kernel_s_scale_comes_before_that_of_the_firmware(tmp_path):
    assert kinds(LAKEFIELD | {"cpu_capacity": [1024, 400, 400, 400, 1000]}, tmp_path) == "peeep"


def test_cores_ranked_as_hints_for_the_scheduler_are_of_one_kind(tmp_path):
    # A Ryzen: highest_perf ranks cores that are alike.
    ranked = {"acpi_cppc/highest_perf": [236, 221, 206, 181, 166], "acpi_cppc/nominal_perf": [125] * 5}
    assert kinds(ranked | {"cpufreq/cpuinfo_max_freq": [5_700_000] * 5}, tmp_path) == "ppppp"


def test_a_scale_that_some_cores_lack_is_not_used(tmp_path):
    some = {"acpi_cppc/highest_perf": [20, 20, 20, 43], "cpufreq/cpuinfo_max_freq": [3_000_000] * 5}
    assert kinds(some, tmp_path) == "ppppp"


def cpuinfo(*blocks: Mapping[str, int]) -> dict[str, str]:
    texts = ("".join(f"{name}\t: {value}\n" for name, value in block.items()) for block in blocks)
    return {"proc/cpuinfo": "\n".join(texts)}


def test_cores_and_packages_come_from_cpuinfo_where_sys_is_absent(tmp_path):
    files = cpuinfo(
        *(
            {"processor": cpu, "physical id": cpu % 2, "core id": cpu // 4, "siblings": 4, "cpu cores": 2}
            for cpu in range(8)
        )
    )
    cores = read_topology(write_tree(tmp_path, files)).cores
    assert [(core.cpus, core.package) for core in cores] == [
        ((0, 2), 0),
        ((1, 3), 1),
        ((4, 6), 0),
        ((5, 7), 1),
    ]


@pytest.mark.parametrize(
    ("siblings", "cores"), [(1, [(0,), (1,), (2,), (3,)]), (2, [(0, 1), (2, 3)]), (8, [(0, 1, 2, 3)])]
)
def test_a_core_of_cpuinfo_has_no_more_threads_than_cpuinfo_says(tmp_path, siblings, cores):
    same = {"physical id": 0, "core id": 0, "siblings": siblings, "cpu cores": 1}
    files = cpuinfo(*({"processor": cpu} | same for cpu in range(4)))
    assert [core.cpus for core in read_topology(write_tree(tmp_path, files)).cores] == cores


def test_cpuinfo_may_leave_out_how_many_threads_a_core_has(tmp_path):
    files = cpuinfo(*({"processor": cpu, "physical id": 3, "core id": cpu // 2} for cpu in range(4)))
    cores = read_topology(write_tree(tmp_path, files)).cores
    assert [(core.cpus, core.package) for core in cores] == [((0, 1), 3), ((2, 3), 3)]


def test_sys_comes_before_cpuinfo(tmp_path):
    files = machine({0: ("0-1", 4)}) | cpuinfo(
        *({"processor": cpu, "physical id": 7, "core id": 0} for cpu in range(2))
    )
    cores = read_topology(write_tree(tmp_path, files)).cores
    assert [(core.cpus, core.package) for core in cores] == [((0,), 0), ((1,), 0)]


def test_usable_cores_leave_out_threads_that_are_not_allowed(tmp_path):
    files = machine({0: ("0-3", 4)}, siblings=dict.fromkeys((0, 1), "0-1") | dict.fromkeys((2, 3), "2-3"))
    read = read_topology(write_tree(tmp_path, files), allowed={1, 2, 3})
    assert [core.cpus for core in read.usable_cores()] == [(1,), (2, 3)]


@needs_linux
def test_this_machine_has_the_cores_that_psutil_counts():
    physical = psutil.cpu_count(logical=False)
    if physical is None:
        pytest.skip("psutil cannot tell the physical cores of this machine")
    assert len(read_topology().cores) == physical


@needs_linux
def test_a_child_bound_to_one_cpu_sees_one_usable_core_on_one_node():
    cpu = max(os.sched_getaffinity(0))
    code = (
        "from acclimate.host.topology import *\n"
        "t = read_topology(); print(*t.allowed_cpus, len(t.usable_cores()), usable_node_count())"
    )
    assert run_python(code, lambda: os.sched_setaffinity(0, {cpu})) == [str(cpu), "1", "1"]
