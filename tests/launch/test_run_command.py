"""`acclimate run` as its users type it: options, defaults, what ranks find in their environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from control_groups import limited_group
from hypothesis import given
from hypothesis import strategies as st
from launching import command, environment, launched, run

from acclimate import cli
from acclimate.command_line import CommandParser
from acclimate.errors import BindingError, LaunchOptionError
from acclimate.launch.command import run_own_module
from acclimate.launch.options import ELSEWHERE, RunOptions, add_arguments, read_options
from acclimate.launch.plan.environment import SET_BY_LAUNCHER, RankPlace, rank_environment
from ports import free_port

TELL = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


LAUNCHER = [sys.executable, "-m", "acclimate", "run"]


def acclimate_run(
    *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCHER, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(**variables),
        cwd=cwd,
        timeout=240,
    )


def told(ended: subprocess.CompletedProcess[str]) -> list[tuple[dict[str, str], list[str]]]:
    """What each rank found: its variables and arguments, by rank."""
    assert ended.returncode == 0, ended.stderr
    found = [
        json.loads(line[line.index("[[") if "[[" in line else line.index("[{") :])
        for line in ended.stdout.splitlines()
    ]
    return sorted(
        ((variables, arguments) for variables, arguments in found),
        key=lambda one: int(one[0]["RANK"]),
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(TELL)
    return str(path)


# -- what belongs to the script ----------------------------------------------------------------------

OF_THE_SCRIPT = [
    ["--help"],
    pytest.param(["-h"], marks=pytest.mark.slow),
    ["--num_accelerators", "9", "--nope", "-q"],
    pytest.param(
        ["--no"], marks=pytest.mark.slow
    ),  # what argparse would take for an abbreviation of one of ours, or of several
    pytest.param(["--", "--env", "X=1", "--"], marks=pytest.mark.slow),
    pytest.param(["--version", "run", "info"], marks=pytest.mark.slow),
    pytest.param(["-1", "", "two words", "--x=*"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("arguments", OF_THE_SCRIPT, ids=" ".join)
def test_all_after_the_script_belongs_to_the_script(script: str, arguments: list[str]) -> None:
    assert told(acclimate_run("--num_accelerators", "1", script, *arguments))[0][1] == arguments


def test_two_hyphens_end_the_options(script: str) -> None:
    (_, arguments), *_ = told(acclimate_run("--num_gpus", "1", "--", script, "--", "x"))
    assert arguments == ["--", "x"]
    program = ["--num_gpus", "1", "--no_python", "--", sys.executable, "-c", TELL, "y"]
    assert told(acclimate_run(*program))[0][1] == ["y"]


def test_options_before_the_script_are_ours_in_either_spelling(script: str) -> None:
    assert len(told(acclimate_run("--num-accelerators", "2", script))) == 2
    assert len(told(acclimate_run("--num_gpus=2", script))) == 2


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(TELL)
    for option in ("--module", "-m"):
        assert told(acclimate_run(option, "package", "--epochs", "3", cwd=tmp_path))[0][1] == [
            "--epochs",
            "3",
        ]


def test_a_program_is_run_without_python() -> None:
    ended = acclimate_run("--num_accelerators", "2", "--no_python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


def test_local_rank_is_an_argument_only_when_asked_for(script: str) -> None:
    assert [arguments for _, arguments in told(acclimate_run("--num_gpus", "2", script, "a"))] == [
        ["a"],
        ["a"],
    ]
    asked = told(acclimate_run("--num_gpus", "2", "--local_rank_arg", script, "a"))
    assert [arguments for _, arguments in asked] == [["a", "--local_rank=0"], ["a", "--local_rank=1"]]


# -- what ranks find in their environment ------------------------------------------------------------


def test_ranks_learn_their_place_from_the_environment(script: str) -> None:
    ranks = told(acclimate_run("--num_accelerators", "3", script))
    ports = {variables["MASTER_PORT"] for variables, _ in ranks}
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) <= 65535
    for rank, (variables, _) in enumerate(ranks):
        assert {name: variables[name] for name in SET_BY_LAUNCHER if name != "MASTER_PORT"} == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "LOCAL_SIZE": "3",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_the_free_port_is_another_one_each_time_and_nobody_listens_on_it(script: str) -> None:
    ports = {
        int(told(acclimate_run("--num_accelerators", "1", script))[0][0]["MASTER_PORT"]) for _ in range(2)
    }
    assert len(ports) > 1
    for port in ports:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))


@contextmanager
def node_0(*options: str) -> Iterator[list[str]]:
    """Runs node 0 of a job that is started by hand; gives the options of the place where nodes meet."""
    place = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command = [*LAUNCHER, *options, *place, "--node_rank", "0", "--no_python", "true"]
    with subprocess.Popen(command, env=environment()) as first:
        yield place
        assert first.wait(240) == 0


@pytest.mark.slow
def test_nodes_started_by_hand_share_one_job(script: str) -> None:
    by_hand = ["--num_nodes", "2", "--num_accelerators", "2"]
    with node_0(*by_hand) as place:
        (first, _), (second, _) = told(acclimate_run(*by_hand, *place, "--node_rank", "1", script))
    assert [first["RANK"], second["RANK"]] == ["2", "3"]
    assert [first["LOCAL_RANK"], second["LOCAL_RANK"]] == ["0", "1"]
    assert {first[name] for name in ("WORLD_SIZE",)} == {"4"}
    assert (first["NODE_RANK"], first["MASTER_ADDR"], first["MASTER_PORT"]) == ("1", place[1], place[3])


@pytest.mark.slow
def test_a_hostfile_says_how_many_ranks_nodes_have_that_are_started_by_hand(
    script: str, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=3\ntwo slots=1\n")
    with node_0("-H", str(hosts)) as place:
        ((variables, _),) = told(acclimate_run("-H", str(hosts), *place, "--node_rank", "1", script))
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_PORT"]) == ("3", "4", place[3])


def test_a_rank_has_as_many_threads_as_cores(script: str) -> None:
    cores = len(os.sched_getaffinity(0))
    bound = told(
        acclimate_run("--num_accelerators", "1", "--bind_cores_to_rank", "--use_hyperthreads", script)
    )
    assert bound[0][0]["OMP_NUM_THREADS"] == str(cores)
    listed = told(
        acclimate_run(
            "--num_accelerators", "1", "--bind_core_list", str(min(os.sched_getaffinity(0))), script
        )
    )
    assert listed[0][0]["OMP_NUM_THREADS"] == "1"
    crowded = told(acclimate_run("--num_accelerators", str(cores + 1), script))
    assert {variables["OMP_NUM_THREADS"] for variables, _ in crowded} == {"1"}


@pytest.mark.parametrize(
    ("quota_us", "ranks", "threads"),
    [
        (150_000, 1, 1),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in ((100_000, 1, 1), (50_000, 1, 1), (100_000, 2, 1))
        ),
    ],
)
@pytest.mark.parametrize(
    "binding", ["--bind_cores_to_rank", pytest.param("--grace=5", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_has_no_more_threads_than_its_share_of_a_real_quota(
    script: str, quota_us: int, ranks: int, threads: int, binding: str, nested: bool
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor, so a quota changes nothing")
    with limited_group("cpu", quota_us, nested=nested) as join:
        launcher = [*join, *LAUNCHER, "--num_accelerators", str(ranks), binding]
        ended = subprocess.run(
            [*launcher, script], capture_output=True, text=True, timeout=240, env=environment()
        )
    assert [variables["OMP_NUM_THREADS"] for variables, _ in told(ended)] == [str(threads)] * ranks


def test_an_empty_variable_counts_as_unset(script: str) -> None:
    (rank,) = told(acclimate_run("--num_accelerators", "1", script, OMP_NUM_THREADS="", PYTHONUNBUFFERED=""))
    assert int(rank[0]["OMP_NUM_THREADS"]) >= 1


def test_a_number_of_threads_that_is_set_already_is_kept(script: str) -> None:
    assert (
        told(acclimate_run("--bind_cores_to_rank", script, OMP_NUM_THREADS="7"))[0][0]["OMP_NUM_THREADS"]
        == "7"
    )
    assert told(acclimate_run("--env", "OMP_NUM_THREADS=5", script))[0][0]["OMP_NUM_THREADS"] == "5"


def test_a_bound_rank_is_bound_before_it_runs() -> None:
    cpu = max(os.sched_getaffinity(0))
    ended = run(1, "import os; print(os.sched_getaffinity(0))", "--bind_core_list", str(cpu))
    assert ended.stdout == f"{{{cpu}}}\n"


def test_variables_are_given_to_all_ranks(script: str) -> None:
    options = ["--env", "NEW=a=b", "--env", "EMPTY=", "--env=HERE", "--num-gpus", "2"]
    for variables, _ in told(acclimate_run(*options, script, HERE="yes")):
        assert (variables["NEW"], variables["EMPTY"], variables["HERE"]) == ("a=b", "", "yes")


def test_a_launcher_within_torchrun_is_a_job_of_its_own() -> None:
    place = RankPlace(
        rank=1, local_rank=1, world_size=2, local_world_size=2, node_rank=0, master_addr="a", master_port=1
    )
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7", "WORLD_SIZE": "8", "HOME": "/h"}
    inner = rank_environment(outer, place, threads=3, devices={})
    assert "TORCHELASTIC_USE_AGENT_STORE" not in inner
    assert (inner["RANK"], inner["WORLD_SIZE"], inner["HOME"]) == ("1", "2", "/h")


# -- how many ranks, on which devices ----------------------------------------------------------------


def test_the_default_on_cpu_is_a_rank_for_each_memory_node(script: str) -> None:
    from acclimate.host.topology import usable_node_count

    assert len(told(acclimate_run(script, DS_ACCELERATOR="cpu"))) == usable_node_count()


def test_the_default_is_a_rank_for_each_device_of_the_chosen_accelerator(script: str) -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    sim = {"ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": "devices=3"}
    ranks = told(acclimate_run(script, **sim))
    assert [variables["ACCLIMATE_SIM_VISIBLE_DEVICES"] for variables, _ in ranks] == ["0,1,2"] * 3


@pytest.mark.parametrize(
    ("options", "visible", "seen"),
    [
        (["--num_gpus", "2"], None, "0,1"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                (["--include", "localhost:1,2"], None, "1,2"),
                (["--exclude", "localhost:0"], None, "1,2"),
                ([], "2,0", "2,0"),
            )
        ),
        (["--include", "localhost:1"], "2,0", "0"),
    ],
)
def test_ranks_see_the_devices_that_were_chosen(
    script: str, options: list[str], visible: str | None, seen: str
) -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    variables = {"ACCLIMATE_ACCELERATOR": "sim", "ACCLIMATE_SIM": "devices=3"}
    if visible is not None:
        variables["ACCLIMATE_SIM_VISIBLE_DEVICES"] = visible
    ranks = told(acclimate_run(*options, script, **variables))
    assert [found["ACCLIMATE_SIM_VISIBLE_DEVICES"] for found, _ in ranks] == [seen] * len(seen.split(","))


def test_more_ranks_than_devices_are_refused() -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    ended = acclimate_run("--num_gpus", "9", __file__, ACCLIMATE_ACCELERATOR="sim", ACCLIMATE_SIM="devices=3")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--num_accelerators 9 must be between 1 and 3" in ended.stderr


@pytest.mark.parametrize(
    "variable", [pytest.param("DS_ACCELERATOR", marks=pytest.mark.slow), "ACCLIMATE_ACCELERATOR"]
)
def test_a_name_that_cannot_be_counted_is_refused_with_what_is_close(variable: str) -> None:
    ended = acclimate_run(__file__, **{variable: "cdua"})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f'{variable} is "cdua", which is none of' in ended.stderr
    assert 'Did you mean "cuda"?' in ended.stderr


def test_the_launcher_imports_neither_torch_nor_rich(script: str) -> None:
    code = f"""
