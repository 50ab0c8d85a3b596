"""Promises of acclimate.host.topology.control_groups: cpusets and quotas, of version 1 and 2."""

from __future__ import annotations

import os

import pytest
from this_machine import join, needs_linux, run_python

from acclimate.host.topology import (
    cpu_quota,
    memory_limit,
    processor_limit,
    read_topology,
    usable_node_count,
)
from machine_trees import (
    GIB,
    V1,
    V2,
    cgroup_files,
    machine,
    write_tree,
)


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


@pytest.mark.parametrize(("quota", "limit"), [("40000", 1), ("100000", 1), ("250000", 2), ("900000", 8)])
def test_a_quota_limits_the_processors_to_keep_busy(tmp_path, quota, limit):
    files = machine({0: ("0-7", 4)}) | cgroup_files(V2, "0::/a")
    files |= {"sys/fs/cgroup/a/cpu.max": f"{quota} 100000"}
    assert processor_limit(write_tree(tmp_path, files)) == limit


@pytest.mark.parametrize(("quota", "limit"), [("40000", 1), ("140000", 1), ("150000", 2), ("900000", 8)])
def test_half_a_processor_counts_for_threads_that_claim_work(tmp_path, quota, limit):
    files = machine({0: ("0-7", 4)}) | cgroup_files(V2, "0::/a")
    files |= {"sys/fs/cgroup/a/cpu.max": f"{quota} 100000"}
    assert processor_limit(write_tree(tmp_path, files), claims_work=True) == limit


@needs_linux
@pytest.mark.parametrize("own_group", [("cpuset", ("cpuset.cpus", "cpuset.cpus"))], indirect=True)
def test_a_child_in_a_cpuset_may_use_only_its_cpus_and_memory_nodes(own_group):
    cpu, node = max(os.sched_getaffinity(0)), min(read_topology().allowed_memory_nodes)
    (own_group / "cpuset.cpus").write_text(str(cpu))
    (own_group / "cpuset.mems").write_text(str(node))
    code = (
        "from acclimate.host.topology import *\n"
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
    assert run_python("from acclimate.host.topology import *; print(cpu_quota())", join(own_group)) == ["1.5"]


def test_a_v1_cpuset_holds_beside_an_empty_v2_hierarchy(tmp_path):
    hybrid = f"{V1}\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0"
    files = machine({0: ("0-7", 4)}) | cgroup_files(hybrid, "5:cpuset:/job\n0::/job")
    files |= {
        "sys/fs/cgroup/cpuset/job/cpuset.cpus": "2-9",
        "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus": "2-3",
    }
    files |= {"sys/fs/cgroup/unified/cgroup.procs": "1"}
    assert read_topology(write_tree(tmp_path, files)).allowed_cpus == {2, 3}
