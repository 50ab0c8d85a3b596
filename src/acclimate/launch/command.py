"""``acclimate run``: reads the options, plans the hosts and ranks, and runs them to their end."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from importlib.machinery import PathFinder

from acclimate.backends import Backend
from acclimate.errors import BindingError, LaunchOptionError, MissingFileError, excerpt
from acclimate.host.install_hints import pip_install
from acclimate.host.local_address import free_port
from acclimate.host.topology import read_topology
from acclimate.launch.binding.cores import UNBOUND_ADVICE
from acclimate.launch.engines.registry import AUTO, allocating_engine, launch
from acclimate.launch.options import RunOptions, add_arguments, read_options
from acclimate.launch.plan.agent_options import AgentOptions
from acclimate.launch.plan.devices import count_local_ranks, find_accelerator
from acclimate.launch.plan.environment import exported_environment
from acclimate.launch.plan.hostfile import Host, HostPlan, choose_slots, read_hostfile
from acclimate.launch.plan.job import JobPlan, bind_host, plan_ranks
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.supervise.processes import own_python
from acclimate.launch.supervise.supervisor import supervise

__all__ = ["add_arguments", "run", "run_own_module"]

LOCALHOST = "localhost"
BY_HAND_PORT = 29500
"""torch's default port. Nodes that are started by hand all use it, as they cannot agree on a free one."""


def run(args: argparse.Namespace, deepspeed_environment: Callable[[str, str], Mapping[str, str]]) -> int:
    """Runs the job; returns its exit code.

    Args:
        args: the parsed options.
        deepspeed_environment: returns the variables of ``--deepspeed`` and ``--deepspeed_names``, given the
            ranks' ``PYTHONPATH``, and "1" or "names".
    """
    options = read_options(args, os.environ)
    if options.deepspeed or options.deepspeed_names:
        path = options.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        if options.deepspeed and not options.no_python and not _finds_deepspeed(options, path):
            raise LaunchOptionError(
                f"--deepspeed needs DeepSpeed, which is not installed for {sys.executable}. Install it "
                f"({pip_install('deepspeed')}), or use --deepspeed_names, which offers its accelerator "
                "layer's names."
            )
        variables = deepspeed_environment(path, "1" if options.deepspeed else "names")
        options = replace(options, environment={**options.environment, **variables})
    logging.getLogger("acclimate").setLevel(options.log_level.upper())
    accelerator = find_accelerator()
    job = plan_job(options, accelerator, os.environ)
    if (options.node_rank or 0) >= len(job.hosts):
        raise LaunchOptionError(
            f"--node_rank {options.node_rank} must be below {len(job.hosts)}, the number of hosts."
        )
    if options.show_binding:
        _draw(job, options.node_rank or 0)
        return 0
    if options.is_elastic:
        outcome = _run_elastic(job, options)
    elif _runs_here(job.hosts, options):
        outcome = _run_here(job, options)
    else:
        outcome = launch(job, options.launcher)
    with suppress(OSError):  # a full or closed standard error must not change the exit code
        sys.stderr.write(outcome.report())
        sys.stderr.flush()
    return outcome.exit_code()


