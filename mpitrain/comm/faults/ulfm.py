"""Continuing without ranks that died, by MPI's User-Level Failure Mitigation (ULFM; MPI-5.0 calls it fault tolerance).

    a rank dies          MPI knows it on some ranks; operations with it fail there
    revoke               every communicator of this process: an error wakes each rank that waits in one of them
    shrink               make a communicator of the surviving ranks, and from it a new world
    agree                check that all of them have made it; otherwise repeat

The objects of the old world are not freed: a window shared with a dead rank cannot be freed collectively.

MPI's daemon reports when a process ends. A host that is switched off or cut off is noticed only when a connection to it
fails, so connections get a time limit (`connections`). The daemon of such a host never answers mpirun again, so the
surviving ranks end mpirun (`launcher`).

Reference: Bland, Bouteiller, Herault, Bosilca and Dongarra, "Post-failure recovery of MPI communication capability",
IJHPCA 27 (2013).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from mpitrain.comm import world as world_module
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.job import connections, launcher
from mpitrain.comm.job.abort import Faults, print_error
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology, ranks_in
from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.watchdog import Watchdog
from mpitrain.errors import CommunicationError

_NOTICE = 2.0  # seconds in which a death that made an operation fail becomes known
_MOMENT = 0.3  # seconds in which a death that corrupted the result of an operation becomes known
_SILENCE = 30.0  # seconds after which a host that acknowledges nothing is considered lost, at most; see `begin`
_RECOVERING = 1.5  # the same limit in seconds while the surviving ranks make a new world


class UlfmFailures:
    """Failures of ranks of the world, and all communicators of this process, which are revoked after a failure."""

    def __init__(
        self,
        nodes: Sequence[int],
        neighbours: dict[int, tuple[int, int]],
        mpirun: int,
        silence: float,
        mpi_connections: connections.Connections,
    ) -> None:
        """Store the processes to watch.

        Args:
            nodes: Node of each process of MPI_COMM_WORLD.
            neighbours: Pid and pidfd of the other processes on this node, by rank in MPI_COMM_WORLD.
            mpirun: Pid of mpirun; 0 if it is not on this node.
            silence: Seconds after which a host that does not answer is considered lost.
            mpi_connections: TCP connections of MPI.
        """
        self.processes: tuple[int, ...] = ()  # the rank in MPI_COMM_WORLD of each rank of the world
        self.host_lost = False  # true after a node was lost with all of its ranks
        self.nodes, self._neighbours = tuple(nodes), neighbours
        self.mpirun, self._silence = mpirun, silence
        self.detector = FailureDetector({process: fd for process, (_, fd) in neighbours.items()})
        self._connections = mpi_connections
        self._lock = threading.Lock()
        self._comms: list[MPI.Intracomm] = []
        self._revoked = False

    def begin(self, comm: MPI.Intracomm, processes: Sequence[int]) -> None:
        """Watch the ranks of a new world from now on, and forget all communicators of the old one.

        Args:
            comm: Communicator of the new world's ranks.
            processes: Rank in MPI_COMM_WORLD of each rank of `comm`.
        """
        with self._lock:
            self.processes, self._comms, self._revoked = tuple(processes), [comm], False

    def track(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return the communicator, after adding it to those that are revoked after a failure.

        If a failure has already occurred, revoke it at once.
        """
        with self._lock:
            self._comms.append(comm)
            if self._revoked and comm != MPI.COMM_NULL:
                comm.Revoke()
        return comm

    def is_tracked(self, comm: MPI.Intracomm) -> bool:
        """Return True if a communicator belongs to the current world and no failure is known."""
        with self._lock:
            return not self._revoked and comm in self._comms

    def forget(self, comm: MPI.Intracomm) -> bool:
        """Stop tracking a communicator that is about to be freed.

        Returns:
            True if the communicator may be freed; False if its world was given up, whose communicators are never freed,
            or if it is the one by which failures are watched.
        """
        with self._lock:
            if self._revoked or comm == self._comms[0] or comm not in self._comms:
                return False
            self._comms = [other for other in self._comms if other != comm]
        return True

    def revoke_all(self) -> None:
        """Revoke all communicators, which wakes every waiting rank. No operation of this world succeeds afterwards."""
        with self._lock:
            self._revoked = True
            for comm in self._comms:
                if comm != MPI.COMM_NULL:
                    comm.Revoke()

    def check(self) -> None:
        """Call `revoke_all` if a rank has died or has given the world up. A thread calls this periodically."""
        if len(set(self.nodes)) > 1:
            self._connections.limit(_RECOVERING if self._revoked else self._silence, now=self._revoked)
        if not self._revoked and self.has_failure():
            self.revoke_all()

    def has_failure(self) -> bool:
        """Return True if a rank is known to have died, or if any rank gave the world up."""
        with self._lock:
            if self._revoked or self._comms[0].Is_revoked():
                return True
            failed = self._comms[0].Get_failed()
            count = failed.size
            failed.Free()
        return bool(count)

    def kill_silent(self, comm: MPI.Intracomm, silent: Sequence[int], answering: Sequence[int]) -> bool:
        """Kill the silent ranks that run on this node, unless `comm` no longer belongs to the current world.

        Args:
            comm: Communicator of the world in which the ranks were silent.
            silent: World ranks that do not answer.
            answering: World ranks that answer.

        Returns:
            False if a silent rank is on a node without an answering rank, so that nobody can kill it; else True.
        """
        with self._lock:
            if comm not in self._comms:
                return True
            lost, others = ([self.processes[rank] for rank in ranks] for ranks in (silent, answering))
        self.detector.silent.update(lost)
        self.kill(lost)
        alone = {self.nodes[process] for process in lost} - {self.nodes[process] for process in others}
        self.host_lost = self.host_lost or bool(alone)
        return not alone

    def kill(self, processes: Sequence[int]) -> None:
        """Kill the processes (ranks of MPI_COMM_WORLD) that run on this node; ignore the others."""
        for process in processes:
            if process in self._neighbours:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._neighbours[process][1], signal.SIGKILL)

    def end_mpirun_of_lost_host(self, rank: int | None = None) -> None:
        """End mpirun if it would wait for ever for the ranks of a lost host. Call this just before this process ends.

        Args:
            rank: This rank in the world, if all ranks end together. If None, mpirun is ended only if no other rank of
                this node still runs.
        """
        if not self.host_lost or not self.mpirun:
            return
        if rank is None:
            launcher.end_soon(self.mpirun, unless=[pid for pid, _ in self._neighbours.values()])
            return
        process = self.processes[rank]
        if process == min(other for other in self.processes if self.nodes[other] == self.nodes[process]):
            print_error("mpitrain: if mpirun still waits for the lost host in 5 s, it is ended with exit code 137")
            launcher.end_soon(self.mpirun)


