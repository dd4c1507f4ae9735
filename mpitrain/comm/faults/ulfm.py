"""Going on without ranks that died, by MPI's User-Level Failure Mitigation (ULFM; MPI-5.0 calls it fault tolerance).

    a rank dies          MPI knows it on some ranks; operations with it fail there
    revoke               every communicator of this process: whoever waits in one of them is woken by an error
    shrink               a communicator of those that are left, and from it a world like the first
    agree                that all of them have it; else once more

Bland, Bouteiller, Herault, Bosilca and Dongarra, "Post-failure recovery of MPI communication capability", IJHPCA 27
(2013). What belonged to the old world is left as it is: a window shared with a dead rank cannot be freed together.

MPI learns from its own daemon that a process ended, but of a host that is switched off or cut off only by a connection
that fails, to which end the connections' patience is limited (`connections`). The daemon of such a host never answers
mpirun again, which therefore is ended by the ranks (`launcher`).
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

from mpitrain.comm import world as of_process
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.job import connections, launcher
from mpitrain.comm.job.abort import Faults, say
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology, ranks_in
from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.watchdog import Watchdog
from mpitrain.errors import CommunicationError

_NOTICE = 2.0  # seconds in which a death that made an operation fail becomes known
_MOMENT = 0.3  # likewise for one that made an operation give nonsense
_SILENCE = 30.0  # seconds at most in which a host acknowledges what it is sent, else it is lost; see `begin`
_RECOVERING = 1.5  # likewise while the ranks that are left come together


class UlfmFailures:
    """Which ranks of the world died, and all communicators of this process, to be given up at once."""

    def __init__(
        self,
        nodes: Sequence[int],
        neighbours: dict[int, tuple[int, int]],
        mpirun: int,
        silence: float,
        connected: connections.Connections,
    ) -> None:
        """Note who is to be watched.

        Args:
            nodes: The node of each process of MPI_COMM_WORLD.
            neighbours: The number of a process there, on this node, and its pid and pidfd.
            mpirun: Its pid; 0 where it is not on this node.
            silence: Seconds after which a host that does not answer is lost.
            connected: MPI's connections.
        """
        self.processes: tuple[int, ...] = ()  # of each rank of the world, its number in MPI_COMM_WORLD
        self.host_lost = False  # whether a node was lost with all of its ranks
        self.nodes, self._neighbours = tuple(nodes), neighbours
        self.mpirun, self._silence = mpirun, silence
        self.witness = Witness({process: fd for process, (_, fd) in neighbours.items()})
        self._connections = connected
        self._lock = threading.Lock()
        self._comms: list[MPI.Intracomm] = []
        self._given_up = False

    def begin(self, comm: MPI.Intracomm, processes: Sequence[int]) -> None:
        """Watch the ranks of `comm` from now on, and forget the communicators known before."""
        with self._lock:
            self.processes, self._comms, self._given_up = tuple(processes), [comm], False

    def track(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Have a new communicator given up with the others."""
        with self._lock:
            self._comms.append(comm)
            if self._given_up and comm != MPI.COMM_NULL:
                comm.Revoke()
        return comm

    def tracks(self, comm: MPI.Intracomm) -> bool:
        """Whether a communicator is of the present world, and nobody of it is known to have died."""
        with self._lock:
            return not self._given_up and comm in self._comms

    def forget(self, comm: MPI.Intracomm) -> bool:
        """Have a communicator not given up any more: it is about to be freed. The one watched is not to be.

        Returns:
            Whether it may be freed: what belonged to a world that was given up is left as it is.
        """
        with self._lock:
            if self._given_up or comm == self._comms[0] or comm not in self._comms:
                return False
            self._comms = [other for other in self._comms if other != comm]
        return True

    def give_up(self) -> None:
        """Wake all ranks that wait for any other: no operation of the world succeeds any more."""
        with self._lock:
            self._given_up = True
            for comm in self._comms:
                if comm != MPI.COMM_NULL:
                    comm.Revoke()

    def look(self) -> None:
        """Give up the world if a rank of it died or gave it up. Called again and again, from a thread."""
        if len(set(self.nodes)) > 1:
            self._connections.limit(_RECOVERING if self._given_up else self._silence, now=self._given_up)
        if not self._given_up and self.noticed():
            self.give_up()

    def noticed(self) -> bool:
        """Whether a rank is known to have died, or some rank gave the world up."""
        with self._lock:
            if self._given_up or self._comms[0].Is_revoked():
                return True
            failed = self._comms[0].Get_failed()
            count = failed.size
            failed.Free()
        return bool(count)

    def end_silent(self, comm: MPI.Intracomm, silent: Sequence[int], answering: Sequence[int]) -> bool:
        """Kill the silent ranks of the world that run on this node, unless it is not the world of `comm` any more.

        Returns:
            Whether the others run on nodes where a rank that answers will do so.
        """
        with self._lock:
            if comm not in self._comms:
                return True
            lost, others = ([self.processes[rank] for rank in ranks] for ranks in (silent, answering))
        self.witness.silent.update(lost)
        self.kill(lost)
        alone = {self.nodes[process] for process in lost} - {self.nodes[process] for process in others}
        self.host_lost = self.host_lost or bool(alone)
        return not alone

    def kill(self, processes: Sequence[int]) -> None:
        """Kill those of the processes that run on this node."""
        for process in processes:
            if process in self._neighbours:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._neighbours[process][1], signal.SIGKILL)

    def free_mpirun(self, rank: int | None = None) -> None:
        """Have mpirun end where it would wait for the ranks of a lost host for ever. This process ends next.

        Args:
            rank: Its number in the world, if all end together; else mpirun ends only if it is the last of its node.
        """
        if not self.host_lost or not self.mpirun:
            return
        if rank is None:
            launcher.end_soon(self.mpirun, unless=[pid for pid, _ in self._neighbours.values()])
            return
        process = self.processes[rank]
        if process == min(other for other in self.processes if self.nodes[other] == self.nodes[process]):
            say("mpitrain: mpirun is ended, with exit code 137, if it still waits for the lost host in 5 s")
            launcher.end_soon(self.mpirun)


