"""The plan of a job, and how it is sent."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate.errors import LaunchProtocolError
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.wire import decode, encode

texts = st.text(max_size=20)
jobs = st.builds(
    JobPlan,
    hosts=st.lists(
        st.builds(
            HostPlan,
            texts,
            st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(
                lambda it: tuple(sorted(it))
            ),
            st.none() | st.integers(1, 65535),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    command=st.lists(texts, max_size=4).map(tuple),
    environment=st.dictionaries(texts, texts, max_size=4),
    directory=texts,
    accelerator=texts,
    master_addr=st.none() | texts,
    master_port=st.none() | st.integers(1, 65535),
    bind_cores=st.booleans(),
    core_list=st.none() | texts,
    grace_s=st.floats(0, 1e6),
    launcher_args=st.lists(texts, max_size=2).map(tuple),
)


@given(jobs)
def test_a_plan_is_read_as_it_was_written_from_one_line(job: JobPlan) -> None:
    line = encode({"job": asdict(job)})
    assert line.index(b"\n") == len(line) - 1
    assert decode(line, {"job": JobPlan}) == {"job": job}


@given(jobs)
def test_ranks_count_on_from_host_to_host(job: JobPlan) -> None:
    ranks = [
        job.rank_offset(node) + local
        for node, host in enumerate(job.hosts)
        for local in range(len(host.slots))
    ]
    assert ranks == list(range(job.world_size))


@pytest.mark.parametrize("value", ["", {}, [], 7, {"hosts": []}, "\xff"])
def test_what_is_no_plan_is_refused(value: object) -> None:
    with pytest.raises(LaunchProtocolError, match="Install the same acclimate on all hosts"):
        decode(encode({"job": value}), {"job": JobPlan})


def test_a_plan_of_another_release_is_refused() -> None:
    plan = asdict(JobPlan((HostPlan("a", (0,)),), ("x",), {}, "/", "cpu"))
    with pytest.raises(LaunchProtocolError, match="another release"):
        decode(encode({"job": {**plan, "added_later": 1}}), {"job": JobPlan})
