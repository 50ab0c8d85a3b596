"""Promises of acclimate.topology: on recorded machines, on made-up ones, and on this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acclimate import topology
from acclimate.errors import AcclimateError, TopologyError
from acclimate.topology import (
    available_memory,
    cpu_quota,
    fast_memory_near,
    format_cpu_list,
    memory_limit,
    parse_cpu_list,
    read_topology,
    total_memory,
    usable_node_count,
)
from acclimate.topology.control_groups import own_groups
from machine_trees import (
    GIB,
    GRACE_HOPPER,
    GRACE_HOPPER_DISTANCES,
    KNL,
    KNL_CPUINFO,
    MEMINFO,
    V1,
    V2,
    XEON_MAX,
    XEON_MAX_BANDWIDTHS,
    XEON_MAX_DISTANCES,
    access_classes,
    cgroup_files,
    machine,
    write_tree,
)

SRC = Path(topology.__file__).parents[2]
UNLIMITED_V1 = "9223372036854771712"

needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the live /sys and /proc of Linux"
)


# -- recorded machines: the facts below were read from their raw files by hand -------------------


MACHINES = {
    # name: ({node: online cpus}, usable nodes, allowed cpus, allowed memory nodes, cores, threads a core)
    "64amd64-4s2n4ca2co": (
        {n: f"{8 * n}-{8 * n + 7}" for n in range(8)},
        [0, 1, 2, 3, 4, 5, 6, 7],
        "0-63",
        "0-7",
        32,  # 32 compute units of two halves, which share a floating-point unit
        2,
    ),
    "40intel64-2g2n4c+pcilocality": (
        {n: ",".join(str(cpu) for cpu in range(n, 40, 4)) for n in range(4)},
        [0, 1, 2, 3],
        "0-39",
        "0-3",
        40,
        1,
    ),
    "48amd64-4pa2n6c-sparse": (
        {n: f"{6 * i}-{6 * i + 5}" for i, n in enumerate([0, 1, 2, 33, 34, 45, 72, 73])},
        [0, 1, 2, 33, 34, 45, 72, 73],
        "0-47",
        "0-2,33-34,45,72-73",
        48,
        1,
    ),
    "64fake-4n2s2ca2c2t": (
        {n: f"{16 * n}-{16 * n + 15}" for n in range(4)},
        [0, 1, 2, 3],
        "0-63",
        "0-3",
        32,
        2,
    ),
    "fakeheteromemtiers": (
        {0: "0-1", 1: "2-3", 2: "4-5", 4: "", 6: "", 8: "", 9: ""},
        [0, 1, 2],
        "0-5",
        "0-2,4,6,8-9",
        6,
        1,
    ),
    "16amd64-8n2c-cpusets": (
        {0: "0-1", 1: "2-3", 2: "5", 3: "6-7", 4: "8-9", 5: "10-11", 6: "12-13", 7: "14-15"},
        [0, 1, 2, 3, 6, 7],  # the cpuset /dummy holds 0-6,12-15 and core 4 is offline
        "0-3,5-6,12-15",
        "1-4",
        15,
        1,
    ),
    "nvidia-dgx-gb10": ({0: "0-19"}, [0], "0-19", "0", 20, 1),
}


@pytest.mark.parametrize("name", MACHINES)
class TestRecordedMachine:
    def test_has_exactly_the_nodes_and_online_cpus_of_the_real_one(self, recorded, name):
        read = read_topology(recorded(name))
        assert {node.index: format_cpu_list(node.cpus) for node in read.nodes} == {
            n: format_cpu_list(parse_cpu_list(cpus)) for n, cpus in MACHINES[name][0].items()
        }

    def test_counts_only_nodes_with_cpus_this_process_may_use(self, recorded, name):
        assert [node.index for node in read_topology(recorded(name)).usable_nodes] == MACHINES[name][1]

    def test_quick_count_agrees_with_the_full_reading(self, recorded, name):
        assert usable_node_count(recorded(name)) == len(MACHINES[name][1])

    def test_allows_the_cpus_of_its_cpuset(self, recorded, name):
        assert format_cpu_list(read_topology(recorded(name)).allowed_cpus) == MACHINES[name][2]

    def test_allows_the_memory_nodes_of_its_cpuset(self, recorded, name):
        assert format_cpu_list(read_topology(recorded(name)).allowed_memory_nodes) == MACHINES[name][3]

    def test_has_exactly_the_cores_and_threads_of_the_real_one(self, recorded, name):
        cores = read_topology(recorded(name)).cores
        assert (len(cores), {len(core.cpus) for core in cores}) == (MACHINES[name][4], {MACHINES[name][5]})

    def test_puts_every_allowed_cpu_in_exactly_one_usable_core_and_node(self, recorded, name):
        assert_consistent(read_topology(recorded(name)))


def assert_consistent(read: topology.Topology) -> None:
    by_node = [cpu for node in read.usable_nodes for cpu in node.cpus if cpu in read.allowed_cpus]
    assert sorted(by_node) == sorted(read.allowed_cpus)
    by_core = [cpu for core in read.usable_cores() for cpu in core.cpus]
    assert sorted(by_core) == sorted(read.allowed_cpus)
    everywhere = [cpu for node in read.nodes for cpu in node.cpus]
    assert len(everywhere) == len(set(everywhere)), "a CPU is in two nodes"
    for core in read.cores:
        assert set(core.cpus) <= set(read.node(core.node).cpus), "a core reaches outside its node"


def test_memory_of_a_node_is_in_bytes(recorded):
    nodes = read_topology(recorded("40intel64-2g2n4c+pcilocality")).nodes
    assert [node.memory_bytes for node in nodes] == [134204252 * 1024] + [134217728 * 1024] * 3


def test_distances_follow_node_numbers_across_holes(recorded):
    node = read_topology(recorded("48amd64-4pa2n6c-sparse")).node(33)
    assert node.distances == {0: 22, 1: 16, 2: 16, 33: 10, 34: 16, 45: 16, 72: 22, 73: 22}


def test_distances_are_empty_where_the_machine_gives_none(recorded):
    assert read_topology(recorded("64fake-4n2s2ca2c2t")).node(0).distances == {}


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


def test_memory_as_far_as_another_socket_is_not_taken_for_fast_memory(recorded):
    root = recorded("fakeheteromemtiers")
    read = read_topology(root)
    assert [fast_memory_near(read, node.index, root) for node in read.usable_nodes] == [None, None, None]


# -- made-up machines of shapes the recorded ones lack -------------------------------------------


def test_a_machine_without_sys_and_proc_is_one_node_with_every_cpu(tmp_path):
    read = read_topology(tmp_path)
    assert [node.cpus for node in read.nodes] == [tuple(range(os.cpu_count() or 1))]
    assert usable_node_count(tmp_path) == 1


def test_a_machine_without_affinity_calls_is_one_node_with_every_cpu(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(topology.machine, "LIVE", tmp_path)
    assert [node.cpus for node in read_topology(tmp_path).usable_nodes] == [tuple(range(os.cpu_count() or 1))]


def test_without_sys_the_cpus_of_cpuinfo_are_one_node(tmp_path):
    root = write_tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nflags\t: x\n\nprocessor\t: 2\n"})
    assert [node.cpus for node in read_topology(root).nodes] == [(0, 2)]


def test_without_memory_nodes_one_node_has_all_cpus_and_all_memory(tmp_path):
    root = write_tree(tmp_path, {"sys/devices/system/cpu/online": "0-3", "proc/meminfo": MEMINFO})
    (node,) = read_topology(root).nodes
    assert (node.index, node.cpus, node.memory_bytes) == (0, (0, 1, 2, 3), 16 * GIB)
    assert_consistent(read_topology(root))


def test_online_files_of_each_cpu_count_where_the_common_one_is_missing(tmp_path):
    files = machine({0: ("0-3", 4)}) | {"sys/devices/system/cpu/cpu2/online": "0"}
    del files["sys/devices/system/cpu/online"]
    assert read_topology(write_tree(tmp_path, files)).online_cpus == {0, 1, 3}


def test_a_machine_whose_node_0_is_offline_starts_at_node_1(tmp_path):
    root = write_tree(tmp_path, machine({1: ("0-3", 4), 2: ("4-7", 4)}, ["10 21", "21 10"]))
    read = read_topology(root)
    assert [node.index for node in read.usable_nodes] == [1, 2]
    assert read.node(1).distances == {1: 10, 2: 21}
    assert usable_node_count(root) == 2


def test_a_node_folder_that_is_not_online_does_not_count(tmp_path):
    files = machine({0: ("", 0), 1: ("0-3", 4)}) | {"sys/devices/system/node/online": "1"}
    assert [node.index for node in read_topology(write_tree(tmp_path, files)).nodes] == [1]


def test_a_node_with_online_cpus_counts_although_the_list_of_nodes_lacks_it(tmp_path):
    files = machine({0: ("0-3", 4), 33: ("4-7", 4)}) | {"sys/devices/system/node/online": "0-1"}
    root = write_tree(tmp_path, files)
    assert [node.index for node in read_topology(root).usable_nodes] == [0, 33]
    assert usable_node_count(root) == 2


def test_a_node_whose_cpus_are_all_offline_does_not_count(tmp_path):
    files = machine({0: ("0-3", 4), 1: ("4-7", 4)}) | {"sys/devices/system/cpu/online": "4-7"}
    root = write_tree(tmp_path, files)
    assert [node.index for node in read_topology(root).usable_nodes] == [1]
    assert usable_node_count(root) == 1


def test_a_cpu_that_no_node_lists_is_not_lost(tmp_path):
    files = machine({0: ("", 1), 1: ("0-1", 4)}) | {"sys/devices/system/cpu/online": "0-3"}
    read = read_topology(write_tree(tmp_path, files))
    assert read.node(1).cpus == (0, 1, 2, 3)
    assert_consistent(read)


def test_a_cpu_that_two_nodes_list_is_counted_once(tmp_path):
    root = write_tree(tmp_path, machine({0: ("0-3", 4)}) | {"sys/devices/system/node/node1/cpulist": "3-3"})
    (tmp_path / "sys/devices/system/node/online").write_text("0-1")
    assert [node.cpus for node in read_topology(root).nodes] == [(0, 1, 2, 3), ()]
    assert usable_node_count(root) == 1


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


def test_cores_of_cpuinfo_with_more_threads_than_it_says_are_not_believed(tmp_path):
    same = {"physical id": 0, "core id": 0, "siblings": 1, "cpu cores": 1}
    files = cpuinfo(*({"processor": cpu} | same for cpu in range(4)))
    assert [core.cpus for core in read_topology(write_tree(tmp_path, files)).cores] == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]


def test_sys_comes_before_cpuinfo(tmp_path):
    files = machine({0: ("0-1", 4)}) | cpuinfo(
        *({"processor": cpu, "physical id": 7, "core id": 0} for cpu in range(2))
    )
    cores = read_topology(write_tree(tmp_path, files)).cores
    assert [(core.cpus, core.package) for core in cores] == [((0,), 0), ((1,), 0)]


def test_files_that_were_recorded_with_a_nul_at_their_end_are_read(tmp_path):
    root = write_tree(tmp_path, machine({0: ("0-3", 4), 1: ("4-7", 4)}, ["10 21", "21 10"]))
    for path in root.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b"\0")
    read = read_topology(root)
    assert [node.cpus for node in read.nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert read.node(1).distances == {0: 21, 1: 10}


def test_usable_cores_leave_out_threads_that_are_not_allowed(tmp_path):
    files = machine({0: ("0-3", 4)}, siblings=dict.fromkeys((0, 1), "0-1") | dict.fromkeys((2, 3), "2-3"))
    read = read_topology(write_tree(tmp_path, files), allowed={1, 2, 3})
    assert [core.cpus for core in read.usable_cores()] == [(1,), (2, 3)]


def test_an_explicit_allowed_set_keeps_only_online_cpus(tmp_path):
    read = read_topology(write_tree(tmp_path, machine({0: ("0-3", 4), 1: ("4-7", 4)})), allowed=[5, 6, 99])
    assert read.allowed_cpus == {5, 6}
    assert [node.index for node in read.usable_nodes] == [1]


# -- memory without cores ------------------------------------------------------------------------


def fast_memory(root: Path) -> dict[int, int | None]:
    read = read_topology(root)
    assert usable_node_count(root) == len(read.usable_nodes)
    return {node.index: fast_memory_near(read, node.index, root) for node in read.usable_nodes}


def test_hbm_of_each_socket_is_the_fast_memory_of_its_own_cores(tmp_path):
    root = write_tree(tmp_path, machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS)
    assert fast_memory(root) == {0: 2, 1: 3}


@pytest.mark.parametrize(
    ("nodes", "distances"),
    [
        (XEON_MAX, XEON_MAX_DISTANCES),
        ({0: ("0-3", 256), 1: ("4-7", 256), 2: ("", 128)}, ["10 21 14", "21 10 24", "14 24 10"]),  # CXL
        ({0: ("0-3", 256), 1: ("", 128)}, ["10 14", "14 10"]),
        ({0: ("0-3", 96), 1: ("4-7", 96), 2: ("", 1)}, ["10 20 15", "20 10 15", "15 15 10"]),
        ({0: ("0-3", 16), 1: ("", 16)}, ["10 10", "10 10"]),  # numa=fake
        ({0: ("0-3", 16), 1: ("", 16)}, ["10 11", "11 10"]),
    ],
)
def test_size_and_distance_alone_make_no_memory_fast(tmp_path, nodes, distances):
    answers = fast_memory(write_tree(tmp_path, machine(nodes, distances)))
    assert set(answers.values()) == {None}


def test_small_memory_that_lies_equally_far_from_all_nodes_is_not_fast_memory(tmp_path):
    nodes = {n: (f"{8 * n}-{8 * n + 7}", 96) for n in range(16)} | {16: ("", 0.97)}
    rows = [" ".join("10" if n == m else "20" for m in range(16)) + " 15" for n in range(16)]
    tiers = {f"sys/devices/virtual/memory_tiering/memory_tier{4 - n // 16}/nodelist": "" for n in (0, 16)}
    tiers |= dict(zip(tiers, ("0-15", "16"), strict=True))
    files = machine(nodes, [*rows, " ".join(["15"] * 16 + ["10"])])
    assert set(fast_memory(write_tree(tmp_path / "plain", files)).values()) == {None}
    # Even a faster tier does not say whose it is.
    assert set(fast_memory(write_tree(tmp_path / "tiers", files | tiers)).values()) == {None}


def test_mcdram_of_a_xeon_phi_is_fast_memory_despite_its_distance(tmp_path):
    files = machine(KNL, ["10 31", "31 10"])
    assert fast_memory(write_tree(tmp_path / "phi", files | {"proc/cpuinfo": KNL_CPUINFO})) == {0: 1}
    assert fast_memory(write_tree(tmp_path / "other", files)) == {0: None}


def test_a_slice_of_a_xeon_phi_s_normal_memory_is_not_fast_memory(tmp_path):
    files = machine(KNL, ["10 10", "10 10"]) | {"proc/cpuinfo": KNL_CPUINFO}
    assert fast_memory(write_tree(tmp_path, files)) == {0: None}


def test_gpu_memory_of_grace_hopper_is_never_fast_memory(tmp_path):
    files = machine(GRACE_HOPPER, GRACE_HOPPER_DISTANCES)
    assert fast_memory(write_tree(tmp_path, files)) == {0: None}


def test_gpu_memory_is_too_far_to_be_fast_memory_whatever_its_bandwidth(tmp_path):
    files = machine(GRACE_HOPPER, GRACE_HOPPER_DISTANCES)
    files |= access_classes({0: (500, [0]), 1: (4000, [0])})
    assert fast_memory(write_tree(tmp_path, files)) == {0: None}


@pytest.mark.parametrize(("distance", "answer"), [(40, 1), (41, None)])
def test_memory_at_most_four_times_the_local_distance_away_can_be_fast(tmp_path, distance, answer):
    files = machine({0: ("0-3", 16), 1: ("", 8)}, [f"10 {distance}", f"{distance} 10"])
    root = write_tree(tmp_path, files | access_classes({0: (100, [0]), 1: (400, [0])}))
    assert fast_memory(root) == {0: answer}


def test_memory_of_a_generic_initiator_is_device_memory_however_near(tmp_path):
    files = machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS
    files |= {"sys/devices/system/node/has_generic_initiator": "2"}
    assert fast_memory(write_tree(tmp_path, files)) == {0: None, 1: 3}


def test_memory_tiers_decide_where_the_kernel_has_them(tmp_path):
    tiers = "sys/devices/virtual/memory_tiering/memory_tier{}/nodelist"
    files = machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS
    files |= {tiers.format(2): "2", tiers.format(4): "0-1", tiers.format(22): "3"}
    assert fast_memory(write_tree(tmp_path, files)) == {0: 2, 1: None}


def test_bandwidth_decides_where_memory_is_in_the_tier_of_the_processors(tmp_path):
    files = machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS
    files |= {"sys/devices/virtual/memory_tiering/memory_tier4/nodelist": "0-3"}
    assert fast_memory(write_tree(tmp_path, files)) == {0: 2, 1: 3}


def test_bandwidth_tells_hbm_from_cxl_of_the_same_size_and_distance(tmp_path):
    files = machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS | access_classes({3: (60_000, [1])})
    assert fast_memory(write_tree(tmp_path, files)) == {0: 2, 1: None}


def test_memory_of_the_same_bandwidth_is_not_fast_memory(tmp_path):
    files = machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS | access_classes({3: (300_000, [1])})
    assert fast_memory(write_tree(tmp_path, files)) == {0: 2, 1: None}


def test_bandwidth_counts_only_for_the_initiators_it_is_given_for(tmp_path):
    # All equally far, as on a virtual machine: only the initiators tell that node 2 belongs to node 1.
    rows = ["10 20 20", "20 10 20", "20 20 10"]
    files = machine({0: ("0-1", 3), 1: ("2-3", 1), 2: ("", 1)}, rows)
    files |= access_classes({0: (1000, [0]), 1: (1000, [1]), 2: (10_000, [1])})
    assert fast_memory(write_tree(tmp_path, files)) == {0: None, 1: 2}


def test_bandwidth_for_a_device_is_not_that_for_the_processors(tmp_path):
    nodes = {0: ("0-3", 64), 1: ("", 32), 4: ("", 0)}
    files = machine(nodes, ["10 15 20", "15 10 20", "20 20 10"]) | access_classes({0: (100, [0])})
    files |= access_classes({1: (900, [4])}, "access0") | access_classes({1: (50, [0])})
    assert fast_memory(write_tree(tmp_path, files)) == {0: None}


def test_bandwidth_of_older_kernels_counts_too(tmp_path):
    files = machine({0: ("0-3", 64), 1: ("", 32)}, ["10 15", "15 10"])
    files |= access_classes({0: (100, [0]), 1: (900, [0])}, "access0")
    assert fast_memory(write_tree(tmp_path, files)) == {0: 1}


def test_hbm_that_several_nodes_share_is_the_fast_memory_of_each(tmp_path):
    nodes = {0: ("0-3", 64), 1: ("4-7", 64), 2: ("", 32)}
    files = machine(nodes, ["10 12 13", "12 10 13", "13 13 10"])
    files |= access_classes({0: (100, [0]), 1: (100, [1]), 2: (400, [0, 1])})
    assert fast_memory(write_tree(tmp_path, files)) == {0: 2, 1: 2}


def test_the_nearest_of_two_fast_memories_is_taken(tmp_path):
    files = machine({0: ("0-3", 64), 1: ("", 32), 2: ("", 32)}, ["10 17 13", "17 10 20", "13 20 10"])
    files |= access_classes({0: (100, [0]), 1: (800, [0]), 2: (700, [0])})
    assert fast_memory(write_tree(tmp_path, files)) == {0: 2}


def test_fast_memory_outside_the_cpuset_is_not_offered(tmp_path):
    files = machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS
    files |= {"proc/self/status": "Mems_allowed_list:\t0-1,3"}
    assert fast_memory(write_tree(tmp_path, files)) == {0: None, 1: 3}


def test_a_node_without_memory_is_not_fast_memory(tmp_path):
    files = machine(XEON_MAX | {2: ("", 0)}, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS
    assert fast_memory(write_tree(tmp_path, files)) == {0: None, 1: 3}


def test_a_node_without_cores_has_no_fast_memory_of_its_own(tmp_path):
    root = write_tree(tmp_path, machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS)
    assert fast_memory_near(read_topology(root), 2, root) is None


def test_fast_memory_of_a_node_that_does_not_exist_is_an_error(tmp_path):
    read = read_topology(write_tree(tmp_path, machine({0: ("0-1", 4), 2: ("2-3", 4)})))
    with pytest.raises(TopologyError, match="no memory node 7; this machine has 0,2"):
        fast_memory_near(read, 7, tmp_path)


# -- control groups ------------------------------------------------------------------------------


def test_a_v2_cpuset_is_found_at_the_nearest_ancestor_that_has_one(tmp_path):
    files = machine({0: ("0-3", 4), 1: ("4-7", 4)}) | cgroup_files(V2, "0::/user.slice/app.scope")
    files |= {
        "sys/fs/cgroup/user.slice/cpuset.cpus.effective": "4-5",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-7",
    }
    files |= {
        "sys/fs/cgroup/user.slice/cpuset.mems.effective": "1",
        "sys/fs/cgroup/user.slice/app.scope/x": "",
    }
    root = write_tree(tmp_path, files)
    assert read_topology(root).allowed_cpus == {4, 5}
    assert read_topology(root).allowed_memory_nodes == {1}
    assert usable_node_count(root) == 1


def test_a_v1_cpuset_holds_beside_an_empty_v2_hierarchy(tmp_path):
    hybrid = f"{V1}\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0"
    files = machine({0: ("0-7", 4)}) | cgroup_files(hybrid, "5:cpuset:/job\n0::/job")
    files |= {
        "sys/fs/cgroup/cpuset/job/cpuset.cpus": "2-9",
        "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus": "2-3",
    }
    files |= {"sys/fs/cgroup/unified/cgroup.procs": "1"}
    assert read_topology(write_tree(tmp_path, files)).allowed_cpus == {2, 3}


@pytest.mark.parametrize("path", ["/not/visible/here", "/../elsewhere"])
def test_a_group_path_that_is_not_visible_means_the_root_of_the_mount(tmp_path, path):
    files = machine({0: ("0-7", 4)}) | cgroup_files(V2, f"0::{path}")
    files |= {"sys/fs/cgroup/cpuset.cpus.effective": "6-7", "sys/fs/cgroup/memory.max": str(GIB)}
    files |= {"sys/fs/elsewhere/cpuset.cpus.effective": "1", "sys/fs/elsewhere/memory.max": "1"}
    root = write_tree(tmp_path, files)
    assert read_topology(root).allowed_cpus == {6, 7}
    assert memory_limit(root) == GIB


def test_a_v2_cpuset_is_found_where_proc_self_cgroup_is_absent(tmp_path):
    files = machine({0: ("0-3", 4), 1: ("4-7", 4)}) | cgroup_files(V2, "")
    del files["proc/self/cgroup"]
    files |= {"proc/self/cpuset": "/job/step", "sys/fs/cgroup/cpuset.cpus.effective": "0-7"}
    files |= {
        "sys/fs/cgroup/job/step/cpuset.cpus.effective": "2-5",
        "sys/fs/cgroup/job/step/cpuset.mems.effective": "1",
    }
    root = write_tree(tmp_path, files)
    assert read_topology(root).allowed_cpus == {2, 3, 4, 5}
    assert read_topology(root).allowed_memory_nodes == {1}


def test_the_path_of_a_v1_cpuset_is_not_taken_for_a_v2_group(tmp_path):
    hybrid = f"{V1}\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0"
    files = machine({0: ("0-7", 4)}) | cgroup_files(hybrid, "")
    del files["proc/self/cgroup"]
    files |= {"proc/self/cpuset": "/job", "sys/fs/cgroup/cpuset/job/cpuset.cpus": "2-3"}
    files |= {"sys/fs/cgroup/unified/job/memory.max": str(GIB)}
    root = write_tree(tmp_path, files)
    assert read_topology(root).allowed_cpus == {2, 3}
    assert memory_limit(root) is None


def test_affinity_of_a_recorded_process_is_within_its_cpuset(tmp_path):
    files = machine({0: ("0-7", 4)}) | cgroup_files(V2, "0::/")
    files |= {"sys/fs/cgroup/cpuset.cpus.effective": "0-3", "proc/self/status": "Cpus_allowed_list:\t3-6"}
    assert read_topology(write_tree(tmp_path, files)).allowed_cpus == {3}


def test_v2_memory_limit_is_the_tightest_of_all_ancestors(tmp_path):
    files = cgroup_files(V2, "0::/a/b")
    files |= {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.high": str(6 * GIB)}
    files |= {"sys/fs/cgroup/a/memory.max": str(4 * GIB), "sys/fs/cgroup/a/memory.high": "max"}
    root = write_tree(tmp_path, files)
    assert memory_limit(root) == 4 * GIB
    assert total_memory(root) == 4 * GIB


def test_v2_memory_high_limits_too(tmp_path):
    files = {"sys/fs/cgroup/memory.max": str(4 * GIB), "sys/fs/cgroup/memory.high": str(3 * GIB)}
    assert memory_limit(write_tree(tmp_path, cgroup_files(V2, "0::/") | files)) == 3 * GIB


def test_v1_memory_limit_counts_ancestors_that_are_not_visible(tmp_path):
    files = cgroup_files(V1, "9:memory:/docker/abc")
    files |= {"sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1}
    files |= {"sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {2 * GIB}"}
    assert total_memory(write_tree(tmp_path, files)) == 2 * GIB


def test_v1_ancestor_without_hierarchy_does_not_limit(tmp_path):
    files = cgroup_files(V1, "9:memory:/a/b")
    files |= {"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": str(4 * GIB)}
    files |= {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(GIB)}
    files |= {"sys/fs/cgroup/memory/a/memory.use_hierarchy": "0"}
    assert memory_limit(write_tree(tmp_path, files)) == 4 * GIB


@pytest.mark.parametrize(
    ("mounts", "own", "name", "unlimited"),
    [
        (V2, "0::/", "sys/fs/cgroup/memory.max", "max"),
        (V1, "9:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED_V1),
    ],
)
def test_unlimited_groups_leave_the_host_s_memory(tmp_path, mounts, own, name, unlimited):
    root = write_tree(tmp_path, cgroup_files(mounts, own, **{name: unlimited}))
    assert (memory_limit(root), total_memory(root), available_memory(root)) == (None, 16 * GIB, 8 * GIB)


def test_a_limit_above_the_host_s_memory_does_not_add_memory(tmp_path):
    root = write_tree(tmp_path, cgroup_files(V2, "0::/", **{"sys/fs/cgroup/memory.max": str(64 * GIB)}))
    assert (total_memory(root), available_memory(root)) == (16 * GIB, 8 * GIB)


def test_available_memory_counts_reclaimable_cache_of_each_group(tmp_path):
    files = cgroup_files(V2, "0::/a")
    files |= {"sys/fs/cgroup/a/memory.max": str(4 * GIB), "sys/fs/cgroup/a/memory.current": str(3 * GIB)}
    files |= {"sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nworkingset 1"}
    assert available_memory(write_tree(tmp_path, files)) == 3 * GIB


def test_available_memory_of_a_group_over_its_limit_is_zero(tmp_path):
    files = {"sys/fs/cgroup/memory.high": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}
    assert available_memory(write_tree(tmp_path, cgroup_files(V2, "0::/", **files))) == 0


def test_a_v1_group_s_available_memory_counts_its_children(tmp_path):
    folder = "sys/fs/cgroup/memory/memory"
    files = {f"{folder}.limit_in_bytes": str(4 * GIB), f"{folder}.usage_in_bytes": str(4 * GIB)}
    files |= {f"{folder}.stat": f"inactive_file 0\ntotal_inactive_file {GIB}"}
    assert available_memory(write_tree(tmp_path, cgroup_files(V1, "9:memory:/", **files))) == GIB


def test_memory_values_are_read_anew_each_time(tmp_path):
    root = write_tree(tmp_path, cgroup_files(V2, "0::/", **{"sys/fs/cgroup/memory.max": str(GIB)}))
    assert total_memory(root) == GIB
    (root / "sys/fs/cgroup/memory.max").write_text(str(2 * GIB))
    assert total_memory(root) == 2 * GIB


def test_limits_follow_a_process_that_moves_to_another_group(tmp_path):
    files = {"sys/fs/cgroup/a/memory.max": str(GIB), "sys/fs/cgroup/b/memory.max": str(2 * GIB)}
    root = write_tree(tmp_path, cgroup_files(V2, "0::/a", **files))
    assert total_memory(root) == GIB
    (root / "proc/self/cgroup").write_text("0::/b\n")
    assert total_memory(root) == 2 * GIB


def test_kernels_without_memavailable_count_free_memory_and_caches(tmp_path):
    meminfo = "MemTotal: 8000 kB\nMemFree: 1000 kB\nBuffers: 20 kB\nCached: 300 kB"
    assert available_memory(write_tree(tmp_path, {"proc/meminfo": meminfo})) == 1320 * 1024


def test_cpu_quota_is_the_tightest_of_all_v2_ancestors(tmp_path):
    files = {"sys/fs/cgroup/a/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "250000 100000"}
    assert cpu_quota(write_tree(tmp_path, cgroup_files(V2, "0::/a", **files))) == 2.5


def test_cpu_quota_of_v1_is_quota_over_period(tmp_path):
    folder = "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs"
    files = {f"{folder}_quota_us": "50000", f"{folder}_period_us": "100000"}
    assert cpu_quota(write_tree(tmp_path, cgroup_files(V1, "4:cpu,cpuacct:/job", **files))) == 0.5


@pytest.mark.parametrize("text", ["max 100000", "-1 100000", "", "nonsense", "1000 0"])
def test_cpu_quota_is_none_where_there_is_no_limit(tmp_path, text):
    assert (
        cpu_quota(write_tree(tmp_path, cgroup_files(V2, "0::/", **{"sys/fs/cgroup/cpu.max": text}))) is None
    )


# -- corrupt files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/devices/system/cpu/online", "0-x"),
        ("sys/devices/system/node/online", "zero"),
        ("sys/devices/system/node/node0/cpulist", "3-0"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:  lots kB"),
        ("sys/devices/system/node/node0/distance", "ten"),
        ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0;1"),
        ("sys/devices/system/cpu/cpu0/topology/physical_package_id", "first"),
        ("sys/devices/system/cpu/cpu0/cpu_capacity", "9" * 5000),
        ("sys/devices/cpu_core/cpus", "-"),
        ("proc/self/status", "Cpus_allowed_list:\tall of them"),
    ],
)
def test_a_corrupt_file_is_named_in_a_topology_error(tmp_path, path, text):
    root = write_tree(tmp_path, machine({0: ("0-1", 4)}) | {path: text})
    with pytest.raises(TopologyError) as error:
        read_topology(root)
    assert str(root / path) in str(error.value)
    assert usable_node_count(root) == 1


def test_a_corrupt_mask_is_a_topology_error(tmp_path):
    files = {"sys/devices/system/cpu/online": "0", "sys/devices/system/node/node0/cpumap": "0xff"}
    with pytest.raises(TopologyError, match=r"node0/cpumap .* no CPU mask"):
        read_topology(write_tree(tmp_path, files))


def test_binary_rubbish_is_a_topology_error(tmp_path):
    root = write_tree(tmp_path, machine({0: ("0-1", 4)}))
    (root / "sys/devices/system/cpu/online").write_bytes(b"\xff\x00\xb2")
    with pytest.raises(TopologyError):
        read_topology(root)
    assert usable_node_count(root) == 1


@pytest.mark.parametrize("name", ["memory.max", "memory.current"])
def test_corrupt_memory_limits_are_topology_errors(tmp_path, name):
    files = {"sys/fs/cgroup/memory.max": "1000"} | {f"sys/fs/cgroup/{name}": "much"}
    with pytest.raises(TopologyError, match=name):
        available_memory(write_tree(tmp_path, cgroup_files(V2, "0::/", **files)))


@pytest.mark.parametrize(
    "files", [{}, {"proc/meminfo": "MemFree: 12 kB"}, {"proc/meminfo": "MemTotal: -1 kB"}]
)
def test_unknown_memory_of_a_recorded_machine_is_a_topology_error(tmp_path, files):
    with pytest.raises(TopologyError, match="meminfo"):
        total_memory(write_tree(tmp_path, files))


def test_a_topology_error_is_an_acclimate_error_and_a_value_error():
    assert issubclass(TopologyError, AcclimateError)
    assert issubclass(TopologyError, ValueError)


# -- CPU lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("\n", ()),
        ("7", (7,)),
        ("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)),
        (" 5 , 1-2 ", (5, 1, 2)),
        ("0-30:2/4", (0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)),
        ("1-7:1/3,8", (1, 4, 7, 8)),
    ],
)
def test_a_cpu_list_is_read_in_the_order_written(text, numbers):
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("3-1", 'descends; write it as "1-3"'),
        ("1,,2", "neither a number nor a range"),
        ("0-3,", "neither a number nor a range"),
        ("a", '"a"'),
        ("-1", '"-1"'),
        ("0x3", '"0x3"'),
        ("1-2-3", '"1-2-3"'),
        ("٣", "neither a number nor a range"),
        ("0-3:2", "neither a number nor a range"),
        ("0-3:3/2", "USED/GROUP"),
        ("0-3:0/2", "USED/GROUP"),
        ("0-3:1/0", "USED/GROUP"),
        ("0-3,2-5", "2-3 appears more than once"),
        ("0-99999999999", "beyond the processors"),
        ("9" * 5000, "neither a number nor a range"),
    ],
)
def test_a_bad_cpu_list_is_refused_with_what_is_wrong(text, complaint):
    with pytest.raises(TopologyError) as error:
        parse_cpu_list(text)
    assert complaint in str(error.value)


@given(st.sets(st.integers(0, 9000)))
def test_formatting_and_parsing_a_cpu_list_gives_it_back(cpus):
    text = format_cpu_list(cpus)
    assert parse_cpu_list(text) == tuple(sorted(cpus))
    assert format_cpu_list(parse_cpu_list(text)) == text


@given(st.text(alphabet="0123456789-,:/ \nx", max_size=12))
def test_no_text_makes_the_parser_fail_in_another_way(text):
    with contextlib.suppress(TopologyError):
        parse_cpu_list(text)


@st.composite
def machines(draw: st.DrawFn) -> dict[str, str]:
    """Any machine: holes in all numbers, offline CPUs, empty nodes, any threads a core, any affinity."""
    cpus = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=24)))
    indices = sorted(draw(st.sets(st.integers(0, 80), max_size=5)))
    online = draw(st.sets(st.sampled_from(cpus), min_size=1))
    home = {cpu: draw(st.sampled_from(indices)) for cpu in cpus} if indices else {}
    files = {"sys/devices/system/cpu/online": format_cpu_list(online)}
    for index in indices:
        list_or_mask = draw(st.booleans())
        members = [cpu for cpu in cpus if home[cpu] == index]
        folder = f"sys/devices/system/node/node{index}"
        mask = f"{sum(1 << cpu for cpu in members):080x}"
        words = ",".join(mask[i : i + 8] for i in range(0, 80, 8))
        files |= (
            {f"{folder}/cpulist": format_cpu_list(members)} if list_or_mask else {f"{folder}/cpumap": words}
        )
    threads = draw(st.integers(1, 4))
    for position, cpu in enumerate(cpus):
        first = position - position % threads
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"] = format_cpu_list(
            cpus[first : first + threads]
        )
    if draw(st.booleans()):
        files["proc/self/status"] = (
            f"Cpus_allowed_list:\t{format_cpu_list(draw(st.sets(st.sampled_from(cpus))))}"
        )
    return files


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files=machines())
def test_on_any_machine_every_allowed_cpu_is_in_exactly_one_usable_node_and_core(tmp_path_factory, files):
    root = write_tree(tmp_path_factory.mktemp("any"), files)
    read = read_topology(root)
    assert read.allowed_cpus
    assert_consistent(read)
    assert usable_node_count(root) == len(read.usable_nodes) >= 1


# -- this machine --------------------------------------------------------------------------------


def run_python(code: str, before: Callable[[], None] | None = None) -> list[str]:
    """The words that a fresh interpreter prints; ``before`` runs in it first."""
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, preexec_fn=before, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_linux
def test_this_machine_allows_exactly_the_affinity_of_this_process():
    read = read_topology()
    assert read.allowed_cpus == os.sched_getaffinity(0)
    assert_consistent(read)
    assert usable_node_count() == len(read.usable_nodes)


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
        "from acclimate.topology import *\n"
        "t = read_topology(); print(*t.allowed_cpus, len(t.usable_cores()), usable_node_count())"
    )
    assert run_python(code, lambda: os.sched_setaffinity(0, {cpu})) == [str(cpu), "1", "1"]


@needs_linux
def test_counting_the_usable_nodes_of_this_machine_takes_under_two_milliseconds():
    seconds = sorted(timeit.repeat(usable_node_count, number=1, repeat=31))
    assert seconds[15] < 0.002


@needs_linux
def test_total_memory_of_this_machine_is_psutil_s_or_the_control_group_s():
    limit = memory_limit()
    assert total_memory() == min(
        psutil.virtual_memory().total, psutil.virtual_memory().total if limit is None else limit
    )


def test_available_memory_of_this_machine_is_within_its_total():
    assert 0 < available_memory() <= total_memory()


def test_memory_comes_from_psutil_where_there_is_no_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(topology.limits, "LIVE", tmp_path)
    assert total_memory(tmp_path) == psutil.virtual_memory().total
    assert 0 < available_memory(tmp_path) <= total_memory(tmp_path)


@needs_linux
def test_a_container_that_forbids_asking_for_the_affinity_still_has_its_cpus(monkeypatch):
    def refused(pid: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_getaffinity", refused)
    assert read_topology().allowed_cpus == allowed
    assert usable_node_count() >= 1


def test_importing_the_topology_loads_neither_torch_nor_psutil():
    code = "import sys, acclimate.topology; print('torch' in sys.modules, 'psutil' in sys.modules)"
    assert run_python(code) == ["False", "False"]


@pytest.fixture
def own_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new control group of this machine for the controller that the test names; needs a writable one."""
    controller, needed = request.param
    for chain in own_groups(Path("/"), controller):
        group = Path(chain[-1]) / f"acclimate-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / needed[0]).exists() or (group / needed[1]).exists():
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip(
        f"no control group for {controller} can be made here (needs root and a writable /sys/fs/cgroup)"
    )


