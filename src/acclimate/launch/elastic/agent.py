"""Jobs whose ranks are started anew after a failure, and whose hosts may come and go.

torch's elastic agent decides who takes part and when to start anew (its rendezvous, its store); the ranks of
each generation are supervised as those of any job here: bound, tagged, and none of their processes left.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import IO, Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from acclimate.errors import HostUnreachableError
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome, signal_name
from acclimate.launch.remote.addresses import address_towards
from acclimate.launch.supervise.own_python import own_python
from acclimate.launch.supervise.signals import TERMINATING
from acclimate.launch.wire import from_wire

_RUN_ID = "acclimate"
_ROLE = "default"
_MONITOR_INTERVAL_S = 0.1
_KEEP_ALIVE_INTERVAL_S = 3
"""A host that misses three of them counts as gone."""
_LAST_CALL_S = 5
"""How long hosts that are enough wait for more."""
_STORE_TIMEOUT_S = 30
"""How long to wait for the host where all meet; torch tries twice."""


def launch(
    job: JobPlan, environ: Mapping[str, str], *, min_nodes: int, max_nodes: int, max_restarts: int
) -> Outcome:
    """Takes this host's part in an elastic job, until the job has ended.

    Args:
        job: with one host, this one, and the address and port of the rendezvous.
        environ: the variables that ranks inherit.
        min_nodes, max_nodes: how many hosts take part.
        max_restarts: how often ranks are started anew after a failure; hosts that come and go do not count.

    Raises:
        HostUnreachableError: nobody answers at the rendezvous.
    """
    # torch would have all generations share one store, where a later one finds what an earlier one's ranks
    # wrote, such as addresses at which nobody listens any more.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if job.log_level not in ("debug", "info"):  # its warnings say what is said here
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    place = f"{job.master_addr}:{job.master_port}"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"[{job.master_addr}]:{job.master_port}" if ":" in str(job.master_addr) else place,
        run_id=_RUN_ID,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        local_addr=_own_address(str(job.master_addr)),
        keep_alive_interval=_KEEP_ALIVE_INTERVAL_S,
        last_call_timeout=_LAST_CALL_S,
        read_timeout=_STORE_TIMEOUT_S,
    )
    try:
        handler = get_rendezvous_handler(parameters)
    except (RendezvousConnectionError, DistError) as error:
        raise HostUnreachableError(
            f"nobody answers at {place}, where the job's hosts meet: {_first_line(error)}. Start the command "
            "on that host too, and let the others reach its port."
        ) from error
    agent = _Agent(
        WorkerSpec(
            role=_ROLE,
            local_world_size=len(job.hosts[0].slots),
            rdzv_handler=handler,
            entrypoint=job.command[0],
            max_restarts=max_restarts,
            monitor_interval=_MONITOR_INTERVAL_S,
        ),
        job,
        environ,
    )
    closes = True
    try:
        with _signals_to(agent):
            agent.run(_ROLE)
    except SignalException as error:
        closes = False  # the other hosts go on
        number = int(error.sigval)
        agent.outcome = Outcome(128 + number, None, f"{signal_name(number)} ended the wait for other hosts.")
    except RendezvousClosedError:
        agent.outcome = Outcome(agent.outcome.exit_code or 1, None, "the job has ended on the other hosts.")
    except RendezvousTimeoutError as error:
        agent.outcome = Outcome(1, None, f"the hosts did not come together: {_first_line(error)}.")
    except (RendezvousError, DistError):
        closes = False
        lost = f"{place}, where the job's hosts meet, does not answer any more"
        agent.outcome = Outcome(1, None, f"{lost}, so the ranks of this host were ended.")
    if agent.ended_by is not None:
        closes = False
    if closes:
        with suppress(RendezvousError, DistError):
            handler.shutdown()
    return agent.outcome


class _Agent(SimpleElasticAgent):
    """torch's agent, with a supervised generation as its workers."""

    def __init__(self, spec: WorkerSpec, job: JobPlan, environ: Mapping[str, str]) -> None:
        super().__init__(spec)
        self.job = job
        self.environ = environ
        self.outcome = Outcome(0)
        """How the last generation ended."""
        self.ended_by: int | None = None
        self._generation: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        """Where the generation writes how it ended."""

    # -- what torch's agent asks for -----------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, workers = worker_group.spec, worker_group.workers
        before = workers[0].global_rank
        after = workers[0].world_size - before - len(workers)
        own = self.job.hosts[0]
        # Hosts may have different numbers of ranks, so what counts is how many ranks are before and after.
        job = replace(
            self.job,
            hosts=(HostPlan("before", tuple(range(before))), own, HostPlan("after", tuple(range(after)))),
            master_addr=worker_group.master_addr,
            master_port=worker_group.master_port,
        )
        variables = {
            "NODE_RANK": str(worker_group.group_rank),
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        }
        order = json.dumps({"job": job.to_json(), "node_rank": 1, "variables": variables})
        # No pipe: nobody reads before the end, and what a rank wrote last may be too much for one.
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - read when the generation has ended
        self._generation = subprocess.Popen(
            own_python("acclimate.launch.elastic.worker", str(self._answer.fileno())),
            stdin=subprocess.PIPE,
            env=dict(self.environ),
            pass_fds=[self._answer.fileno()],
            start_new_session=True,  # this process passes signals on itself
        )
        if self._generation.stdin is not None:
            self._generation.stdin.write(order.encode() + b"\n")
            self._generation.stdin.flush()
        return {worker.local_rank: self._generation.pid for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._generation is not None and self._generation.poll() is None:
            return RunResult(state=WorkerState.HEALTHY)
        self._collect()
        if self.outcome.exit_code == 0:
            done = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=done)
        if self.ended_by is not None:
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            again = self._worker_group.spec.max_restarts - self._remaining_restarts + 1
            note = f"starting anew, {again} of {self._worker_group.spec.max_restarts} times."
            sys.stderr.write(f"{self.outcome.report()}acclimate run: {note}\n")
        return RunResult(state=WorkerState.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_generation()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_generation()

    # -- the generation ------------------------------------------------------------------------------

    def pass_on(self, number: int) -> bool:
        """Sends a signal to the ranks, after which they are not started anew; whether there were any."""
        self.ended_by = self.ended_by or number
        if self._generation is None or self._generation.poll() is not None:
            return False
        self._generation.send_signal(number)
        return True

    def _end_generation(self) -> None:
        if self._generation is None:
            return
        if self._generation.stdin is not None:
            self._generation.stdin.close()
        self._generation.wait()  # the supervisor keeps to the grace
        if self._answer is not None:
            self._answer.close()
        self._generation = self._answer = None

    def _collect(self) -> None:
        """Reads how the generation ended."""
        if self._generation is None or self._answer is None:
            return
        self._answer.seek(0)
        text = self._answer.read()
        if text:
            self.outcome = from_wire(Outcome, json.loads(text))
        else:
            how = f"The supervisor of this host's ranks ended with {self._generation.returncode}"
            self.outcome = Outcome(1, None, f"{how}, and its ranks with it.")
        self._end_generation()


@contextmanager
def _signals_to(agent: _Agent) -> Iterator[None]:
    """Passes signals on to the ranks; where there are none, ends the agent."""

    def take(number: int, frame: FrameType | None) -> None:
        if not agent.pass_on(number):
            raise SignalException(f"{signal_name(number)} came", signal.Signals(number))

    before = {number: signal.getsignal(number) for number in TERMINATING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own_address(master_addr: str) -> str:
    """The address of this host on the way to the master."""
    with suppress(OSError):
        return address_towards(master_addr)
    return socket.gethostname()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
