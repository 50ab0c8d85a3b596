"""Hostfiles and filters: the error for each mistake has its line and says what to write instead."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate.errors import HostfileError, LaunchOptionError, MissingFileError
from acclimate.launch.plan.hostfile import Host, HostPlan, choose_slots, parse_hostfile, read_hostfile

THREE = (Host("a", 4), Host("b", 2), Host("fe80::1", 3))


def slots(chosen: tuple[HostPlan, ...]) -> dict[str, tuple[int, ...]]:
    return {plan.name: plan.slots for plan in chosen}


# -- the file ----------------------------------------------------------------------------------------


def test_hosts_come_in_the_order_of_the_file() -> None:
    text = "# the cluster\n\nworker-2 slots=8\n  worker-1.local\tslots=4  # half\n10.0.0.7:2222 slots=1\n"
    assert parse_hostfile(text) == (
        Host("worker-2", 8),
        Host("worker-1.local", 4),
        Host("10.0.0.7", 1, 2222),
    )


def test_an_ipv6_address_stands_in_brackets_with_or_without_a_port() -> None:
    text = "[fe80::1]:2222 slots=2\n[2001:db8::2] slots=1\n[fe80::3%eth0] slots=1"
    assert parse_hostfile(text) == (
        Host("fe80::1", 2, 2222),
        Host("2001:db8::2", 1),
        Host("fe80::3%eth0", 1),
    )


def test_windows_line_ends_are_line_ends() -> None:
    assert parse_hostfile("a slots=1\r\nb slots=2\r\n") == (Host("a", 1), Host("b", 2))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("b", 'no slots; write "b slots=N"'),
        ("worker-0:2", 'To MPI, "worker-0:2" means "worker-0 slots=2".'),
        ("b slots=0", 'slots="0" must be a whole number of at least 1'),
        ("b slots=-1", 'slots="-1"'),
        ("b slots=two", 'slots="two"'),
        ("b slots=", 'slots=""'),
        ("b slots=1.5", 'slots="1.5"'),
        ("b slots=٣", 'slots="٣"'),
        ("b slots=1 slots=2", "give slots once"),
        ("b slots = 2", '"slots" is not known here'),
        ("b slot=2", '"slot=2" is not known here'),
        ("b slots=2 max_slots=4", '"max_slots=4" is not known here'),
        ("b:0 slots=1", '"0" in "b:0" is not a port'),
        ("b:65536 slots=1", "not a port"),
        ("b: slots=1", "not a port"),
        ("b:ssh slots=1", "not a port"),
        ("fe80::1 slots=1", "put it in brackets: [fe80::1]"),
        ("[fe80::1 slots=1", "should read [address]"),
        ("[fe80::1]2222 slots=1", "should read [address]"),
        ("[b] slots=1", "not an IPv6 address"),
        ("ann@b slots=1", "set User for it in ssh's configuration"),
        ("slots=1", "not the name of a host"),
        ("-oProxyCommand=x slots=1", "not the name of a host"),
        ("b\0 slots=1", '"b\\x00" is not the name of a host'),
        ("\x1b[31mb slots=1", "not the name of a host"),
        ("^/etc/passwd slots=1", "not the name of a host"),
        ("$(reboot) slots=1", "not the name of a host"),
        ("b" * 5000 + " slots=1", "not the name of a host"),
        ("[fe80::1%\0] slots=1", "does not name a network interface"),
        ("b slots=" + "9" * 5000, 'slots="999'),
        ("b:" + "9" * 5000 + " slots=1", "is not a port"),
        ("x" * 1000, 'no slots; write "xxx'),
    ],
)
def test_a_line_that_cannot_be_understood_is_named_with_its_number(line: str, said: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(f"# first\na slots=1\n\n{line}\nc slots=1\n", "cluster.txt")
    assert str(caught.value).startswith("cluster.txt:4: ")
    assert said in str(caught.value)


def test_a_host_that_comes_twice_is_named_with_both_lines() -> None:
    with pytest.raises(HostfileError, match=r'^f:4: host "A" is already on line 1\.'):
        parse_hostfile("a slots=1\n\nb slots=1\nA:2222 slots=1\n", "f")


def test_a_host_with_more_slots_than_it_can_run_ranks_is_named() -> None:
    with pytest.raises(HostfileError, match=r'host "b" has slots=100000000000000000000; a host runs at most'):
        choose_slots(parse_hostfile(f"a slots=1\nb slots={10**20}\n"))
    with pytest.raises(HostfileError, match="have more than 1048576 slots in all"):
        choose_slots([Host(f"host{number}", 4096) for number in range(257)])


def test_what_is_too_large_for_a_hostfile_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match="larger than 16 MiB"):
        read_hostfile(Path("/dev/zero"))
    (tmp_path / "hosts").write_text("#" * (16 << 20))
    with pytest.raises(HostfileError, match="it names no host"):
        read_hostfile(tmp_path / "hosts")


def test_a_mark_before_the_first_line_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=1\r\n")
    assert read_hostfile(tmp_path / "hosts") == (Host("a", 1),)


def test_a_slot_that_comes_twice_in_a_filter_is_used_once() -> None:
    assert slots(choose_slots(THREE, include="a:2,2,0,2")) == {"a": (0, 2)}
    assert slots(choose_slots(THREE, exclude="a:2,2,0,2@b@[fe80::1]")) == {"a": (1, 3)}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n"])
def test_a_file_without_a_host_is_refused(text: str) -> None:
    with pytest.raises(HostfileError, match=r"^f:1: it names no host; a line reads: host slots=N"):
        parse_hostfile(text, "f")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"nowhere cannot be read: No such file or directory\."):
        read_hostfile(tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match="Is a directory"):
        read_hostfile(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(MissingFileError, match="no file can have this name"):
        read_hostfile(Path(name))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"a slots=1\n\xff\xfe")
    with pytest.raises(HostfileError, match="hosts is not text"):
        read_hostfile(tmp_path / "hosts")


names = st.text("abz09.-", min_size=1, max_size=8).filter(
    lambda name: name[0] != "-"
) | st.ip_addresses().map(str)
some_hosts = st.lists(
    st.builds(Host, names, st.integers(1, 10**6), st.none() | st.integers(1, 65535)),
    min_size=1,
    max_size=5,
    unique_by=lambda host: host.name,
)
noise = st.sampled_from(["", "   ", "# a comment", "\t# another slots=3"])


@given(some_hosts, st.data())
def test_what_is_written_is_read_again(hosts: list[Host], data: st.DataObject) -> None:
    lines = []
    for host in hosts:
        lines += data.draw(st.lists(noise, max_size=2))
        lines.append(
            f"{data.draw(st.sampled_from(['', '  ']))}{host}{data.draw(st.sampled_from(['', ' # x']))}"
        )
    assert parse_hostfile("\n".join(lines)) == tuple(hosts)


@given(st.text(max_size=200))
def test_any_text_gives_hosts_or_an_error_of_ours(text: str) -> None:
    with suppress(HostfileError):
        hosts = parse_hostfile(text, "f")
        assert hosts
        assert all(host.slots > 0 for host in hosts)


# -- what narrows it down ----------------------------------------------------------------------------


def test_all_slots_of_all_hosts_are_used_by_default() -> None:
    assert slots(choose_slots(THREE)) == {"a": (0, 1, 2, 3), "b": (0, 1), "fe80::1": (0, 1, 2)}


def test_include_names_all_that_is_used() -> None:
    assert slots(choose_slots(THREE, include="a:2,0@b")) == {"a": (0, 2), "b": (0, 1)}
    assert slots(choose_slots(THREE, include="[fe80::1]:1@A:3")) == {"a": (3,), "fe80::1": (1,)}


def test_exclude_names_what_is_not_used() -> None:
    assert slots(choose_slots(THREE, exclude="a:0,2@b")) == {"a": (1, 3), "fe80::1": (0, 1, 2)}
    assert slots(choose_slots(THREE, exclude="[fe80::1]@b:0,1")) == {"a": (0, 1, 2, 3)}


def test_the_hostfiles_order_holds_whatever_the_filters_is() -> None:
    assert [plan.name for plan in choose_slots(THREE, include="b@a")] == ["a", "b"]


def test_limits_take_the_first_of_what_is_left() -> None:
    assert slots(choose_slots(THREE, num_nodes=2, num_accelerators=2)) == {"a": (0, 1), "b": (0, 1)}
    assert slots(choose_slots(THREE, exclude="a:0@b", num_nodes=1, num_accelerators=2)) == {"a": (1, 2)}


def test_an_ipv6_address_is_labelled_in_brackets() -> None:
    assert [plan.label for plan in choose_slots(THREE)] == ["a", "b", "[fe80::1]"]


def test_ports_are_kept() -> None:
    assert choose_slots([Host("a", 1, 2222)])[0].port == 2222


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"include": "a", "exclude": "b"}, "cannot be used together"),
        ({"include": "c"}, '--include: there is no host "c" in the hostfile; its hosts: a, b, [fe80::1].'),
        ({"exclude": "a:4"}, '--exclude: host "a" has no slot 4; it has 4, which count from 0.'),
        ({"include": "a:0@a:1"}, 'host "a" comes twice'),
        ({"include": "a:"}, '"a:" should read host'),
        ({"include": "a:0;1"}, '"a:0;1" should read host'),
        ({"include": "a:x"}, "should read host"),
        ({"include": "@a"}, '"" should read host'),
        ({"include": "[fe80::1"}, "should read host"),
        ({"exclude": "a@b@[fe80::1]"}, "leaves no slot on any host"),
        ({"num_nodes": 4}, "--num_nodes 4 must be between 1 and 3"),
        (
            {"num_accelerators": 3},
            '--num_accelerators 3 must be between 1 and 2: 2 slots are left to use on host "b"',
        ),
    ],
)
def test_a_filter_that_cannot_be_met_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(LaunchOptionError) as caught:
        choose_slots(THREE, **options)  # type: ignore[arg-type]
    assert said in str(caught.value)


@given(st.data(), some_hosts)
def test_include_and_exclude_divide_the_slots(data: st.DataObject, hosts: list[Host]) -> None:
    hosts = [Host(host.name, min(host.slots, 8)) for host in hosts]
    named = {
        host: data.draw(st.sets(st.integers(0, host.slots - 1), min_size=1))
        for host in data.draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True))
    }
    text = "@".join(f"{host.label}:{','.join(map(str, chosen))}" for host, chosen in named.items())
    included = slots(choose_slots(hosts, include=text))
    assert included == {host.name: tuple(sorted(named[host])) for host in hosts if host in named}
    everything = {(host.name, slot) for host in hosts for slot in range(host.slots)}
    inside = {(name, slot) for name, chosen in included.items() for slot in chosen}
    if inside == everything:
        with pytest.raises(LaunchOptionError):
            choose_slots(hosts, exclude=text)
    else:
        excluded = slots(choose_slots(hosts, exclude=text))
        assert {(name, slot) for name, chosen in excluded.items() for slot in chosen} == everything - inside
