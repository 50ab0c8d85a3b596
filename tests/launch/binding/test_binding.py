"""Promises of acclimate.launch.binding.cores on recorded machines and on made-up ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from bindings import assert_sound, first_threads, lists, nodes_of

from acclimate.errors import AcclimateError, BindingError
from acclimate.host.topology import Topology, read_topology
from acclimate.launch.binding.cores import RankBinding, bind_ranks, check_environment
from machine_trees import (
    GRACE_HOPPER,
    GRACE_HOPPER_DISTANCES,
    V2,
    XEON_MAX,
    XEON_MAX_BANDWIDTHS,
    XEON_MAX_DISTANCES,
    cgroup_files,
    machine,
    write_tree,
)

MACHINES = (
    "16amd64-8n2c-cpusets",
    "40intel64-2g2n4c+pcilocality",
    "48amd64-4pa2n6c-sparse",
    "64amd64-4s2n4ca2co",
    "64fake-4n2s2ca2c2t",
    "fakeheteromemtiers",
    "nvidia-dgx-gb10",
)


# -- every recorded machine --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
class TestRecordedMachine:
    def test_shares_all_its_cores_soundly_among_any_number_of_ranks(
        self, recorded: Callable[[str], Path], name: str
    ) -> None:
        root = recorded(name)
        topology = read_topology(root)
        cores = first_threads(topology)
        for ranks in range(1, len(cores) + 1):
            assert_sound(topology, bind_ranks(topology, ranks, root=root), cores)

    def test_gives_both_threads_of_a_core_to_one_rank_where_asked(
        self, recorded: Callable[[str], Path], name: str
    ) -> None:
        root = recorded(name)
        topology = read_topology(root)
        for ranks in (1, 2, 3, 4, 6):
            bindings = bind_ranks(topology, ranks, use_hyperthreads=True, root=root)
            assert_sound(topology, bindings, topology.usable_cores())

    def test_gives_one_rank_a_memory_node_exactly_that_node_where_nodes_are_equal(
        self, recorded: Callable[[str], Path], name: str
    ) -> None:
        root = recorded(name)
        topology = read_topology(root)
        sizes = {len(topology.usable_cores(node.index)) for node in topology.usable_nodes}
        if max(sizes) - min(sizes) > 1:
            pytest.skip("the nodes of this machine have different numbers of cores")
        bindings = bind_ranks(topology, len(topology.usable_nodes), root=root)
        assert [nodes_of(topology, binding) for binding in bindings] == [
            [node.index] for node in topology.usable_nodes
        ]

    def test_refuses_more_ranks_than_cores(self, recorded: Callable[[str], Path], name: str) -> None:
        topology = read_topology(recorded(name))
        cores = len(topology.usable_cores())
        with pytest.raises(BindingError, match=f"{cores + 1} ranks need at least {cores + 1} cores"):
            bind_ranks(topology, cores + 1, use_hyperthreads=True)


# The expected lists were written by hand from the machines' raw files.


def test_interleaved_core_numbers_are_no_memory_nodes(recorded: Callable[[str], Path]) -> None:
    topology = read_topology(recorded("40intel64-2g2n4c+pcilocality"))
    two = bind_ranks(topology, 2)
    assert [nodes_of(topology, binding) for binding in two] == [[0, 1], [2, 3]]
    four = bind_ranks(topology, 4)
    assert four[1] == RankBinding((1, 5, 9, 13, 17, 21, 25, 29, 33, 37), 10, (1,), None)


def test_memory_nodes_keep_their_own_numbers(recorded: Callable[[str], Path]) -> None:
    bindings = bind_ranks(read_topology(recorded("48amd64-4pa2n6c-sparse")), 8)
    assert bindings[3] == RankBinding((18, 19, 20, 21, 22, 23), 6, (33,), None)
    assert bindings[7] == RankBinding((42, 43, 44, 45, 46, 47), 6, (73,), None)


def test_a_rank_that_needs_several_nodes_gets_whole_packages(recorded: Callable[[str], Path]) -> None:
    topology = read_topology(recorded("64amd64-4s2n4ca2co"))
    of_four = [nodes_of(topology, binding) for binding in bind_ranks(topology, 4)]
    assert of_four == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for nodes in (nodes_of(topology, binding) for binding in bind_ranks(topology, 2)):
        assert len({core.package for core in topology.cores if core.node in nodes}) == 2


def test_a_rank_that_needs_several_nodes_of_one_package_gets_near_ones(tmp_path: Path) -> None:
    nodes = {node: (f"{2 * node}-{2 * node + 1}", 4) for node in range(4)}
    distances = ["10 16 12 16", "16 10 16 12", "12 16 10 16", "16 12 16 10"]
    topology = read_topology(write_tree(tmp_path, machine(nodes, distances)))
    assert [nodes_of(topology, binding) for binding in bind_ranks(topology, 2)] == [[0, 2], [1, 3]]


def test_first_hardware_threads_come_before_second_ones(recorded: Callable[[str], Path]) -> None:
    topology = read_topology(recorded("64fake-4n2s2ca2c2t"))
    assert lists(bind_ranks(topology, 4)) == ["0-3,8-11", "16-19,24-27", "32-35,40-43", "48-51,56-59"]
    assert lists(bind_ranks(topology, 4, use_hyperthreads=True)) == ["0-15", "16-31", "32-47", "48-63"]


def test_offline_cores_and_those_outside_the_cpuset_are_left_alone(recorded: Callable[[str], Path]) -> None:
    topology = read_topology(recorded("16amd64-8n2c-cpusets"))
    bindings = bind_ranks(topology, 6)
    # Nodes 2 and 3 have one core each, so the two smaller shares go there and no rank reaches across.
    assert lists(bindings) == ["0-1", "2-3", "5", "6", "12-13", "14-15"]
    # The cpuset has memory of nodes 1 to 4 only.
    assert [binding.memory_nodes for binding in bindings] == [(), (1,), (2,), (3,), (), ()]


def test_ranks_of_a_gb10_get_as_many_fast_cores_each(recorded: Callable[[str], Path]) -> None:
    bindings = bind_ranks(read_topology(recorded("nvidia-dgx-gb10")), 2)
    # 5-9 and 15-19 are the fast ones.
    assert lists(bindings) == ["0-9", "10-19"]
    three = bind_ranks(read_topology(recorded("nvidia-dgx-gb10")), 3)
    assert [binding.cores for binding in three] == [7, 7, 6]


def test_memory_as_far_as_another_node_is_not_preferred(recorded: Callable[[str], Path]) -> None:
    root = recorded("fakeheteromemtiers")
    bindings = bind_ranks(read_topology(root), 3, root=root)
    assert [(binding.memory_nodes, binding.preferred_memory_node) for binding in bindings] == [
        ((0,), None),
        ((1,), None),
        ((2,), None),
    ]


# -- made-up machines of shapes the recorded ones lack -----------------------------------------------


def test_three_ranks_on_two_nodes_of_four_cores_get_3_3_and_2_and_one_reaches_across(tmp_path: Path) -> None:
    topology = read_topology(write_tree(tmp_path, machine({0: ("0-3", 4), 1: ("4-7", 4)})))
    bindings = bind_ranks(topology, 3)
    assert sorted(binding.cores for binding in bindings) == [2, 3, 3]
    assert sum(len(nodes_of(topology, binding)) > 1 for binding in bindings) == 1


def test_a_rank_across_two_nodes_has_its_memory_on_both(tmp_path: Path) -> None:
    topology = read_topology(write_tree(tmp_path, machine({0: ("0-3", 4), 1: ("4-7", 4)})))
    assert bind_ranks(topology, 1)[0].memory_nodes == (0, 1)


def test_nodes_that_fit_each_other_are_combined_wherever_they_are(tmp_path: Path) -> None:
    # Two ranks fit whole nodes, and nodes 1 and 3 together make up the third.
    nodes = {0: ("0-1", 4), 1: ("2", 4), 2: ("3-4", 4), 3: ("5", 4)}
    topology = read_topology(write_tree(tmp_path, machine(nodes)))
    assert lists(bind_ranks(topology, 3)) == ["0-1", "2,5", "3-4"]


def test_an_offline_node_0_moves_nothing(tmp_path: Path) -> None:
    files = machine({1: ("0-3", 4), 2: ("4-7", 4)}, ["10 21", "21 10"])
    bindings = bind_ranks(read_topology(write_tree(tmp_path, files)), 2)
    assert bindings == (
        RankBinding((0, 1, 2, 3), 4, (1,), None),
        RankBinding((4, 5, 6, 7), 4, (2,), None),
    )


def test_gpu_memory_is_not_bound_to(tmp_path: Path) -> None:
    root = write_tree(tmp_path, machine(GRACE_HOPPER, GRACE_HOPPER_DISTANCES))
    bindings = bind_ranks(read_topology(root), 2, root=root)
    assert bindings == (
        RankBinding(tuple(range(36)), 36, (0,), None),
        RankBinding(tuple(range(36, 72)), 36, (0,), None),
    )


def test_hbm_in_flat_mode_is_preferred_by_the_ranks_it_is_near_to(tmp_path: Path) -> None:
    root = write_tree(tmp_path, machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS)
    bindings = bind_ranks(read_topology(root), 2, root=root)
    assert [(binding.memory_nodes, binding.preferred_memory_node) for binding in bindings] == [
        ((), 2),
        ((), 3),
    ]


def test_a_binding_says_in_words_which_memory_it_takes() -> None:
    assert RankBinding((0, 1, 2, 5), 4, (0, 1), None).describe() == "processors 0-2,5, memory node 0-1"
    assert RankBinding((4, 5), 2, (), 3).describe() == "processors 4-5, memory node 3 preferred"
    assert RankBinding((4,), 1, (), None).describe() == "processors 4"


def test_hbm_of_a_divided_socket_is_preferred_part_by_part(tmp_path: Path) -> None:
    # Two parts of one socket, each with its own HBM, which is nearer than the other part.
    nodes = {0: ("0-13", 64), 1: ("14-27", 64), 2: ("", 16), 3: ("", 16)}
    distances = ["10 21 17 28", "21 10 28 17", "17 28 10 28", "28 17 28 10"]
    root = write_tree(tmp_path, machine(nodes, distances) | XEON_MAX_BANDWIDTHS)
    bindings = bind_ranks(read_topology(root), 4, root=root)
    assert [binding.preferred_memory_node for binding in bindings] == [2, 2, 3, 3]


def test_a_rank_with_cores_near_two_hbm_nodes_is_bound_to_normal_memory(tmp_path: Path) -> None:
    root = write_tree(tmp_path, machine(XEON_MAX, XEON_MAX_DISTANCES) | XEON_MAX_BANDWIDTHS)
    (binding,) = bind_ranks(read_topology(root), 1, root=root)
    assert (binding.memory_nodes, binding.preferred_memory_node) == ((0, 1), None)


def test_memory_is_not_bound_to_a_node_that_has_none(tmp_path: Path) -> None:
    topology = read_topology(write_tree(tmp_path, machine({0: ("0-3", 8), 1: ("4-7", 0)})))
    assert [binding.memory_nodes for binding in bind_ranks(topology, 2)] == [(0,), ()]
    assert bind_ranks(topology, 1)[0].memory_nodes == (0,)


def test_slices_of_one_memory_are_bound_to_together(tmp_path: Path) -> None:
    # A kernel started with numa=fake=4: each slice of a package's memory lists the package's cores.
    nodes = {0: ("0-3", 4), 1: ("4-7", 4)}
    distances = ["10 21 10 21", "21 10 21 10", "10 21 10 21", "21 10 21 10"]
    files = machine(nodes | {2: ("", 4), 3: ("", 4)}, distances)
    files["sys/devices/system/node/node2/cpulist"] = "0-3"
    files["sys/devices/system/node/node3/cpulist"] = "4-7"
    root = write_tree(tmp_path, files)
    bindings = bind_ranks(read_topology(root), 2, root=root)
    assert [(binding.memory_nodes, binding.preferred_memory_node) for binding in bindings] == [
        ((0, 2), None),
        ((1, 3), None),
    ]


def test_slices_of_the_only_memory_are_all_bound_to(tmp_path: Path) -> None:
    files = machine({0: ("0-3", 4), 1: ("", 4), 2: ("", 3)}, ["10 10 10"] * 3)
    files |= {f"sys/devices/system/node/node{slice_}/cpulist": "0-3" for slice_ in (1, 2)}
    root = write_tree(tmp_path, files)
    for binding in bind_ranks(read_topology(root), 2, root=root):
        assert (binding.memory_nodes, binding.preferred_memory_node) == ((0, 1, 2), None)


def test_256_threads_are_shared_by_core(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 128},{cpu % 128 + 128}" for cpu in range(256)}
    nodes = {0: ("0-63,128-191", 512), 1: ("64-127,192-255", 512)}
    topology = read_topology(write_tree(tmp_path, machine(nodes, ["10 32", "32 10"], siblings)))
    assert lists(bind_ranks(topology, 2)) == ["0-63", "64-127"]
    both = bind_ranks(topology, 4, use_hyperthreads=True)
    assert lists(both) == ["0-31,128-159", "32-63,160-191", "64-95,192-223", "96-127,224-255"]
    assert [binding.cores for binding in both] == [32, 32, 32, 32]
    for ranks in (3, 5, 127, 128):
        assert_sound(topology, bind_ranks(topology, ranks), first_threads(topology))


def test_four_threads_a_core_and_gpu_memory_at_high_numbers_as_on_power9(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu - cpu % 4}-{cpu - cpu % 4 + 3}" for cpu in range(32)}
    nodes = {0: ("0-15", 128), 8: ("16-31", 128), 254: ("", 16), 255: ("", 16)}
    distances = ["10 40 80 80", "40 10 80 80", "80 80 10 80", "80 80 80 10"]
    files = machine(nodes, distances, siblings)
    # Two threads of each core are offline (ppc64_cpu --smt=2).
    files["sys/devices/system/cpu/online"] = "0-1,4-5,8-9,12-13,16-17,20-21,24-25,28-29"
    root = write_tree(tmp_path, files)
    topology = read_topology(root)
    assert bind_ranks(topology, 2, root=root) == (
        RankBinding((0, 4, 8, 12), 4, (0,), None),
        RankBinding((16, 20, 24, 28), 4, (8,), None),
    )
    both = bind_ranks(topology, 4, use_hyperthreads=True, root=root)
    assert lists(both) == ["0-1,4-5", "8-9,12-13", "16-17,20-21", "24-25,28-29"]


def test_a_version_2_control_group_confines_cores_and_memory(tmp_path: Path) -> None:
    files = machine({0: ("0-3", 4), 1: ("4-7", 4)}) | cgroup_files(V2, "0::/job")
    files |= {"sys/fs/cgroup/job/cpuset.cpus.effective": "2-5"}
    files |= {"sys/fs/cgroup/job/cpuset.mems.effective": "1"}
    bindings = bind_ranks(read_topology(write_tree(tmp_path, files)), 2)
    assert bindings == (RankBinding((2, 3), 2, (), None), RankBinding((4, 5), 2, (1,), None))


def test_every_rank_gets_the_same_mix_of_performance_and_efficiency_cores(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}" for cpu in range(16)}
    files = machine({0: ("0-23", 64)}, siblings=siblings)
    files |= {"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-23"}
    topology = read_topology(write_tree(tmp_path, files))
    assert lists(bind_ranks(topology, 2)) == ["0,2,4,6,16-19", "8,10,12,14,20-23"]
    # 8 and 8 cores for 3 ranks: 3, 3, 2 of one kind and 3, 2, 3 of the other.
    assert sorted(binding.cores for binding in bind_ranks(topology, 3)) == [5, 5, 6]
    for ranks in range(1, 17):
        assert_sound(topology, bind_ranks(topology, ranks), first_threads(topology))


def test_efficiency_cores_can_be_left_out_by_a_core_list(tmp_path: Path) -> None:
    files = machine({0: ("0-7", 64)})
    files |= {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}
    topology = read_topology(write_tree(tmp_path, files))
    assert lists(bind_ranks(topology, 2, core_list="0-3")) == ["0-1", "2-3"]


def test_ranks_share_cores_with_one_and_with_two_usable_threads_alike(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    files = machine({0: ("0-7", 4)}, siblings=siblings)
    topology = read_topology(write_tree(tmp_path, files), allowed=[0, 1, 2, 3, 4, 5])
    bindings = bind_ranks(topology, 2, use_hyperthreads=True)
    assert [(binding.cores, len(binding.cpus)) for binding in bindings] == [(2, 3), (2, 3)]


def test_the_mix_stays_even_where_only_some_fast_cores_have_two_threads(tmp_path: Path) -> None:
    files = machine({0: ("0-2,4", 4)}, siblings={0: "0,4", 4: "0,4"})
    files |= {"sys/devices/cpu_core/cpus": "0,2,4", "sys/devices/cpu_atom/cpus": "1"}
    bindings = bind_ranks(read_topology(write_tree(tmp_path, files)), 2, use_hyperthreads=True)
    assert [len(set(binding.cpus) & {0, 2}) for binding in bindings] == [1, 1]


def test_ranks_do_not_reach_across_nodes_for_the_sake_of_second_threads(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    files = machine({0: ("0-3,8-11", 4), 1: ("4-7,12-15", 4)}, siblings=siblings)
    topology = read_topology(write_tree(tmp_path, files), allowed=[*range(8), 12, 13, 14, 15])
    assert lists(bind_ranks(topology, 2, use_hyperthreads=True)) == ["0-3", "4-7,12-15"]
    three = bind_ranks(topology, 3, use_hyperthreads=True)
    assert sum(len(nodes_of(topology, binding)) for binding in three) == 4


def test_a_thread_stands_for_its_core_where_the_first_is_not_allowed(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)}
    topology = read_topology(write_tree(tmp_path, machine({0: ("0-3", 4)}, siblings=siblings)), [1, 2, 3])
    assert lists(bind_ranks(topology, 2)) == ["1", "2"]


def test_a_kernel_without_memory_nodes_has_its_packages_kept_apart(tmp_path: Path) -> None:
    files = {"sys/devices/system/cpu/online": "0-7"}
    for cpu in range(8):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = str(cpu % 2)
    assert lists(bind_ranks(read_topology(write_tree(tmp_path, files)), 2)) == ["0,2,4,6", "1,3,5,7"]


# -- core lists --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_sockets(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    """2 nodes of 56 cores of 2 threads, as in the specification; 110 is offline and 200-223 not allowed."""
    siblings = {cpu: f"{cpu % 112},{cpu % 112 + 112}" for cpu in range(224)}
    files = machine({0: ("0-55,112-167", 256), 1: ("56-111,168-223", 256)}, ["10 21", "21 10"], siblings)
    files["sys/devices/system/cpu/online"] = "0-109,111-223"
    return read_topology(write_tree(tmp_path_factory.mktemp("sockets"), files), allowed=range(200))


def test_a_core_list_leaves_cores_to_the_system(two_sockets: Topology) -> None:
    bindings = bind_ranks(two_sockets, 2, core_list="0-51,56-107")
    assert lists(bindings) == ["0-51", "56-107"]
    assert [(binding.cores, binding.memory_nodes) for binding in bindings] == [(52, (0,)), (52, (1,))]


def test_a_core_list_is_exact_and_keeps_both_threads_of_a_core_together(two_sockets: Topology) -> None:
    bindings = bind_ranks(two_sockets, 2, core_list="0-3,112-115")
    assert lists(bindings) == ["0-1,112-113", "2-3,114-115"]
    assert [binding.cores for binding in bindings] == [2, 2]
    assert bindings == bind_ranks(two_sockets, 2, core_list="0-3,112-115", use_hyperthreads=True)
    # The flag adds no thread that the list does not name.
    assert lists(bind_ranks(two_sockets, 2, core_list="0-3", use_hyperthreads=True)) == ["0-1", "2-3"]


@pytest.mark.parametrize(
    ("core_list", "complaint"),
    [
        ("", "is empty"),
        ("0-x", '"0-x" in the CPU list "0-x" is neither a number nor a range'),
        ("0,,3", "neither a number nor a range"),
        ("-4", '"-4"'),
        ("7-4", 'the range "7-4" descends; write it as "4-7"'),
        ("4-7,0-3", '"4-7,0-3" descends; write it as "0-7"'),
        ("0-5,4-8", "4-5 appears more than once"),
        (
            "0-9,500-501",
            "names 500-501, which this machine does not have or has offline; online are 0-109,111-223",
        ),
        ("108-111", "names 110, which this machine does not have or has offline"),
        (
            "0-3,198-203",
            "names 200-203, which this process may not use; its affinity or control group allows 0-109,111",
        ),
        ("0-2", '4 ranks need at least 4 cores, and --bind_core_list "0-2" names 3'),
        ("0-2,112-114", "names 3: processors 0-2,112-114 (hardware threads of one core stay together)"),
        ("0-99999999999", "beyond the processors that Linux supports"),
    ],
)
def test_a_bad_core_list_is_refused_with_what_is_wrong(
    two_sockets: Topology, core_list: str, complaint: str
) -> None:
    with pytest.raises(BindingError) as error:
        bind_ranks(two_sockets, 4, core_list=core_list)
    assert complaint in str(error.value)
    assert "--bind_core_list" in str(error.value)


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(two_sockets: Topology, ranks: int) -> None:
    with pytest.raises(BindingError, match=f"among {ranks} ranks"):
        bind_ranks(two_sockets, ranks)


def test_too_few_cores_say_how_many_ranks_fit(tmp_path: Path) -> None:
    siblings = {0: "0-1", 1: "0-1"}
    topology = read_topology(write_tree(tmp_path, machine({0: ("0-1", 4)}, siblings=siblings)))
    with pytest.raises(BindingError) as error:
        bind_ranks(topology, 2)
    assert str(error.value) == (
        "2 ranks need at least 2 cores, and this process may use 1: processors 0-1 (hardware threads of one"
        " core stay together); start at most 1 (--num_accelerators 1), or leave out --bind_cores_to_rank"
    )


def test_a_binding_error_is_an_acclimate_error_and_a_value_error() -> None:
    assert issubclass(BindingError, AcclimateError)
    assert issubclass(BindingError, ValueError)


# -- variables that would undo it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("KMP_AFFINITY", "pins a rank's first thread to one core, which everything that the rank"),
        ("GOMP_CPU_AFFINITY", "moves the threads of every rank to these same cores"),
    ],
)
def test_variables_by_which_openmp_binds_on_its_own_are_refused_with_the_reason(
    name: str, reason: str
) -> None:
    with pytest.raises(BindingError) as error:
        check_environment({"PATH": "/bin", name: "0-3"})
    assert f'{name} is "0-3"' in str(error.value)
    assert reason in str(error.value)
    assert f"unset {name}" in str(error.value)


@pytest.mark.parametrize(
    "environ", [{}, {"KMP_AFFINITY": ""}, {"OMP_NUM_THREADS": "4", "OMP_PROC_BIND": "close"}]
)
def test_other_variables_are_none_of_its_business(environ: Mapping[str, str]) -> None:
    check_environment(environ)
