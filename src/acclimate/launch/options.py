"""The options of ``acclimate run``: declared for argparse, and read into typed values."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from acclimate.errors import LaunchOptionError
from acclimate.launch.engines.registry import engine_names
from acclimate.launch.plan.environment import PLACE

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_EXAMPLES = """\
examples:
  acclimate run train.py --epochs 3                     a rank for each device here (CPU: memory node)
  acclimate run --bind_cores_to_rank train.py           each rank on cores and memory of its own
  acclimate run --num_accelerators 4 --bind_cores_to_rank --bind_core_list 0-51,56-107 train.py
  acclimate run --show_binding --num_accelerators 4     draws which cores 4 ranks would get
  acclimate run --hostfile hosts train.py               on all hosts of a file of "host slots=N" lines
  acclimate run --num_nodes 2 --node_rank 0 --master_addr 10.0.0.1 train.py      the same on node 1, with 1

Options come before the script, or before a --; everything after that belongs to the script. Ranks learn
their place from RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT.
OMP_NUM_THREADS is the number of a rank's cores, unless it is set already. The exit code is that of the
first rank that failed, or 128 + the signal that ended it."""


@dataclass(frozen=True)
class RunOptions:
    """What the command line says, checked."""

    command: tuple[str, ...]
    """The script, module or program with its arguments; empty where only the binding is to be drawn."""
    module: bool
    no_python: bool
    hostfile: Path | None
    include: str | None
    exclude: str | None
    num_nodes: int | None
    num_accelerators: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None
    launcher: str
    launcher_args: tuple[str, ...]
    ssh_port: int | None
    bind_cores: bool
    core_list: str | None
    use_hyperthreads: bool
    show_binding: bool
    local_rank_arg: bool
    environment: Mapping[str, str]
    """From ``--env``."""
    log_dir: Path | None
    max_restarts: int
    min_nodes: int | None
    max_nodes: int | None
    grace_s: float
    quiet: bool
    log_level: str

    @property
    def is_elastic(self) -> bool:
        """Whether ranks are to be started anew after a failure, or hosts may come and go."""
        return self.max_restarts > 0 or self.min_nodes is not None or self.max_nodes is not None


class _Options(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate run``."""
    parser.usage = "acclimate run [options] script [its arguments]"
    parser.description = (
        "Start ranks of a script, here or on many hosts, bound to cores, and look after them."
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # An abbreviation here may be one of the script's own options in full.
    parser.allow_abbrev = False
    # Takes all that follows it, options too; unlike argparse.REMAINDER it does not begin with an option.
    script = parser.add_argument(
        "script", nargs=argparse.PARSER, metavar="script", help="what the ranks run, and its arguments"
    )
    script.required = False
    _add_ranks(parser.add_argument_group("ranks"))
    _add_binding(parser.add_argument_group("binding"))
    _add_hosts(parser.add_argument_group("many hosts"))
    _add_supervision(parser.add_argument_group("supervision"))


def _add_ranks(group: _Options) -> None:
    _add(
        group,
        "--num_accelerators",
        "--num_gpus",
        type=_at_least(1),
        metavar="N",
        help="ranks on each host; default: one for each device, on CPU one for each memory node",
    )
    _add(group, "-m", "--module", action="store_true", help="run a module, as python -m does")
    _add(group, "--no_python", action="store_true", help="run a program instead of a Python script")
    _add(
        group,
        "--local_rank_arg",
        action="store_true",
        help="append --local_rank=N to the script's arguments",
    )
    _add(
        group,
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all ranks; without a value, the one it has here (may be repeated)",
    )


def _add_binding(group: _Options) -> None:
    _add(
        group,
        "--bind_cores_to_rank",
        action="store_true",
        help="give each rank cores of its own, and memory near them",
    )
    _add(
        group,
        "--bind_core_list",
        metavar="CORES",
        help="the only cores to be used, as in 0-51,56-107; implies --bind_cores_to_rank",
    )
    _add(
        group,
        "--use_hyperthreads",
        action="store_true",
        help="with --bind_cores_to_rank: use both hardware threads of each core",
    )
    _add(group, "--show_binding", action="store_true", help="draw which cores each rank would get, and end")


def _add_hosts(group: _Options) -> None:
    _add(group, "-H", "--hostfile", type=Path, metavar="FILE", help='one "host slots=N" a line')
    _add(group, "-i", "--include", metavar="WHICH", help="hosts and slots to use, as in host1:0,2@host2")
    _add(group, "-e", "--exclude", metavar="WHICH", help="hosts and slots to leave out, written likewise")
    _add(group, "--num_nodes", type=_at_least(1), metavar="N", help="use only the first N hosts")
    _add(
        group,
        "--node_rank",
        type=_at_least(0),
        metavar="N",
        help="this is node N of --num_nodes; start the same command on each node by hand",
    )
    _add(group, "--master_addr", metavar="ADDRESS", help="of the first host, as the others reach it")
    _add(group, "--master_port", type=_port, metavar="PORT", help="default: a free one")
    _add(
        group,
        "--launcher",
        choices=engine_names(),
        default=engine_names()[0],
        help="how ranks get to other hosts; default: what is installed",
    )
    _add(
        group,
        "--launcher_args",
        default="",
        metavar="ARGS",
        help='more arguments for the launcher\'s program, as in --launcher_args="-A project"',
    )
    _add(group, "--ssh_port", type=_port, metavar="PORT", help="for hosts whose line names none")


def _add_supervision(group: _Options) -> None:
    _add(
        group, "--log_dir", type=Path, metavar="FOLDER", help="also append each rank's output to a file there"
    )
    _add(
        group,
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="between asking ranks to end (SIGTERM) and killing them; default: 5",
    )
    _add(
        group,
        "--max_restarts",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="start all ranks anew after a failure, at most N times; default: 0",
    )
    _add(
        group,
        "--min_nodes",
        type=_at_least(1),
        metavar="N",
        help="elastic: go on while so many hosts are there",
    )
    _add(group, "--max_nodes", type=_at_least(1), metavar="N", help="elastic: let in no more hosts than this")
    _add(group, "-q", "--quiet", action="store_true", help="no notes besides errors and the ranks' output")
    _add(
        group,
        "--log_level",
        choices=LOG_LEVELS,
        default="warning",
        help="info also tells where each rank runs; default: warning",
    )


def _add(group: _Options, *names: str, **settings: Any) -> None:
    """Declares an option, and its spelling with hyphens without showing that in the help."""
    action = group.add_argument(*names, **settings)
    hyphened = [name.replace("_", "-") for name in names if "_" in name]
    if hyphened:
        hidden = {**settings, "dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if hidden.get("action") == "append":
            hidden["default"] = settings["default"]
        group.add_argument(*hyphened, **hidden)


# -- values --------------------------------------------------------------------------------------


def _at_least(least: int) -> Any:
    def whole_number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f'"{text}" has to be a whole number from {least} on')
        return int(text)

    return whole_number


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f'"{text}" has to be a port: a whole number from 1 to 65535')
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f'"{text}" has to be a number of seconds from 0 on')
    return seconds