def join(group: Path) -> Callable[[], None]:
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None


@needs_linux
@pytest.mark.parametrize("own_group", [("memory", ("memory.max", "memory.limit_in_bytes"))], indirect=True)
def test_a_child_in_a_limited_memory_group_sees_that_limit(own_group):
    limit = 256 << 20
    name = "memory.max" if (own_group / "memory.max").exists() else "memory.limit_in_bytes"
    (own_group / name).write_text(str(limit))
    code = "from acclimate.topology import *; print(memory_limit(), total_memory(), available_memory())"
    seen, total, available = map(int, run_python(code, join(own_group)))
    assert seen == total == limit
    assert 0 < available <= limit


@needs_linux
@pytest.mark.parametrize("own_group", [("cpuset", ("cpuset.cpus", "cpuset.cpus"))], indirect=True)
def test_a_child_in_a_cpuset_may_use_only_its_cpus_and_memory_nodes(own_group):
    cpu, node = max(os.sched_getaffinity(0)), min(read_topology().allowed_memory_nodes)
    (own_group / "cpuset.cpus").write_text(str(cpu))
    (own_group / "cpuset.mems").write_text(str(node))
    code = (
        "from acclimate.topology import *\n"
        "t = read_topology(); print(*t.allowed_cpus, *t.allowed_memory_nodes)"
    )
    assert run_python(code, join(own_group)) == [str(cpu), str(node)]


@needs_linux
@pytest.mark.parametrize("own_group", [("cpu", ("cpu.max", "cpu.cfs_quota_us"))], indirect=True)
def test_a_child_in_a_group_with_a_cpu_quota_sees_it(own_group):
    if (own_group / "cpu.max").exists():
        (own_group / "cpu.max").write_text("150000 100000")
    else:
        (own_group / "cpu.cfs_quota_us").write_text("150000")
    assert run_python("from acclimate.topology import *; print(cpu_quota())", join(own_group)) == ["1.5"]