@dataclass(frozen=True)
class Loss:
    """Outcome of `shrink`. All numbers are ranks in MPI_COMM_WORLD.

    Attributes:
        lost: Ranks that are no longer part of the world.
        left: Ranks that form the new world.
        partitioned: Lost ranks that may still be alive, cut off together with their nodes.
    """

    lost: tuple[int, ...]
    left: tuple[int, ...]
    partitioned: tuple[int, ...]

    @property
    def is_main_part(self) -> bool:
        """True if this part of the job may continue: a part that was cut off cannot come to the same conclusion.

        The larger part continues; of two parts of equal size, the one with the smallest rank.
        """
        if len(self.left) != len(self.partitioned):
            return len(self.left) > len(self.partitioned)
        return min(self.left) < min(self.partitioned)


def begin(world: Communicator) -> Communicator:
    """Return a world of the same ranks that survives the death of some of them: call `shrink` then. Collective.

    With several nodes, a host that acknowledges nothing for half of comm.timeout, at most 30 s, is considered lost with
    all of its ranks.

    Raises:
        InputError: The MPI library does not support this, or fault tolerance is off.
    """
    launcher.require_fault_tolerance(across_nodes=world.num_nodes > 1)
    pids, mpiruns = zip(*world.all_gather_object([os.getpid(), launcher.find_mpirun()]), strict=True)
    neighbours: dict[int, tuple[int, int]] = {}
    for rank in range(world.size):
        if world.nodes[rank] == world.node and rank != world.rank:
            with suppress(OSError):  # ranks of one node may run in separate containers
                neighbours[rank] = (pids[rank], os.pidfd_open(pids[rank]))
    mpirun, silence = mpiruns[world.rank], min(_SILENCE, world.process.watchdog.timeout / 2)
    first = mpirun and world.rank == mpiruns.index(mpirun)
    if world.num_nodes > 1 and first and launcher.notices_silent_hosts(mpirun):
        print_error(
            "mpitrain: mpirun ends the job 8 minutes after a host stops answering, even if the other ranks continue; "
            "to prevent this, start the job with mpirun --prtemca oob_tcp_keepalive_time 0"
        )
    mpi_connections = connections.find(world.nodes, world.node, world.all_gather_object)
    failures = UlfmFailures(world.nodes, neighbours, mpirun, silence, mpi_connections)
    comm = MPI.Intracomm(world._comm.Dup())
    failures.begin(comm, range(world.size))
    new_world = _make_world(comm, world._topology, world, failures)
    _replace_world(world, new_world)
    return new_world


