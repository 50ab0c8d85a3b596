"""Promises of acclimate.host.topology.kernel_files: lists and masks of processors, and corrupt files."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate.errors import AcclimateError, TopologyError
from acclimate.host.topology import (
    format_cpu_list,
    parse_cpu_list,
    read_topology,
    usable_node_count,
)
from machine_trees import (
    machine,
    write_tree,
)


def test_files_that_were_recorded_with_a_nul_at_their_end_are_read(tmp_path):
    root = write_tree(tmp_path, machine({0: ("0-3", 4), 1: ("4-7", 4)}, ["10 21", "21 10"]))
    for path in root.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b"\0")
    read = read_topology(root)
    assert [node.cpus for node in read.nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert read.node(1).distances == {0: 21, 1: 10}


def test_a_corrupt_mask_is_a_topology_error(tmp_path):
    files = {"sys/devices/system/cpu/online": "0", "sys/devices/system/node/node0/cpumap": "0xff"}
    with pytest.raises(TopologyError, match=r"node0/cpumap .* not a CPU mask"):
        read_topology(write_tree(tmp_path, files))


def test_binary_rubbish_is_a_topology_error(tmp_path):
    root = write_tree(tmp_path, machine({0: ("0-1", 4)}))
    (root / "sys/devices/system/cpu/online").write_bytes(b"\xff\x00\xb2")
    with pytest.raises(TopologyError):
        read_topology(root)
    assert usable_node_count(root) == 1


def test_a_topology_error_is_an_acclimate_error_and_a_value_error():
    assert issubclass(TopologyError, AcclimateError)
    assert issubclass(TopologyError, ValueError)


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