@dataclass(frozen=True)
class Loss:
    """What became of a world.

    Attributes:
        lost: Numbers in MPI_COMM_WORLD of the ranks that it lost.
        left: Those of the ranks that are left.
        partitioned: Those of the lost that may be alive, cut off together with their nodes.
    """

    lost: tuple[int, ...]
    left: tuple[int, ...]
    partitioned: tuple[int, ...]

    @property
    def is_main_part(self) -> bool:
        """Whether no other part of the world that is alive may take itself for what is left of the job."""
        if len(self.left) != len(self.partitioned):
            return len(self.left) > len(self.partitioned)
        return min(self.left) < min(self.partitioned)


def begin(world: Communicator) -> Communicator:
    """A world of the same ranks, some of which may die: then `shrink` it. Collective.

    Across nodes a host that acknowledges nothing for half of comm.timeout, at most 30 s, is lost with its ranks.

    Raises:
        InputError: The MPI does not allow that.
    """
    launcher.require_fault_tolerance(across_nodes=world.num_nodes > 1)
    pids, mpiruns = zip(*world.all_gather_object([os.getpid(), launcher.find()]), strict=True)
    neighbours: dict[int, tuple[int, int]] = {}
    for rank in range(world.size):
        if world.nodes[rank] == world.node and rank != world.rank:
            with suppress(OSError):  # ranks of one node may be in containers of their own
                neighbours[rank] = (pids[rank], os.pidfd_open(pids[rank]))
    mpirun, silence = mpiruns[world.rank], min(_SILENCE, world.process.watchdog.timeout / 2)
    first = mpirun and world.rank == mpiruns.index(mpirun)
    if world.num_nodes > 1 and first and launcher.notices_silent_hosts(mpirun):
        say(
            "mpitrain: mpirun itself ends a job 8 minutes after a host fell silent, whatever the other ranks do; "
            "to go on for longer add --prtemca oob_tcp_keepalive_time 0 to its options"
        )
    connected = connections.find(world.nodes, world.node, world.all_gather_object)
    failures = UlfmFailures(world.nodes, neighbours, mpirun, silence, connected)
    comm = MPI.Intracomm(world._comm.Dup())
    failures.begin(comm, range(world.size))
    made = _make(comm, world._topology, world, failures)
    _replace(world, made)
    return made


def ranks_died(world: Communicator, error: BaseException) -> bool:
    """Whether this error is to be laid to the death of ranks. May take a moment.

    Any error counts: what an operation gave that was under way when a rank died may be anything.
    """
    failures = _failures_of(world)
    deadline = time.monotonic() + (_NOTICE if _of_communication(error) else _MOMENT)
    while not failures.noticed():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def noticed(world: Communicator) -> bool:
    """Whether a rank is known to have died. Not collective, and takes no time."""
    return _failures_of(world).noticed()


def seconds_since(world: Communicator, lost: Sequence[int], otherwise: float) -> tuple[float, bool]:
    """Return how many seconds ago the first lost rank failed, and whether that is an upper bound. Collective.

    Args:
        world: A world that `begin` or `shrink` has made.
        lost: The numbers of the lost ranks in MPI_COMM_WORLD, as far as this rank knows.
        otherwise: Seconds since this rank last knew all of them to be well, which counts where nobody saw one of them
            fail: its whole host was lost, or it had stopped before it was ended.
    """
    witness, now = _failures_of(world).witness, time.monotonic()
    mine = [[process, now - witness.ended.get(process, now + 1)] for process in lost]  # negative: not seen
    told = world.all_gather_object([otherwise, mine, sorted(witness.silent)])
    silent = {process for *_, of in told for process in of}
    ago: dict[int, float] = {}
    for process, seconds in (pair for _, of, _ in told for pair in of):
        ago[process] = max(seconds, ago.get(process, -1.0))
    if any(seconds < 0 or process in silent for process, seconds in ago.items()):
        return max(since for since, *_ in told), True
    return max(ago.values(), default=otherwise), False