def ranks_died(world: Communicator, error: BaseException) -> bool:
    """Return True if the death of ranks is the cause of an error. May take up to 2 s.

    Any error qualifies, because an operation during which a rank died may have returned arbitrary data.

    Args:
        world: World made by `begin` or `shrink`.
        error: Error that this rank has caught.
    """
    failures = _failures_of(world)
    deadline = time.monotonic() + (_NOTICE if _is_communication_error(error) else _MOMENT)
    while not failures.has_failure():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def has_failure(world: Communicator) -> bool:
    """Return True if a rank is known to have died. Not collective; returns at once."""
    return _failures_of(world).has_failure()


def seconds_since_failure(world: Communicator, lost: Sequence[int], fallback: float) -> tuple[float, bool]:
    """Return how many seconds ago the first lost rank failed, and whether that is an upper bound. Collective.

    Args:
        world: World made by `begin` or `shrink`.
        lost: Ranks in MPI_COMM_WORLD of the lost ranks, as far as this rank knows.
        fallback: Seconds since this rank last knew that all of them were alive. The largest value of all ranks is
            returned, as an upper bound, if no rank observed a failure: a whole host was lost, or a rank had stopped
            before it was killed.
    """
    detector, now = _failures_of(world).detector, time.monotonic()
    mine = [[process, now - detector.ended.get(process, now + 1)] for process in lost]  # negative: not seen
    reports = world.all_gather_object([fallback, mine, sorted(detector.silent)])
    silent = {process for *_, processes in reports for process in processes}
    ago: dict[int, float] = {}
    for process, seconds in (pair for _, pairs, _ in reports for pair in pairs):
        ago[process] = max(seconds, ago.get(process, -1.0))
    if any(seconds < 0 or process in silent for process, seconds in ago.items()):
        return max(since for since, *_ in reports), True
    return max(ago.values(), default=fallback), False


def shrink(
    world: Communicator, order: Callable[[Sequence[int]], Sequence[int]] | None = None
) -> tuple[Communicator, Loss]:
    """Return a world of the surviving ranks, and the loss. Collective over these ranks; call it if `ranks_died`.

    Ranks that die during the call are left out as well. Objects made from the old world cannot be used afterwards.

    Args:
        world: World in which ranks have died.
        order: Function that maps the node of each surviving rank to the order of these ranks in the new world, as
            indices into its argument; the same on all ranks. Default: the old order.
    """
    failures = _failures_of(world)
    before = failures.processes
    record = world.process.watchdog.record("elastic")
    record.begin("shrink", None)
    comm, new_world = MPI.Intracomm(world._comm), None
    while new_world is None:
        failures.revoke_all()
        try:
            comm = MPI.Intracomm(comm.Shrink())
        except MPI.Exception:
            time.sleep(0.01)
            continue
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        ranks = ranks_in(comm, world._comm)
        if order is not None:
            ranks = [ranks[place] for place in order([world.nodes[rank] for rank in ranks])]
        failures.begin(comm, [before[rank] for rank in ranks])
        new_world = _try_to_make_world(comm, ranks, world, failures)
        try:
            new_world = new_world if comm.Agree(int(new_world is not None)) else None  # unless all ranks have made it
        except MPI.Exception:  # a rank died during the agreement: raised on all ranks
            new_world = None
    record.end()
    left = failures.processes
    lost = tuple(process for process in before if process not in left)
    alive = {failures.nodes[process] for process in left}
    partitioned = tuple(process for process in lost if failures.nodes[process] not in alive)
    failures.host_lost = failures.host_lost or bool(partitioned)
    failures.kill(lost)  # a process that was only stopped must not come back
    _replace_world(world, new_world)
    return new_world, Loss(lost, left, partitioned)