def read_options(args: argparse.Namespace, environ: Mapping[str, str]) -> RunOptions:
    """The options as typed values.

    Raises:
        LaunchOptionError: one holds what it cannot hold, or two do not go together.
    """
    command = tuple(args.script or ())
    if command[:1] == ("--",):  # ends our options; argparse itself takes it away from some releases on
        command = command[1:]
    if not command and not args.show_binding:
        raise LaunchOptionError(
            "what should the ranks run? Give a script: acclimate run [options] script.py …"
        )
    if args.module and args.no_python:
        raise LaunchOptionError("--module and --no_python do not go together: a module is run by Python.")
    bind_cores = args.bind_cores_to_rank or args.bind_core_list is not None or args.show_binding
    if args.use_hyperthreads and not bind_cores:
        raise LaunchOptionError("--use_hyperthreads says how cores are bound; add --bind_cores_to_rank.")
    if args.node_rank is not None:
        _check_by_hand(args)
    _check_nodes(args)
    try:
        launcher_args = tuple(shlex.split(args.launcher_args))
    except ValueError as error:
        raise LaunchOptionError(f'--launcher_args "{args.launcher_args}": {error}.') from None
    return RunOptions(
        command=command,
        module=args.module,
        no_python=args.no_python,
        hostfile=args.hostfile,
        include=args.include,
        exclude=args.exclude,
        num_nodes=args.num_nodes,
        num_accelerators=args.num_accelerators,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        launcher=args.launcher,
        launcher_args=launcher_args,
        ssh_port=args.ssh_port,
        bind_cores=bind_cores,
        core_list=args.bind_core_list,
        use_hyperthreads=args.use_hyperthreads,
        show_binding=args.show_binding,
        local_rank_arg=args.local_rank_arg,
        environment=_variables(args.env, environ),
        log_dir=args.log_dir,
        max_restarts=args.max_restarts,
        min_nodes=args.min_nodes,
        max_nodes=args.max_nodes,
        grace_s=args.grace,
        quiet=args.quiet,
        log_level=args.log_level,
    )


def _check_by_hand(args: argparse.Namespace) -> None:
    if args.master_addr is None:
        raise LaunchOptionError(
            "--node_rank needs --master_addr: an address of node 0 that every node reaches, the same on all."
        )
    if args.num_nodes is None and args.hostfile is None:
        raise LaunchOptionError(
            "--node_rank needs --num_nodes or --hostfile, which say how many nodes there are."
        )
    if args.num_nodes is not None and args.node_rank >= args.num_nodes:
        raise LaunchOptionError(
            f"--node_rank {args.node_rank} has to be below --num_nodes {args.num_nodes}: nodes count from 0."
        )


def _check_nodes(args: argparse.Namespace) -> None:
    if args.min_nodes is not None and args.max_nodes is not None and args.min_nodes > args.max_nodes:
        raise LaunchOptionError(
            f"--min_nodes {args.min_nodes} is more than --max_nodes {args.max_nodes}; the other way round?"
        )


def _variables(assignments: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What ``--env`` sets."""
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchOptionError(f'--env "{assignment}" should read NAME or NAME=VALUE.')
        if name in PLACE:
            raise LaunchOptionError(f"--env {name}: the launcher sets {name} for each rank itself.")
        if not equals and name not in environ:
            raise LaunchOptionError(f"--env {name}: it is not set here; write --env {name}=VALUE.")
        variables[name] = value if equals else environ[name]
    return variables