def shrink(
    world: Communicator, order: Callable[[Sequence[int]], Sequence[int]] | None = None
) -> tuple[Communicator, Loss]:
    """The world of the ranks that are left, and who is not. Collective over those; call it when `ranks_died`.

    Ranks that die meanwhile are left out as well. Nothing that was made from the old world is of use afterwards.

    Args:
        world: The world that ranks have died of.
        order: Puts the ranks that are left, given by their nodes, into the order that they shall have; the same on all.
    """
    failures = _failures_of(world)
    before = failures.processes
    record = world.process.watchdog.record("elastic")
    record.begin("shrink", None)
    comm, made = MPI.Intracomm(world._comm), None
    while made is None:
        failures.give_up()
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
        made = _try_to_make(comm, ranks, world, failures)
        try:
            made = made if comm.Agree(int(made is not None)) else None  # if all ranks have made it
        except MPI.Exception:  # a rank died meanwhile: raised on all alike
            made = None
    record.end()
    left = failures.processes
    lost = tuple(process for process in before if process not in left)
    alive = {failures.nodes[process] for process in left}
    partitioned = tuple(process for process in lost if failures.nodes[process] not in alive)
    failures.host_lost = failures.host_lost or bool(partitioned)
    failures.kill(lost)  # one that was only stopped must not come back
    _replace(world, made)
    return made, Loss(lost, left, partitioned)


def leave(world: Communicator, code: int) -> None:
    """End this process; all ranks do. Without MPI_Finalize, which may wait for the dead."""
    world.process.watchdog.stop()
    _leave(world._comm, _failures_of(world), code)


def partners(nodes: Sequence[int]) -> list[int]:
    """For each rank the one that keeps a copy for it: another one, on another node as far as there are ranks for it.

    Ranks are put in order of their nodes, and each is given the one as many places on as the largest node has ranks.

    Args:
        nodes: The node of each rank.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    step = max(nodes.count(node) for node in nodes) % len(nodes) or 1
    following = dict(zip(order, order[step:] + order[:step], strict=True))
    return [following[rank] for rank in range(len(nodes))]


def _failures_of(world: Communicator) -> UlfmFailures:
    failures = world.process.failures
    assert isinstance(failures, UlfmFailures), "begin() comes first"
    return failures


def _of_communication(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (MPI.Exception, CommunicationError)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _try_to_make(
    comm: MPI.Intracomm, ranks: Sequence[int], world: Communicator, failures: UlfmFailures
) -> Communicator | None:
    """A world of the ranks of `comm`; None when one died meanwhile. ranks: their old numbers, in their new order."""
    try:
        if list(ranks) != sorted(ranks):
            comm = failures.track(MPI.Intracomm(comm.Split(0, ranks.index(world.rank))))
        topology = replace(world._topology.of(ranks, comm.rank), world_ranks=tuple(range(comm.size)))
        return _make(comm, topology, world, failures)
    except MPI.Exception:
        failures.give_up()  # others may be waiting for this rank
        return None


def _make(comm: MPI.Intracomm, topology: Topology, before: Communicator, failures: UlfmFailures) -> Communicator:
    faults = Faults(failures.track(MPI.Intracomm(comm.Dup())), partial(_end, failures), partial(_leave, comm, failures))
    asking = failures.track(MPI.Intracomm(comm.Dup()))
    watchdog = Watchdog(asking, before.process.watchdog.timeout, faults.end_job, failures)
    faults.before_leaving = watchdog.stop_with_all
    progress = ProgressEngine(lambda: watchdog.records)
    process = replace(
        before.process, arenas=ArenaIndex(), watchdog=watchdog, progress=progress, faults=faults, failures=failures
    )
    return Communicator(comm, topology, process, "world")


def _replace(old: Communicator, new: Communicator) -> None:
    """Let the new world's watchdog and faults do what the old one's did."""
    old.process.watchdog.stop()
    old.process.progress.stop()
    old.process.faults.uninstall()
    new.process.faults.install()
    new.process.watchdog.start()
    of_process.replace(new)


def _end(failures: UlfmFailures, code: int) -> None:
    """End this process so that the others notice: they would wait for one that ends with an exit code."""
    sys.stdout.flush()
    failures.free_mpirun()
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(comm: MPI.Intracomm, failures: UlfmFailures, code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(MPI.Exception):
        comm.Barrier()
    failures.free_mpirun(comm.rank)
    # a host that comes back would tell mpirun of the exit code, which ends all others for any but 0
    if code != 0 and failures.host_lost and not failures.mpirun:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


class Witness:
    """A thread that sleeps until one of some processes of this node ends, and knows when that was to the millisecond.

    MPI itself says only that they have ended.

    Attributes:
        ended: For processes that have ended, when they did, as `time.monotonic` tells.
        silent: Processes that were ended because they had been at fault for some time.
    """

    def __init__(self, pidfds: Mapping[int, int]) -> None:
        """Begin to watch.

        Args:
            pidfds: A descriptor of each process, by whatever number the process has here.
        """
        self._watched = {os.dup(fd): process for process, fd in pidfds.items()}
        self.ended: dict[int, float] = {}
        self.silent: set[int] = set()
        if self._watched:
            threading.Thread(target=self._watch, name="mpitrain-witness", daemon=True).start()

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
