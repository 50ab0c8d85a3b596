"""Promises of acclimate.host.topology.coreless_memory: which memory without cores is preferred."""

from __future__ import annotations

from pathlib import Path

import pytest

from acclimate.errors import TopologyError
from acclimate.host.topology import (
    fast_memory_near,
    read_topology,
    usable_node_count,
)
from machine_trees import (
    GRACE_HOPPER,
    GRACE_HOPPER_DISTANCES,
    KNL,
    KNL_CPUINFO,
    XEON_MAX,
    XEON_MAX_BANDWIDTHS,
    XEON_MAX_DISTANCES,
    access_classes,
    machine,
    write_tree,
)


def test_memory_as_far_as_another_socket_is_not_taken_for_fast_memory(recorded):
    root = recorded("fakeheteromemtiers")
    read = read_topology(root)
    assert [fast_memory_near(read, node.index, root) for node in read.usable_nodes] == [None, None, None]


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
