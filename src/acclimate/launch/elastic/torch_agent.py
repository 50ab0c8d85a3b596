"""Elastic jobs: ranks restart after a failure, and hosts may join and leave.

torch's elastic agent (its rendezvous and store) decides which hosts take part and when ranks restart. Its
worker on each host is the supervisor of other jobs: it binds ranks, tags output, and leaves no process.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import IO, Any

from torch.distributed import DistError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils.store import barrier

from acclimate.errors import HostUnreachableError
from acclimate.host.exit_codes import shell_code
from acclimate.host.local_address import address_towards
from acclimate.host.process_status import signal_name
from acclimate.launch.elastic.worker import FROM_WORKER, Order
from acclimate.launch.event_loop import EventLoop
from acclimate.launch.plan.hostfile import HostPlan
from acclimate.launch.plan.job import JobPlan
from acclimate.launch.plan.outcome import Outcome
from acclimate.launch.supervise.processes import own_python
from acclimate.launch.supervise.signals import RELAYED, USER_SIGNALS, SignalRelay
from acclimate.launch.wire import decode, encode

_RUN_ID = "acclimate"
_ROLE = "default"
_MONITOR_INTERVAL_S = 0.1
_KEEP_ALIVE_INTERVAL_S = 3
"""A host that misses three of these counts as lost."""
_LAST_CALL_S = 5
"""How long enough hosts wait for further ones."""
_STORE_TIMEOUT_S = 30
"""How long to wait for the host of the rendezvous; torch tries twice."""
_PROBE_AFTER_S = 5.0
_SILENCE_S = 15.0
"""How long a rendezvous that accepts connections may stay silent."""
_LEAVE_S = 5.0
"""How long torch may take to leave the job after the ranks have ended because of a signal."""
_LOOK_AGAIN_S = 1.0
_PAUSE_S = 5.0
"""How long the ranks may take to stop before the launcher stops without them."""


def launch(
    job: JobPlan, environ: Mapping[str, str], *, min_nodes: int, max_nodes: int, max_restarts: int
) -> Outcome:
    """Runs this host's part of an elastic job until the job has ended.

    The job's plan is for this host alone, with the rendezvous's address. Restarts are counted only after a
    failure, not when hosts join and leave.

    Raises:
        HostUnreachableError: the rendezvous does not answer.
    """
    # By default all rounds share one store, where a later round finds the entries of an earlier one, such as
    # addresses at which nobody listens any more.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if job.log_level not in ("debug", "info"):  # torch's warnings repeat the launcher's messages
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    membership = _Membership(job, environ, min_nodes, max_nodes, max_restarts)
    with SignalRelay(RELAYED) as signals:
        try:
            outcome = membership.run(signals)
        except HostUnreachableError:
            membership.abandon(2)
            raise
    membership.abandon(shell_code(outcome.code))
    return outcome


class _Membership:
    """This host's part in the job: a thread that waits in torch, and the main thread, which handles signals.

    torch waits inside C++, where Python's signal handlers do not run, so it runs in its own thread. If torch
    does not return, the process exits without that thread.
    """

    def __init__(
        self, job: JobPlan, environ: Mapping[str, str], min_nodes: int, max_nodes: int, max_restarts: int
    ) -> None:
        self._job, self._environ = job, environ
        self._min_nodes, self._max_nodes, self._max_restarts = min_nodes, max_nodes, max_restarts
        self._place = f"{job.master_addr}:{job.master_port}"
        self._agent: _Agent | None = None
        self._outcome: Outcome | BaseException | None = None
        """The thread's result; ``None`` while it runs."""
        self._left: Outcome | None = None
        """The outcome after a signal that came while no ranks ran."""
        self._ended, self._tell_end = os.pipe()
        self._thread = threading.Thread(target=self._run_and_tell, daemon=True)

    # -- in the main thread --------------------------------------------------------------------------

    def run(self, signals: SignalRelay) -> Outcome:
        """Runs the job to its end, or to a signal while no ranks run."""
        accepted: list[float] = []
        """When the rendezvous first accepted a connection."""
        probe = threading.Thread(target=self._probe, args=[accepted], daemon=True)
        left_at: float | None = None
        self._thread.start()
        with closing(EventLoop()) as loop:
            loop.watch(signals.descriptor, partial(signals.relay, self))
            loop.watch(self._ended, lambda: None)
            loop.after(_PROBE_AFTER_S, lambda: probe.start() if self._agent is None else None)
            while self._outcome is None:
                # The threads wake the loop only at the end.
                loop.wait(time.monotonic() + _LOOK_AGAIN_S)
                if self._left is not None:
                    return self._left
                now = time.monotonic()
                if self._agent is None:
                    if accepted and now > accepted[0] + _SILENCE_S:
                        raise HostUnreachableError(
                            f"the rendezvous at {self._place} accepts connections but does not answer. "
                            "Another program may be listening at that port: choose another with "
                            "--master_port, the same on all hosts."
                        )
                elif self._agent.ended_by is not None and not self._agent.has_worker():
                    left_at = left_at or now
                    if now > left_at + _LEAVE_S:
                        return self._agent.collect()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def abandon(self, exit_code: int) -> None:
        """Exits the process without waiting for the thread, if it is still running.

        Python's normal exit would end the thread while it is in C++, which would abort the process.
        """
        if self._outcome is None:
            atexit.register(_exit_at_once, exit_code)

    def notify(self, number: int) -> None:
        """Sends a notice to the ranks, if any."""
        if self._agent is not None:
            self._agent.forward(number)

    def end_by(self, number: int) -> None:
        """Sends a signal to the ranks, which ends this host's part; without ranks, it ends at once."""
        if (self._agent is None or not self._agent.forward(number)) and self._left is None:
            self._left = Outcome(-number, None, f"{signal_name(number)} ended the wait for other hosts.")

    def pause(self) -> None:
        """Stops this host's ranks.

        Other hosts count this host as lost after a few seconds, since torch's thread stops too.
        """
        if self._agent is not None:
            self._agent.pause()

    def resume(self) -> None:
        """Continues this host's ranks."""
        if self._agent is not None:
            self._agent.resume()

    def _probe(self, accepted: list[float]) -> None:
        """Finds out whether the rendezvous accepts connections."""
        while self._outcome is None:
            with suppress(OSError), socket.create_connection(self._address(), timeout=_LOOK_AGAIN_S):
                accepted.append(time.monotonic())
                return
            time.sleep(_LOOK_AGAIN_S)

    def _address(self) -> tuple[str, int]:
        return str(self._job.master_addr), int(self._job.master_port or 0)

    # -- in torch's thread ---------------------------------------------------------------------------

    def _run_and_tell(self) -> None:
        try:
            self._outcome = self._take_part()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._outcome = error
        finally:
            os.write(self._tell_end, b"\n")

    def _take_part(self) -> Outcome:
        handler = self._meet()
        agent = self._agent = _Agent(
            WorkerSpec(
                role=_ROLE,
                local_world_size=len(self._job.hosts[0].slots),
                rdzv_handler=handler,
                entrypoint=self._job.command[0],
                max_restarts=self._max_restarts,
                monitor_interval=_MONITOR_INTERVAL_S,
            ),
            self._job,
            self._environ,
        )
        closes = True
        try:
            agent.run(_ROLE)
        except RendezvousClosedError:
            code = agent.outcome.code or 1
            agent.outcome = Outcome(code, None, "the job has ended on the other hosts.")
        except RendezvousTimeoutError as error:
            agent.outcome = Outcome(1, None, f"too few hosts joined in time: {_first_line(error)}.")
        except (RendezvousError, DistError):
            closes = False
            lost = f"the rendezvous at {self._place} no longer answers"
            agent.outcome = Outcome(1, None, f"{lost}, so the ranks of this host were ended.")
        if closes and agent.ended_by is None:  # after a signal to this host the others go on
            with suppress(RendezvousError, DistError):
                handler.shutdown()
        return agent.outcome

    def _meet(self) -> RendezvousHandler:
        host, port = self._address()
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            run_id=_RUN_ID,
            min_nodes=self._min_nodes,
            max_nodes=self._max_nodes,
            local_addr=_own_address(host),
            keep_alive_interval=_KEEP_ALIVE_INTERVAL_S,
            last_call_timeout=_LAST_CALL_S,
            read_timeout=_STORE_TIMEOUT_S,
        )
        try:
            return get_rendezvous_handler(parameters)
        except (RendezvousConnectionError, DistError) as error:
            raise HostUnreachableError(
                f"the rendezvous at {self._place} does not answer: {_first_line(error)}. Start the command "
                "on that host too, and let the others reach its port."
            ) from error