def leave(world: Communicator, code: int) -> None:
    """End this process, without MPI_Finalize, which may wait for dead ranks. All ranks must call this.

    Args:
        world: World made by `begin` or `shrink`.
        code: Exit code.
    """
    world.process.watchdog.stop()
    _leave(world._comm, _failures_of(world), code)


def partners(nodes: Sequence[int]) -> list[int]:
    """Return for each rank another rank that keeps a copy of its data, on another node if possible.

    Ranks are sorted by node. The partner of a rank is the one n places further on (cyclically), where n is the largest
    number of ranks on a node.

    Args:
        nodes: Node of each rank.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    step = max(nodes.count(node) for node in nodes) % len(nodes) or 1
    following = dict(zip(order, order[step:] + order[:step], strict=True))
    return [following[rank] for rank in range(len(nodes))]


def _failures_of(world: Communicator) -> UlfmFailures:
    failures = world.process.failures
    assert isinstance(failures, UlfmFailures), "begin() comes first"
    return failures


def _is_communication_error(error: BaseException | None) -> bool:
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        if isinstance(error, (MPI.Exception, CommunicationError)):
            return True
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _try_to_make_world(
    comm: MPI.Intracomm, ranks: Sequence[int], world: Communicator, failures: UlfmFailures
) -> Communicator | None:
    """Return a world of the ranks of `comm`; None if one died meanwhile. `ranks`: their old ranks, in new order."""
    try:
        if list(ranks) != sorted(ranks):
            comm = failures.track(MPI.Intracomm(comm.Split(0, ranks.index(world.rank))))
        topology = replace(world._topology.subgroup(ranks, comm.rank), world_ranks=tuple(range(comm.size)))
        return _make_world(comm, topology, world, failures)
    except MPI.Exception:
        failures.revoke_all()  # other ranks may be waiting for this one
        return None


def _make_world(comm: MPI.Intracomm, topology: Topology, before: Communicator, failures: UlfmFailures) -> Communicator:
    faults = Faults(failures.track(MPI.Intracomm(comm.Dup())), partial(_end, failures), partial(_leave, comm, failures))
    asking = failures.track(MPI.Intracomm(comm.Dup()))
    watchdog = Watchdog(asking, before.process.watchdog.timeout, faults.end_job, failures)
    faults.before_leaving = watchdog.stop_with_all
    progress = ProgressEngine(lambda: watchdog.records, before.process.progress.naps)
    process = replace(
        before.process, arenas=ArenaIndex(), watchdog=watchdog, progress=progress, faults=faults, failures=failures
    )
    return Communicator(comm, topology, process, "world")


def _replace_world(old: Communicator, new: Communicator) -> None:
    """Transfer the duties of the old world's watchdog and fault handler to those of the new world."""
    old.process.watchdog.stop()
    old.process.progress.stop()
    old.process.faults.uninstall()
    new.process.faults.install()
    new.process.watchdog.start()
    world_module.replace_world(new)


def _end(failures: UlfmFailures, code: int) -> None:
    """Kill this process, so that the other ranks notice: MPI would wait for a process that ends with an exit code."""
    sys.stdout.flush()
    failures.end_mpirun_of_lost_host()
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(comm: MPI.Intracomm, failures: UlfmFailures, code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(MPI.Exception):
        comm.Barrier()
    failures.end_mpirun_of_lost_host(comm.rank)
    # a host that comes back would report the exit code to mpirun, which ends all other ranks for any code but 0
    if code != 0 and failures.host_lost and not failures.mpirun:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


class FailureDetector:
    """A thread that records when processes of this node end, to the millisecond. MPI reports only that they have ended.

    Attributes:
        ended: `time.monotonic()` at which each ended process ended, by the number of the process.
        silent: Processes that were killed because they did not answer. They failed some time before they ended.
    """

    def __init__(self, pidfds: Mapping[int, int]) -> None:
        """Start to watch.

        Args:
            pidfds: Pidfd of each process, by a number of the caller's choice.
        """
        self._watched = {os.dup(fd): process for process, fd in pidfds.items()}
        self.ended: dict[int, float] = {}
        self.silent: set[int] = set()
        if self._watched:
            threading.Thread(target=self._watch, name="mpitrain-failures", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        for fd in self._watched:
            poll.register(fd, select.POLLIN)
        while self._watched:
            for fd, _ in poll.poll():
                self.ended[self._watched[fd]] = time.monotonic()
                poll.unregister(fd)
                del self._watched[fd]
                os.close(fd)