import sys
from acclimate.cli import main
code = main(["run", "--num_accelerators", "2", "--bind_cores_to_rank", {script!r}])
sys.stderr.write(repr(sorted({{"torch", "rich", "numpy"}} & set(sys.modules))))
sys.exit(code)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=240
    )
    assert (ended.returncode, ended.stderr) == (0, "[]")


@pytest.mark.parametrize(
    "name", ["-c", *(pytest.param(name, marks=pytest.mark.slow) for name in ("--num_accelerators", "-"))]
)
def test_a_script_may_be_named_like_an_option(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(TELL)
    [(_, arguments)] = told(acclimate_run("--num_accelerators", "1", "--", name, "2", cwd=tmp_path))
    assert arguments == ["2"]


# -- mistakes ----------------------------------------------------------------------------------------

MISTAKES = [
    ([], "there is no script to run"),
    (["no_such.py"], "there is no script no_such.py in "),
    (["some.module"], "To run a module: --module some.module."),
    (["--no_python", "no-such-program"], "there is no executable program no-such-program"),
    (["--module", "--no_python", "x"], "contradict each other"),
    (["--num_accelerators", "0", "x"], '"0" must be a whole number of at least 1'),
    (["--num_accelerators", "two", "x"], '"two" must be a whole number of at least 1'),
    (["--num_accelerators"], "expected one argument"),
    (["--master_port", "65536", "x"], '"65536" must be a port'),
    (["--grace", "-1", "x"], '"-1" must be a number of seconds'),
    (["--grace", "nan", "x"], '"nan" must be a number of seconds'),
    (["--no_such_option", "x"], "unrecognized arguments: --no_such_option"),
    (["--num_acc", "2", "x"], "unrecognized arguments: --num_acc"),
    (["--env", "RANK=1", "x"], "the launcher sets RANK for each rank itself"),
    (["--env", "1X=1", "x"], "should read NAME or NAME=VALUE"),
    (["--env", "NOT_SET_HERE", "x"], "it is not set here"),
    (["--node_rank", "0", "x"], "--node_rank needs --master_addr"),
    (["--node_rank", "0", "--master_addr", "a", "x"], "--node_rank needs --num_nodes"),
    (["--node_rank", "2", "--num_nodes", "2", "--master_addr", "a", "x"], "nodes count from 0"),
    (
        ["--hostfile", "h", "--node_rank", "1", "--master_addr", "a", "x"],
        "must be below 1, the number of hosts",
    ),
    (
        ["--hostfile", "h", "--node_rank", "1", "--master_addr", "a", "--show_binding"],
        "must be below 1, the",
    ),
    (["--", "no_such.py"], "there is no script no_such.py in "),
    (["--num_nodes", "2", "x"], "needs a --hostfile"),
    (["--min_nodes", "3", "--max_nodes", "2", "x"], "did you swap them?"),
    (["--use_hyperthreads", "x"], "add --bind_cores_to_rank"),
    (["--launcher", "rsh", "x"], "invalid choice: 'rsh'"),
    (["--launcher_args", "'open", "x"], "No closing quotation"),
    (["--hostfile", "no-such-hosts", "x"], "The hostfile no-such-hosts cannot be read"),
    (["--include", "localhost:0", "--exclude", "localhost:1", "x"], "cannot be used together"),
    (["--bind_core_list", "3-1", "x"], "descends"),
    (["--num_accelerators", "999999999", "x"], "999999999 is too large; it may be at most 4096"),
    (["--num_nodes", "999999999", "--node_rank", "0", "--master_addr", "a", "x"], "is too large"),
    (["--master_addr", "a b", "x"], '"a b" must be an address or the name of a host'),
    (["--hostfile", "many", "x"], "has slots=100000000000000000000; a host runs at most 4096 ranks"),
    (["--hostfile", "nul", "x"], 'nul:1: "a\\x00b" is not the name of a host'),
    (["--hostfile", "/dev/zero", "x"], "/dev/zero is larger than 16 MiB, so it is not a hostfile"),
    (["--include", f"localhost:{'9' * 5000}", "x"], "should read host"),
    (["."], ". is a folder without a __main__.py, so Python cannot run it"),
    (["s" * 100_000], "there is no script sss"),
    (["--log_dir", "/dev/full", "x"], "The log of rank 0 cannot be written: File exists"),
]


@pytest.mark.parametrize(
    ("arguments", "complaint"), MISTAKES, ids=[" ".join(mistake[0])[:60] for mistake in MISTAKES]
)
def test_a_mistake_is_told_and_nothing_is_started(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x").write_text("print('started')")
    (tmp_path / "h").write_text("localhost slots=1")
    (tmp_path / "many").write_text(f"localhost slots={10**20}")
    (tmp_path / "nul").write_text("a\0b slots=1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    try:
        code = cli.main(["run", *arguments])
    except SystemExit as end:  # argparse's way
        code = end.code
    output = capfd.readouterr()
    assert (code, output.out) == (2, "")
    assert complaint in output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--nproc_per_node=4", "--num_accelerators"),
        ("--nproc-per-node", "--num_accelerators"),
        ("-np", "--num_accelerators"),
        ("--nnodes", "--num_nodes"),
        ("--rdzv-endpoint", "--master_addr and --master_port"),
        ("--num_processes", "--num_accelerators"),
        ("--host", "--hostfile"),
        ("-ppn", "slots=N in the hostfile"),
        ("-x", "--env"),
        ("--map-by", "--bind_cores_to_rank"),
        ("--oversubscribe", "no option: leave it out"),
        ("--mixed_precision", "an argument of Accelerator()"),
    ],
)
def test_an_option_of_another_launcher_is_answered_with_ours(
    option: str, ours: str, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", option, "4", script])
    output = capfd.readouterr()
    assert (end.value.code, output.out) == (2, "")
    spelt = option.partition("=")[0].replace("-", "_").replace("__", "--") if "--" in option else option
    assert f"{spelt} is an option of another launcher; here it is {ours}" in output.err


def test_torchruns_spelling_of_the_node_rank_works(script: str) -> None:
    by_hand = [
        "--num-nodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--num_accelerators",
        "1",
    ]
    assert read(*by_hand, script).node_rank == 1


def test_deepspeed_that_is_not_installed_is_an_error_that_says_so(script: str) -> None:
    for target in ([script], ["-m", "json.tool"]):
        ended = acclimate_run("--deepspeed", "--num_accelerators", "1", *target)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "--deepspeed needs DeepSpeed, which is not installed for" in ended.stderr
        assert "--deepspeed_names" in ended.stderr


def test_a_mistake_ends_the_program_with_2(tmp_path: Path) -> None:
    ended = acclimate_run("no_such.py", cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "there is no script no_such.py in " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_working_directory_that_was_deleted_is_told() -> None:
    gone = 'cd "$(mktemp -d)" && rmdir "$PWD" && exec "$@"'
    command = ["sh", "-c", gone, "sh", *LAUNCHER, "--no_python", "true"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=240)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("acclimate run: error: the working directory cannot be used: ")
    assert "Traceback" not in ended.stderr


def test_a_standard_error_that_is_full_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    with open("/dev/full", "w") as full:
        command = [*LAUNCHER, "--num_accelerators", "1", str(tmp_path / "fails.py")]
        ended = subprocess.run(command, stderr=full, env=environment(), timeout=240)
    assert ended.returncode == 7


def test_a_folder_with_a_main_module_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("print('main')")
    ended = acclimate_run("--num_accelerators", "1", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (0, "main\n")


def test_an_option_with_a_nul_character_is_refused() -> None:
    for option, value in (("--bind_core_list", "0\0"), ("--hostfile", "h\0"), ("--env", "A=\0")):
        with pytest.raises(LaunchOptionError, match=f"^{option} contains a NUL character"):
            read(option, value, "s")


def test_help_shows_every_option_in_one_spelling() -> None:
    ended = acclimate_run("--help", COLUMNS="200")
    assert (ended.returncode, ended.stderr) == (0, "")
    elsewhere = {name for names in ELSEWHERE.values() for name in names}
    for option in parser()._option_string_actions.keys() - elsewhere:
        hidden = "-" in option.removeprefix("--") and option.startswith("--")
        assert (f"{option} " in ended.stdout or f"{option}," in ended.stdout) != hidden, option


# -- reading options ---------------------------------------------------------------------------------


@cache
def parser() -> CommandParser:
    made = CommandParser()
    add_arguments(made)
    return made


def read(*arguments: str, **environ: str) -> RunOptions:
    return read_options(parser().parse_args(arguments), environ)


def test_the_defaults_are_the_plain_path() -> None:
    options = read("script.py")
    assert (options.launcher, options.grace_s, options.max_restarts, options.is_elastic) == (
        "auto",
        5.0,
        0,
        False,
    )
    assert (options.bind_cores, options.local_rank_arg, options.quiet) == (False, False, False)


def test_asking_for_restarts_or_nodes_that_come_and_go_is_elastic() -> None:
    assert read("--max_restarts", "1", "s").is_elastic
    assert read("--min_nodes", "1", "s").is_elastic
    assert read("--max-nodes", "4", "s").is_elastic


def test_a_core_list_implies_binding() -> None:
    assert read("--bind-core-list", "0", "s").binds


def test_a_launchers_arguments_are_split_as_a_shell_does() -> None:
    assert read("--launcher_args=-A 'my project' --time=1", "s").launcher_args == (
        "-A",
        "my project",
        "--time=1",
    )


@given(st.lists(st.text(min_size=1), max_size=6))
def test_a_scripts_arguments_arrive_as_they_are(arguments: list[str]) -> None:
    assert read("--num_gpus", "2", "script.py", *arguments).command == ("script.py", *arguments)


@given(st.text(max_size=20))
def test_any_text_for_a_variable_is_taken_or_refused(text: str) -> None:
    try:
        options = read("--env", f"={text}" if text.startswith("-") else text, "s", HOME="/h")
    except LaunchOptionError:
        return
    assert all(name.isidentifier() for name in options.environment)


def test_the_ranks_of_a_quiet_launcher_still_speak(tmp_path: Path) -> None:
    ended = run(2, "print('heard')", "-q")
    assert ended.stdout.count("heard") == 2


def test_at_the_info_level_each_ranks_place_is_told() -> None:
    with launched(
        command(1, "pass", "--log_level", "info", "--bind_core_list", str(min(os.sched_getaffinity(0))))
    ) as job:
        _, stderr = job.read()
    assert f", on processors {min(os.sched_getaffinity(0))}" in stderr
    assert stderr.startswith("acclimate run: rank 0 is pid ")


def test_a_command_that_always_binds_does_not_advise_to_leave_binding_out() -> None:
    with pytest.raises(BindingError, match=r"start at most \d+ \(--num_accelerators \d+\)$"):
        run_own_module("acclimate.__main__", [], num_accelerators=4096, name="acclimate generate")


WAITS_BEFORE_IT_HANDLES = """
import os, signal, sys, time
def main():
    os.write(1, b"up\\n")  # print would write the end of the line by itself, and two ranks share the pipe
    while signal.SIGINT not in signal.sigpending():
        time.sleep(0.01)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    except KeyboardInterrupt:
        os.write(1, b"interrupted\\n")
        sys.exit(3)
"""


def test_an_interrupt_waits_until_a_rank_of_our_own_module_handles_it(tmp_path: Path) -> None:
    (tmp_path / "one_of_ours.py").write_text(WAITS_BEFORE_IT_HANDLES)
    start = (
        "from acclimate.launch.command import run_own_module\n"
        "print(run_own_module('one_of_ours', [], num_accelerators=2, name='acclimate generate').code)"
    )
    with launched([sys.executable, "-c", start], variables={"PYTHONPATH": str(tmp_path)}) as job:
        assert job.process.stdout is not None
        assert [job.process.stdout.readline() for _ in range(2)] == [b"up\n", b"up\n"]
        job.signal(signal.SIGINT)
        stdout, stderr = job.read()
    assert (stdout.splitlines(), stderr) == (["interrupted", "interrupted", "3"], "")
