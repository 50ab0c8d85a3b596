"""Promises of acclimate.host.topology.machine: memory nodes, and which processors are online and allowed."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from this_machine import assert_consistent, needs_linux, run_python

from acclimate.errors import TopologyError
from acclimate.host import topology
from acclimate.host.topology import (
    format_cpu_list,
    parse_cpu_list,
    read_topology,
    usable_node_count,
)
from machine_trees import (
    GIB,
    MEMINFO,
    V2,
    cgroup_files,
    machine,
    write_tree,
)

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


def test_memory_of_a_node_is_in_bytes(recorded):
    nodes = read_topology(recorded("40intel64-2g2n4c+pcilocality")).nodes
    assert [node.memory_bytes for node in nodes] == [134204252 * 1024] + [134217728 * 1024] * 3


def test_distances_follow_node_numbers_across_holes(recorded):
    node = read_topology(recorded("48amd64-4pa2n6c-sparse")).node(33)
    assert node.distances == {0: 22, 1: 16, 2: 16, 33: 10, 34: 16, 45: 16, 72: 22, 73: 22}


def test_distances_are_empty_where_the_machine_gives_none(recorded):
    assert read_topology(recorded("64fake-4n2s2ca2c2t")).node(0).distances == {}


def test_a_machine_without_sys_and_proc_is_one_node_with_every_cpu(tmp_path):
    read = read_topology(tmp_path)
    assert [node.cpus for node in read.nodes] == [tuple(range(os.cpu_count() or 1))]
    assert usable_node_count(tmp_path) == 1


def test_a_machine_without_affinity_calls_is_one_node_with_every_cpu(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(topology.machine, "LIVE", tmp_path)
    assert [node.cpus for node in read_topology(tmp_path).usable_nodes] == [tuple(range(os.cpu_count() or 1))]


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


def test_an_explicit_allowed_set_keeps_only_online_cpus(tmp_path):
    read = read_topology(write_tree(tmp_path, machine({0: ("0-3", 4), 1: ("4-7", 4)})), allowed=[5, 6, 99])
    assert read.allowed_cpus == {5, 6}
    assert [node.index for node in read.usable_nodes] == [1]


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


@given(files=machines())
def test_on_any_machine_every_allowed_cpu_is_in_exactly_one_usable_node_and_core(tmp_path_factory, files):
    root = write_tree(tmp_path_factory.mktemp("any"), files)
    read = read_topology(root)
    assert read.allowed_cpus
    assert_consistent(read)
    assert usable_node_count(root) == len(read.usable_nodes) >= 1


@needs_linux
def test_this_machine_allows_exactly_the_affinity_of_this_process():
    read = read_topology()
    assert read.allowed_cpus == os.sched_getaffinity(0)
    assert_consistent(read)
    assert usable_node_count() == len(read.usable_nodes)


def test_counting_the_usable_nodes_reads_no_file_of_a_cpu(tmp_path, monkeypatch):
    nodes = {0: ("0-127", 512), 1: ("128-255", 512)}
    root = write_tree(tmp_path, machine(nodes, ["10 32", "32 10"]) | cgroup_files(V2, "0::/job"))
    opened: list[str] = []

    def counted(path: str, *args: Any, **kwargs: Any) -> Any:
        opened.append(path)
        return open(path, *args, **kwargs)

    monkeypatch.setattr(topology.kernel_files, "open", counted, raising=False)
    assert usable_node_count(root) == 2
    assert len(opened) < 12


@needs_linux
def test_a_container_that_forbids_asking_for_the_affinity_still_has_its_cpus(monkeypatch):
    def refused(pid: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_getaffinity", refused)
    assert read_topology().allowed_cpus == allowed
    assert usable_node_count() >= 1


def test_importing_the_topology_loads_neither_torch_nor_psutil():
    code = "import sys, acclimate.host.topology; print('torch' in sys.modules, 'psutil' in sys.modules)"
    assert run_python(code) == ["False", "False"]
