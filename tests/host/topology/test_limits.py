"""Promises of acclimate.host.topology.limits: how much memory this process may use."""

from __future__ import annotations

import psutil
import pytest
from this_machine import join, needs_linux, run_python

from acclimate.errors import TopologyError
from acclimate.host import topology
from acclimate.host.topology import (
    available_memory,
    memory_limit,
    total_memory,
)
from machine_trees import (
    GIB,
    V1,
    V2,
    cgroup_files,
    write_tree,
)

UNLIMITED_V1 = "9223372036854771712"


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
@pytest.mark.parametrize("own_group", [("memory", ("memory.max", "memory.limit_in_bytes"))], indirect=True)
def test_a_child_in_a_limited_memory_group_sees_that_limit(own_group):
    limit = 256 << 20
    name = "memory.max" if (own_group / "memory.max").exists() else "memory.limit_in_bytes"
    (own_group / name).write_text(str(limit))
    code = "from acclimate.host.topology import *; print(memory_limit(), total_memory(), available_memory())"
    seen, total, available = map(int, run_python(code, join(own_group)))
    assert seen == total == limit
    assert 0 < available <= limit