def _finds_deepspeed(options: RunOptions, python_path: str) -> bool:
    """Whether a rank's Python would find a real package named deepspeed, not the names that we offer."""
    script = os.curdir if options.module or not options.command else os.path.dirname(options.command[0])
    folders = [script or os.curdir, *filter(None, python_path.split(os.pathsep))]
    specs = [PathFinder.find_spec("deepspeed", folders)]
    specs += [finder.find_spec("deepspeed", None) for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(spec is not None and spec.origin is not None for spec in specs)


def run_own_module(
    module: str,
    arguments: Sequence[str],
    *,
    num_accelerators: int,
    core_list: str | None = None,
    name: str,
) -> Outcome:
    """Runs the ``main`` of one of our modules as ranks on this host, each bound to its own cores and memory.

    The ranks' output is shown without tags. They start with SIGINT blocked, since Python prints a traceback
    if it gets one while it starts, and must unblock it once they handle it. Notes to the user begin with
    ``name``.

    Raises:
        BindingError: there are fewer cores than ranks.
    """
    options = RunOptions(num_accelerators=num_accelerators, core_list=core_list)
    accelerator = find_accelerator()
    job = JobPlan(
        hosts=(_this_host(options, accelerator),),
        command=tuple(own_python(module, *arguments)),
        environment={},
        directory=_working_directory(),
        accelerator=accelerator.name if accelerator is not None else "",
        master_addr="127.0.0.1",
        master_port=free_port(),
        bind_cores=True,
        core_list=core_list,
    )
    try:
        ranks = plan_ranks(job, 0, os.environ)
    except BindingError as error:
        # These commands always bind.
        raise BindingError(str(error).replace(UNBOUND_ADVICE, "")) from error
    return supervise(
        ranks, grace_s=options.grace_s, quiet=True, tagged=False, name=name, blocks_interrupt=True
    )


# -- planning ------------------------------------------------------------------------------------


def plan_job(options: RunOptions, accelerator: Backend | None, environ: Mapping[str, str]) -> JobPlan:
    """Returns the job that the options describe."""
    directory = _working_directory()
    job_hosts = _hosts(options, accelerator, environ)
    here = _runs_here(job_hosts, options)
    prefixes = accelerator.exported_variable_prefixes if accelerator is not None else ()
    exported = exported_environment(environ, prefixes)
    settings = {field.name: getattr(options, field.name) for field in fields(AgentOptions)}
    if options.log_dir is not None:
        settings["log_dir"] = os.path.join(directory, options.log_dir)
    return JobPlan(
        hosts=job_hosts,
        command=_command(options, here) if options.command else (),
        environment={**({} if here else exported), **options.environment},
        directory=directory,
        accelerator=accelerator.name if accelerator is not None else "",
        **settings,
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise LaunchOptionError(
            f"the working directory cannot be used: {error.strerror}. It has probably been deleted; cd to "
            "another directory."
        ) from None


def _hosts(
    options: RunOptions, accelerator: Backend | None, environ: Mapping[str, str]
) -> tuple[HostPlan, ...]:
    named: tuple[Host, ...] = ()
    if options.hostfile is not None:
        named = read_hostfile(options.hostfile)
    elif options.node_rank is None:
        engine = allocating_engine(options.launcher, environ)
        if engine is not None:
            named = engine.hosts(environ, options.num_accelerators or count_local_ranks(accelerator))
    if named:
        return choose_slots(
            named,
            include=options.include,
            exclude=options.exclude,
            num_nodes=options.num_nodes,
            num_accelerators=options.num_accelerators,
        )
    here = _this_host(options, accelerator)
    if options.node_rank is not None:
        return tuple(
            replace(here, name=f"node{index}", is_listed=False) for index in range(options.num_nodes or 1)
        )
    if (options.num_nodes or 1) > 1:
        raise LaunchOptionError(
            f"--num_nodes {options.num_nodes} needs a --hostfile, which names the hosts; or start the same "
            "command on each node with --node_rank and --master_addr."
        )
    return (here,)


def _this_host(options: RunOptions, accelerator: Backend | None) -> HostPlan:
    wanted = options.num_accelerators
    # Processors can be divided among any number of ranks, and devices that cannot be counted set no limit.
    limited = (
        accelerator is not None
        and accelerator.visible_devices_variable() is not None
        and accelerator.device_count() > 0
    )
    slots = wanted if wanted is not None and not limited else count_local_ranks(accelerator)
    names = [part.partition(":")[0].strip() for part in (options.include or options.exclude or "").split("@")]
    name = next((name for name in names if _is_here(name)), LOCALHOST)
    (here,) = choose_slots(
        [Host(name, slots)],
        include=options.include,
        exclude=options.exclude,
        num_accelerators=wanted if limited else None,
    )
    return replace(here, is_listed=False)


def _is_here(name: str) -> bool:
    own = socket.gethostname()
    return name.lower() in {LOCALHOST, "127.0.0.1", "::1", own.lower(), own.partition(".")[0].lower()}


def _runs_here(hosts: Sequence[HostPlan], options: RunOptions) -> bool:
    """Whether no engine is needed: nodes are started by hand, or the job is on this host only."""
    if options.node_rank is not None:
        return True
    return options.launcher == AUTO and len(hosts) == 1 and _is_here(hosts[0].name)


def _command(options: RunOptions, here: bool) -> tuple[str, ...]:
    """Returns the command of a rank.

    Raises:
        MissingFileError: the script or program is to run here but does not exist.
    """
    target, *arguments = options.command
    if any("\0" in word for word in options.command):
        raise LaunchOptionError("the command of the ranks contains a NUL character.")
    if options.no_python:
        if here and shutil.which(target) is None:
            raise MissingFileError(
                f"there is no executable program {excerpt(target)}; check its name and PATH."
            )
        return (target, *arguments)
    if options.module:
        return (sys.executable, "-m", target, *arguments)
    if here:
        _check_script(target)
    # Python would take a script named like an option for one.
    script = os.path.join(os.curdir, target) if target.startswith("-") else target
    return (sys.executable, script, *arguments)


def _check_script(target: str) -> None:
    if not os.path.exists(target):
        names_module = not target.endswith(".py") and target.replace(".", "").isidentifier()
        hint = f" To run a module: --module {excerpt(target)}." if names_module else ""
        raise MissingFileError(f"there is no script {excerpt(target)} in {os.getcwd()}.{hint}")
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise MissingFileError(
            f"{excerpt(target)} is a folder without a __main__.py, so Python cannot run it."
        )


# -- running it ----------------------------------------------------------------------------------


def _run_here(job: JobPlan, options: RunOptions) -> Outcome:
    node_rank = options.node_rank or 0
    if options.node_rank is None:
        addr, port = options.master_addr or "127.0.0.1", options.master_port or free_port()
    else:
        addr, port = str(options.master_addr), options.master_port or BY_HAND_PORT
    ranks = plan_ranks(replace(job, master_addr=addr, master_port=port), node_rank, os.environ)
    if len(job.hosts) == 1:
        return supervise(ranks, grace_s=options.grace_s, quiet=options.quiet)
    from acclimate.launch.remote.by_hand import Nodes  # only for a job on many hosts

    nodes = Nodes(node_rank, len(job.hosts), addr, port, options.start_timeout_s)
    nodes.meet()
    outcome = supervise(ranks, grace_s=options.grace_s, quiet=options.quiet, stop=nodes.stop_request())
    return nodes.conclude(outcome)


def _run_elastic(job: JobPlan, options: RunOptions) -> Outcome:
    if len(job.hosts) != 1 or options.hostfile is not None or options.node_rank is not None:
        raise LaunchOptionError(
            "--max_restarts, --min_nodes and --max_nodes start ranks of one host: run the same command on "
            "each host, with --max_nodes and --master_addr, and without --hostfile and --node_rank."
        )
    min_nodes, max_nodes = elastic_nodes(options)
    if max_nodes > 1 and options.master_addr is None:
        raise LaunchOptionError(
            "--max_nodes needs --master_addr: the address of one of the hosts, the same on all, at which "
            "they meet."
        )
    port = options.master_port or (free_port() if max_nodes == 1 else BY_HAND_PORT)
    # torch's agent prints a C++ stack trace for an unreachable address; the launcher prints one line.
    environ = dict(os.environ)
    os.environ["TORCH_CPP_LOG_LEVEL"] = environ.get("TORCH_CPP_LOG_LEVEL") or "FATAL"
    from acclimate.launch.elastic import torch_agent as elastic  # imports torch

    return elastic.launch(
        replace(job, master_addr=options.master_addr or "127.0.0.1", master_port=port),
        environ,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=options.max_restarts,
    )


def elastic_nodes(options: RunOptions) -> tuple[int, int]:
    """Returns the smallest and the largest number of hosts."""
    if options.min_nodes is None and options.max_nodes is None:
        return (1, 1)
    least = options.min_nodes or 1
    return (least, options.max_nodes or least)


def _draw(job: JobPlan, node_rank: int) -> None:
    from rich.console import Console

    from acclimate.launch.binding.diagram import show_binding

    topology = read_topology()
    show_binding(topology, bind_host(job, node_rank, topology, os.environ), Console())