class _Agent(SimpleElasticAgent):
    """torch's agent, whose single worker is a supervisor of this host's ranks (:mod:`.worker`)."""

    def __init__(self, spec: WorkerSpec, job: JobPlan, environ: Mapping[str, str]) -> None:
        super().__init__(spec)
        self.job = job
        self.environ = environ
        self.outcome = Outcome(0)
        """The outcome of the last worker."""
        self.ended_by: int | None = None
        """The signal that ends this host's part."""
        self._changing = threading.RLock()
        """Held while the worker is started or reaped, since the main thread sends it signals."""
        self._worker: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        """The file to which the worker writes its outcome."""

    # -- torch's agent calls these -------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, workers = worker_group.spec, worker_group.workers
        before = workers[0].global_rank
        after = workers[0].world_size - before - len(workers)
        own = self.job.hosts[0]
        # Hosts may have different numbers of ranks, so the plan has those before this host, and those after.
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
        order = encode({"order": asdict(Order(job, 1, variables))})
        with self._changing:
            if self.ended_by is not None:
                raise RendezvousGracefulExitError
            # Not a pipe: it is read only at the end, and a rank's last lines may not fit into one.
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - read when the worker has ended
            self._worker = subprocess.Popen(
                own_python("acclimate.launch.elastic.worker", str(self._answer.fileno())),
                stdin=subprocess.PIPE,
                env=dict(self.environ),
                pass_fds=[self._answer.fileno()],
                start_new_session=True,  # this process passes signals on itself
            )
            if self._worker.stdin is not None:
                self._worker.stdin.write(order)
                self._worker.stdin.flush()
            pid = self._worker.pid
        return {worker.local_rank: pid for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.has_worker():
            return RunResult(state=WorkerState.HEALTHY)
        self.collect()
        if self.outcome.code == 0:
            done = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=done)
        if self.ended_by is not None:
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            again = self._worker_group.spec.max_restarts - self._remaining_restarts + 1
            note = f"restarting, {again} of {self._worker_group.spec.max_restarts} times."
            sys.stderr.write(f"{self.outcome.report()}acclimate run: {note}\n")
        return RunResult(state=WorkerState.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_worker()

    def _exit_barrier(self) -> None:
        """Waits until the ranks of all hosts have ended.

        torch's own method shows a traceback if a host was lost while the ranks of the others went on.
        """
        limit_s = self._exit_barrier_timeout
        size = self._worker_group.group_world_size or 1  # only before the first rendezvous is it None
        try:
            barrier(self._store, size, key_prefix="acclimate/ended", barrier_timeout=limit_s)
        except DistStoreError:
            note = f"a host did not report the end of its ranks within {limit_s:.0f} s."
            sys.stderr.write(f"acclimate run: {note}\n")
        except DistError:
            pass  # the host of the rendezvous does not wait until the others have heard of the last end

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_worker()

    # -- the worker ----------------------------------------------------------------------------------

    def has_worker(self) -> bool:
        """Whether ranks are running."""
        return self._worker is not None and self._worker.poll() is None

    def forward(self, number: int) -> bool:
        """Sends a signal to the ranks; returns whether any are running. Most signals end this host's part."""
        with self._changing:
            if number not in USER_SIGNALS:
                self.ended_by = self.ended_by or number
            if self._worker is None or not self.has_worker():
                return False
            self._worker.send_signal(number)
            return True

    def pause(self) -> None:
        """Stops the ranks; returns once they have stopped."""
        deadline = time.monotonic() + _PAUSE_S
        with self._changing:
            if self._worker is None or not self.has_worker():
                return
            self._worker.send_signal(signal.SIGTSTP)
            # Popen reaps it later.
            options = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
            while os.waitid(os.P_PID, self._worker.pid, options) is None and time.monotonic() < deadline:
                time.sleep(0.01)

    def resume(self) -> None:
        """Continues the ranks."""
        with self._changing:
            if self._worker is not None:
                self._worker.send_signal(signal.SIGCONT)

    def collect(self) -> Outcome:
        """Reaps the worker, if there is one, and returns the outcome of the last worker."""
        with self._changing:
            if self._worker is not None and self._answer is not None:
                self._answer.seek(0)
                text = self._answer.read()
                if text:
                    self.outcome = decode(text, FROM_WORKER)["outcome"]
                else:
                    how = f"The supervisor of this host's ranks ended with {self._worker.returncode}"
                    self.outcome = Outcome(1, None, f"{how}, and its ranks with it.")
                self._end_worker()
            return self.outcome

    def _end_worker(self) -> None:
        """Ends the ranks, within their grace period."""
        worker = self._worker
        if worker is None:
            return
        if worker.stdin is not None:
            worker.stdin.close()
        worker.wait()  # without the lock, so that a signal can end it sooner
        with self._changing:
            if self._answer is not None:
                self._answer.close()
            self._worker = self._answer = None


def _exit_at_once(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _own_address(master_addr: str) -> str:
    """Returns the address from which this host connects to the master."""
    with suppress(OSError):
        return address_towards(master_addr)
    return socket.gethostname()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
