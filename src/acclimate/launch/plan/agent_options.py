"""The options of ``acclimate run`` that concern every process that starts ranks, on this host or another."""

from __future__ import annotations

from dataclasses import dataclass

from acclimate.launch.plan.option_fields import (
    address,
    binding_option,
    flag,
    hosts_option,
    port,
    ranks_option,
    seconds,
    supervision_option,
    words,
)

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options that a :class:`~acclimate.launch.plan.job.JobPlan` carries to all hosts."""

    local_rank_arg: bool = flag(
        ranks_option, "--local_rank_arg", help="append --local_rank=N to the script's arguments"
    )
    bind_cores: bool = flag(
        binding_option, "--bind_cores_to_rank", help="give each rank its own cores, and memory near them"
    )
    core_list: str | None = binding_option(
        "--bind_core_list",
        metavar="CORES",
        help="the only cores to use, as in 0-51,56-107; implies --bind_cores_to_rank",
    )
    use_hyperthreads: bool = flag(
        binding_option,
        "--use_hyperthreads",
        help="with --bind_cores_to_rank: use both hardware threads of each core",
    )
    master_addr: str | None = hosts_option(
        "--master_addr",
        type=address,
        metavar="ADDRESS",
        help="address of the first host, for the other hosts",
    )
    master_port: int | None = hosts_option(
        "--master_port", type=port, metavar="PORT", help="default: a free one"
    )
    launcher_args: tuple[str, ...] = hosts_option(
        "--launcher_args",
        default=(),
        type=words,
        metavar="ARGS",
        help='more arguments for the launcher\'s program, as in --launcher_args="-A project"',
    )
    ssh_port: int | None = hosts_option(
        "--ssh_port", type=port, metavar="PORT", help="ssh port of hosts without one in the hostfile"
    )
    log_dir: str | None = supervision_option(
        "--log_dir", metavar="FOLDER", help="also append each rank's output to a file there"
    )
    grace_s: float = supervision_option(
        "--grace",
        default=5.0,
        type=seconds,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL when ranks must end; default: %(default)g",
    )
    quiet: bool = flag(supervision_option, "-q", "--quiet", help="print only errors and the ranks' output")
    log_level: str = supervision_option(
        "--log_level",
        default="warning",
        choices=LOG_LEVELS,
        help="info also says where each rank runs; default: %(default)s",
    )

    @property
    def binds(self) -> bool:
        """Whether each rank gets its own cores."""
        return self.bind_cores or self.core_list is not None
