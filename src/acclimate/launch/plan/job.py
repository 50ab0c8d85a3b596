"""A job on many hosts: all that an agent or a slot there needs, as one piece of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from acclimate.errors import LaunchProtocolError
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.wire import from_wire


@dataclass(frozen=True)
class JobPlan:
    """What runs where. The launcher makes it; whoever starts ranks on a host reads it."""

    hosts: tuple[HostPlan, ...]
    """In the order of node ranks."""
    command: tuple[str, ...]
    """What each rank runs, the interpreter included."""
    environment: Mapping[str, str]
    """Variables of the launcher that are exported to the ranks; nothing else of its environment is."""
    directory: str
    """Working directory of the ranks."""
    accelerator: str
    """Name of the accelerator's record, whose visible-devices variable says which slot is whose."""
    master_addr: str | None = None
    """None: the address of the first host."""
    master_port: int | None = None
    """None: one that is free on the first host."""
    bind_cores: bool = False
    core_list: str | None = None
    use_hyperthreads: bool = False
    local_rank_arg: bool = False
    """Whether ``--local_rank=N`` is appended to the command."""
    grace_s: float = 5.0
    """Between being asked to end and being killed."""
    log_dir: str | None = None
    quiet: bool = False
    log_level: str = "info"
    ssh_port: int | None = None
    """For hosts whose line in the hostfile names none."""
    launcher_args: tuple[str, ...] = ()
    """Passed on to the engine's own program."""

    @property
    def world_size(self) -> int:
        """How many ranks there are in all."""
        return sum(len(host.slots) for host in self.hosts)

    def rank_offset(self, node_rank: int) -> int:
        """Rank of the first slot of a host."""
        return sum(len(host.slots) for host in self.hosts[:node_rank])

    def node_of(self, rank: int) -> int:
        """Node rank of the host that a rank runs on."""
        for node_rank, host in enumerate(self.hosts):
            if rank < len(host.slots):
                return node_rank
            rank -= len(host.slots)
        raise IndexError(f"the job has only {self.world_size} ranks")

    def to_json(self) -> str:
        """One line of JSON, from which :meth:`from_json` makes an equal plan."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> JobPlan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            LaunchProtocolError: it is not one, or one of another release of acclimate.
        """
        try:
            return from_wire(cls, json.loads(text))
        except (ValueError, RecursionError) as error:
            raise LaunchProtocolError(
                f"The plan of the job cannot be read ({error}). Install the same acclimate on all hosts."
            ) from None
