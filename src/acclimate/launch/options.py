"""The options of ``acclimate run``, each declared once, as a field.

Those that agents on other hosts need are in :class:`~acclimate.launch.plan.agent_options.AgentOptions`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from acclimate.errors import LaunchOptionError, excerpt
from acclimate.launch.engines.registry import engine_names
from acclimate.launch.plan.agent_options import (
    AgentOptions,
    binding_option,
    flag,
    hosts_option,
    ranks_option,
    seconds,
    supervision_option,
    whole,
)
from acclimate.launch.plan.environment import SET_BY_LAUNCHER
from acclimate.launch.plan.hostfile import MAX_RANKS_PER_HOST

_MOST_NODES = 1 << 16
ELSEWHERE = {
    "--num_accelerators N": ("--nproc_per_node", "-np", "-n", "--np", "--num_processes"),
    "--num_nodes N, or --min_nodes and --max_nodes": ("--nnodes", "--num_machines"),
    "--node_rank N": ("--machine_rank",),
    "--master_addr ADDRESS": ("--main_process_ip",),
    "--master_port PORT": ("--main_process_port",),
    "--master_addr and --master_port": (
        "--rdzv_endpoint", "--rdzv_backend", "--rdzv_id",
    ),
    "no option: a job on one host finds a free port": ("--standalone",),
    "--log_dir FOLDER": ("--tee", "--redirects"),
    "--hostfile FILE": ("--host", "--hosts", "-host", "-hosts", "--machinefile", "-machinefile"),
    "slots=N in the hostfile, or --num_accelerators N": (
        "-ppn", "--ppn", "-perhost", "-npernode", "--npernode", "-N",
    ),
    "--env NAME=VALUE": ("-x", "-genv", "--genv"),
    "--bind_cores_to_rank": ("--map_by", "--bind_to", "--rank_by", "--cpu_bind"),
    "no option: leave it out": ("--oversubscribe", "--allow_run_as_root", "--multi_gpu"),
    "an argument of Accelerator() in the script": (
        "--mixed_precision", "--config_file", "--use_fsdp", "--use_deepspeed",
    ),
}  # fmt: skip
"""The options of torchrun, mpirun and accelerate that have other names here, by ours."""
_EXAMPLES = """\
examples:
  # a rank for each device here (CPU: memory node)
  acclimate run train.py --epochs 3
  # each rank on cores and memory of its own
  acclimate run --bind_cores_to_rank train.py
  acclimate run --num_gpus 4 --bind_core_list 0-51,56-107 train.py
  # draws which cores 4 ranks would get
  acclimate run --num_accelerators 4 --show_binding
  # on all hosts of a file of "host slots=N" lines
  acclimate run --hostfile hosts train.py
  # on node 0; on node 1 the same with --node_rank 1
  acclimate run --num_nodes 2 --node_rank 0 --master_addr 10.0.0.1 train.py

Options come before the script, or before a --; all later arguments belong to the script. As with torchrun,
ranks read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT.
OMP_NUM_THREADS is the number of a rank's cores, unless you set it. The exit code is that of the
first rank that failed, or 128 + the signal that ended it."""


@dataclass(frozen=True)
class RunOptions(AgentOptions):
    """The checked options of the command line."""

    command: tuple[str, ...] = ()
    """The script, module or program and its arguments; empty if only the binding is to be drawn."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables of ``--env``."""

    num_accelerators: int | None = ranks_option(
        "--num_accelerators",
        "--num_gpus",
        type=whole(1, MAX_RANKS_PER_HOST),
        metavar="N",
        help="ranks on each host; default: one for each device, on CPU one for each memory node",
    )
    module: bool = flag(ranks_option, "-m", "--module", help="run a module, as python -m does")
    no_python: bool = flag(ranks_option, "--no_python", help="run a program instead of a Python script")
    env: tuple[str, ...] = ranks_option(
        "--env",
        default=(),
        action="append",
        metavar="NAME[=VALUE]",
        help="a variable for all ranks; without a value, its value here (may be repeated)",
    )

    deepspeed: bool = flag(
        ranks_option, "--deepspeed", help="run DeepSpeed on the accelerator that acclimate selects"
    )
    deepspeed_names: bool = flag(
        ranks_option,
        "--deepspeed_names",
        help="without DeepSpeed: make the names of its accelerator layer importable",
    )

    show_binding: bool = flag(
        binding_option, "--show_binding", help="draw which cores each rank would get, and exit"
    )

    hostfile: Path | None = hosts_option(  # noqa: RUF009 - is a field
        "-H", "--hostfile", type=Path, metavar="FILE", help='one "host slots=N" a line'
    )
    include: str | None = hosts_option(
        "-i", "--include", metavar="WHICH", help="hosts and slots to use, as in host1:0,2@host2"
    )
    exclude: str | None = hosts_option(
        "-e", "--exclude", metavar="WHICH", help="hosts and slots to leave out, as in --include"
    )
    num_nodes: int | None = hosts_option(
        "--num_nodes", type=whole(1, _MOST_NODES), metavar="N", help="use only the first N hosts"
    )
    node_rank: int | None = hosts_option(
        "--node_rank",
        type=whole(0),
        metavar="N",
        help="this is node N of --num_nodes; start the same command on each node by hand",
    )
    start_timeout_s: float = hosts_option(
        "--start_timeout",
        default=600.0,
        type=seconds,
        metavar="SECONDS",
        help="how long nodes that are started by hand wait for each other; default: %(default)g",
    )
    launcher: str = hosts_option(
        "--launcher",
        default=engine_names()[0],
        choices=engine_names(),
        help="program that starts ranks on other hosts; default: an installed one",
    )

    max_restarts: int = supervision_option(
        "--max_restarts",
        default=0,
        type=whole(0),
        metavar="N",
        help="restart all ranks after a failure, at most N times; default: 0",
    )
    min_nodes: int | None = supervision_option(
        "--min_nodes",
        type=whole(1, _MOST_NODES),
        metavar="N",
        help="elastic: continue with this many hosts or more",
    )
    max_nodes: int | None = supervision_option(
        "--max_nodes",
        type=whole(1, _MOST_NODES),
        metavar="N",
        help="elastic: accept at most this many hosts",
    )

    @property
    def is_elastic(self) -> bool:
        """Whether ranks restart after a failure, or hosts may join and leave."""
        return self.max_restarts > 0 or self.min_nodes is not None or self.max_nodes is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``acclimate run``."""
    parser.usage = "acclimate run [options] script [its arguments]"
    parser.description = (
        "Start ranks of a script, here or on many hosts, bind them to cores, and supervise them."
    )
    parser.epilog = _EXAMPLES
    # An abbreviation of one of our options may be an option of the script.
    parser.allow_abbrev = False
    # PARSER takes all later arguments, including options; unlike REMAINDER, the first cannot be an option.
    script = parser.add_argument(
        "script", nargs=argparse.PARSER, metavar="script", help="what the ranks run, and its arguments"
    )
    script.required = False
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in _OPTIONS:
        group, names, settings = (option.metadata[key] for key in ("group", "names", "settings"))
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        # A repeated option appends to its default, so the default must be a list.
        default = [] if settings.get("action") == "append" else option.default
        groups[group].add_argument(*names, dest=option.name, default=default, **settings)
    for ours, names in ELSEWHERE.items():
        parser.add_argument(
            *names, nargs="?", action=_Elsewhere, metavar=ours, dest=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


class _Elsewhere(argparse.Action):
    """An option of another launcher; its ``metavar`` is what to write here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is an option of another launcher; here it is {self.metavar}")


_OPTIONS = sorted(
    (run_option for run_option in fields(RunOptions) if run_option.metadata),
    key=lambda option: option.name in AgentOptions.__dataclass_fields__,
)
"""In the order of the help: those of the launcher alone come first in each group."""


def read_options(args: argparse.Namespace, environ: Mapping[str, str]) -> RunOptions:
    """Returns the options as typed values.

    Raises:
        LaunchOptionError: a value is impossible, or two options contradict each other.
    """
    command = tuple(args.script or ())
    if command[:1] == ("--",):  # ends our options; newer releases of argparse remove it themselves
        command = command[1:]
    values = {option.name: getattr(args, option.name) for option in _OPTIONS}
    for given_option in _OPTIONS:
        value = values[given_option.name]
        if any("\0" in str(part) for part in (value if isinstance(value, list | tuple) else (value,))):
            raise LaunchOptionError(f"{given_option.metadata['names'][-1]} contains a NUL character.")
    values["env"] = tuple(args.env)
    values["bind_cores"] = args.bind_cores or args.show_binding
    options = RunOptions(command=command, environment=_variables(args.env, environ), **values)
    if not command and not options.show_binding:
        raise LaunchOptionError("there is no script to run. Give one: acclimate run [options] script.py …")
    if options.module and options.no_python:
        raise LaunchOptionError("--module and --no_python contradict each other: Python runs a module.")
    if options.deepspeed and options.deepspeed_names:
        raise LaunchOptionError(
            "--deepspeed needs DeepSpeed and --deepspeed_names replaces it; give only one of them."
        )
    if options.use_hyperthreads and not options.binds:
        raise LaunchOptionError("--use_hyperthreads only affects bound ranks; add --bind_cores_to_rank.")
    if options.node_rank is not None:
        _check_by_hand(options)
    least, most = options.min_nodes, options.max_nodes
    if least is not None and most is not None and least > most:
        raise LaunchOptionError(f"--min_nodes {least} is more than --max_nodes {most}; did you swap them?")
    return options


def _check_by_hand(options: RunOptions) -> None:
    if options.master_addr is None:
        raise LaunchOptionError(
            "--node_rank needs --master_addr: the address of node 0, the same on all nodes."
        )
    if options.num_nodes is None and options.hostfile is None:
        raise LaunchOptionError(
            "--node_rank needs --num_nodes or --hostfile, which say how many nodes there are."
        )
    if options.num_nodes is not None and (options.node_rank or 0) >= options.num_nodes:
        raise LaunchOptionError(
            f"--node_rank {options.node_rank} must be below --num_nodes {options.num_nodes}: nodes count "
            "from 0."
        )


def _variables(assignments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``--env``."""
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchOptionError(f'--env "{excerpt(assignment)}" should read NAME or NAME=VALUE.')
        if name in SET_BY_LAUNCHER:
            raise LaunchOptionError(f"--env {name}: the launcher sets {name} for each rank itself.")
        if not equals and name not in environ:
            raise LaunchOptionError(f"--env {name}: it is not set here; write --env {name}=VALUE.")
        variables[name] = value if equals else environ[name]
    return variables
