"""Start and end of Horovod's interface, the ranks, and process sets.

The ranks are those of `mpitrain.init()`, so of mpirun or srun. Each process set has a communicator of its own.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpitrain.comm import Communicator
from mpitrain.comm import init as init_world
from mpitrain.comm.faults import ulfm
from mpitrain.comm.inspection import thread_level
from mpitrain.comm.job import abort, launcher
from mpitrain.errors import MpitrainError
from mpitrain.horovod.torch.negotiation import Negotiation
from mpitrain.horovod.torch.submission import HorovodArgumentError, Submission, UnsupportedError


class ProcessSet:
    """Ranks that carry out operations together.

    Args:
        ranks: Their global ranks, or an mpi4py communicator, whose ranks are found by `init(process_sets=...)`.

    Attributes:
        ranks: Global ranks in ascending order; None before they are known.
        process_set_id: Number of the set; None before it is added, and after it was removed.
    """

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm = ranks if hasattr(ranks, "Allgather") else None
        self.ranks: list[int] | None = None
        self.negotiation: Negotiation | None = None
        if self.mpi_comm is None:
            self.ranks = sorted(ranks)
            if not all(isinstance(number, int) for number in self.ranks):
                raise HorovodArgumentError(f"ProcessSet({self.ranks}): pass a list of ranks or an mpi4py communicator")

    def size(self) -> int | None:
        """Return the number of ranks; None if the set was not added."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Return this rank's number in the set; None if the set was not added or lacks this rank."""
        return self.ranks.index(rank()) if self.process_set_id is not None and self.included() and self.ranks else None

    def included(self) -> bool | None:
        """Return whether this rank belongs to the set; None if its ranks are not known."""
        return None if self.ranks is None else rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def require(self) -> Negotiation:
        """Return the negotiation of the set.

        Raises:
            HorovodArgumentError: Horovod is not initialized, or the set was not added, or it lacks this rank.
        """
        if self.negotiation is None:
            _require_world()
            problem = "was not added, or was removed; call hvd.add_process_set on all ranks"
            if self.process_set_id is not None:
                problem = f"lacks rank {rank()}; call the operation on its ranks only"
            raise HorovodArgumentError(f"rank {rank()}: {self} {problem}")
        return self.negotiation

    def _close(self) -> None:
        self.process_set_id = self.negotiation = None


class _Session:
    """State of this process between `init` and `shutdown`."""

    def __init__(self) -> None:
        self.world: Communicator | None = None
        self.survives = False  # true if the job survives the death of ranks
        self.sets: dict[int, ProcessSet] = {}  # by number
        self.next_id = 1

    def begin(self, world: Communicator) -> None:
        """Use the ranks of a world from now on. Collective."""
        self.world, self.next_id = world, 1
        whole = global_process_set
        whole.ranks, whole.process_set_id = list(range(world.size)), 0
        whole.negotiation = Negotiation(world.split(0, world.rank, label="horovod"))
        self.sets = {0: whole}

    def add(self, added: ProcessSet) -> None:
        """Give a set its number and its communicator. Collective over all ranks."""
        assert self.world is not None and added.ranks is not None
        added.process_set_id, self.next_id = self.next_id, self.next_id + 1
        self.sets[added.process_set_id] = added
        comm = self.world.split(0 if added.included() else None, self.world.rank, label=f"horovod{added.ranks}")
        added.negotiation = None if comm is None else Negotiation(comm)

    def leave(self) -> None:
        """End a job that survives the death of ranks: MPI_Finalize could wait for the dead ones."""
        if self.world is not None and self.survives:
            status = abort.exit_status
            ulfm.leave(self.world, status if isinstance(status, int) else int(status is not None))


global_process_set = ProcessSet([])
_session = _Session()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod on all ranks of mpirun. Calling it again does nothing. Collective.

    Args:
        comm: mpi4py communicator of the ranks to use; None for all.
        process_sets: List of `ProcessSet` or of lists of ranks to add. "dynamic" and None add none; sets may be added
            later in any case.

    Raises:
        UnsupportedError: `comm` is a list of ranks.
    """
    if _session.world is not None:
        return
    if isinstance(comm, (list, tuple)) and not comm:
        comm = None
    if isinstance(comm, (list, tuple)):
        raise UnsupportedError(f"hvd.init(comm={comm}): pass an mpi4py communicator of these ranks, or process_sets")
    world = init_world(comm=comm)
    if not launcher.missing_for_faults():
        if not _session.survives:
            world = ulfm.begin(world)
            atexit.register(_session.leave)
        _session.survives = True
    _session.begin(world)
    if process_sets is not None and process_sets != "dynamic":
        for each in process_sets:
            add_process_set(each)


def shutdown() -> None:
    """End Horovod on all ranks; `init` may start it again. Collective. Pending operations are dropped."""
    for each in _session.sets.values():  # the global set first: when all ranks have left it, none waits in another
        if each.negotiation is not None:
            each.negotiation.leave()
        each._close()
    _session.sets.clear()
    _session.world = None


def recover(error: BaseException) -> bool:
    """Continue with the remaining ranks if the death of ranks is the cause of an error. Collective over them.

    Process sets other than the global one are removed.

    Args:
        error: Error that this rank has caught.

    Returns:
        False if no rank died, or if the job does not survive deaths.
    """
    world = _session.world
    if world is None or not _session.survives or not ulfm.ranks_died(world, error):
        return False
    for each in _session.sets.values():
        if each.negotiation is not None:
            each.negotiation.abandon()
        each._close()
    new_world, loss = ulfm.shrink(world)
    if not loss.is_main_part:
        raise MpitrainError(f"ranks {loss.partitioned} are cut off and may still run; start the job again", agreed=True)
    if new_world.rank == 0:
        left = f"{new_world.size} of {world.size} ranks"
        abort.print_error(f"mpitrain: ranks {loss.lost} died; continuing from the last commit with {left}")
    _session.begin(new_world)
    return True


def _require_world() -> Communicator:
    if _session.world is None:
        raise HorovodArgumentError("Horovod has not been initialized; call hvd.init() first")
    return _session.world


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not."""
    return _session.world is not None


def size() -> int:
    """Return the number of ranks."""
    return _require_world().size


def rank() -> int:
    """Return this rank."""
    return _require_world().rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return _require_world().local_size


def local_rank() -> int:
    """Return this rank's number on its node."""
    return _require_world().local_rank


def _counterparts() -> Sequence[int]:
    """Return the ranks with this rank's local rank, one per node that has such a rank."""
    world = _require_world()
    return [r for r in range(world.size) if world.nodes[:r].count(world.nodes[r]) == world.local_rank]


def cross_size() -> int:
    """Return the number of nodes that have a rank with this rank's local rank."""
    return len(_counterparts())


def cross_rank() -> int:
    """Return this rank's number among the ranks with its local rank on all nodes."""
    return _counterparts().index(rank())


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    nodes = _require_world().nodes
    return len({nodes.count(node) for node in nodes}) == 1


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set, and return it. Collective over all ranks.

    Args:
        process_set: The set, or its ranks.

    Raises:
        HorovodArgumentError: A set of the same ranks exists, or a rank does not exist.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world = _require_world()
    if added.ranks is None and added.mpi_comm is not None:
        added.ranks = _ranks_of(added.mpi_comm, world)
    if added.ranks in [each.ranks for each in _session.sets.values()]:
        raise HorovodArgumentError(f"a process set of ranks {added.ranks} exists; use it, or remove it first")
    if not added.ranks or added.ranks != sorted(set(added.ranks).intersection(range(world.size))):
        raise HorovodArgumentError(
            f"process set {added.ranks}: ranks must be different and between 0 and {world.size - 1}"
        )
    call_on_all(global_process_set, f"add_process_set.{added.ranks}", lambda comm: _session.add(added))
    return added


def _ranks_of(comm: Any, world: Communicator) -> list[int]:
    numbers = torch.zeros(comm.size, dtype=torch.int64).numpy()
    comm.Allgather(torch.tensor([world.rank]).numpy(), numbers)
    return sorted(numbers.tolist())


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether it existed. Collective over all ranks. The global set stays."""
    if not process_set.process_set_id:
        return False

    def remove(_: Communicator) -> None:
        _session.sets.pop(process_set.process_set_id or -1, None)
        if process_set.negotiation is not None:
            process_set.negotiation.leave()
        process_set._close()

    call_on_all(global_process_set, f"remove_process_set.{process_set.ranks}", remove)
    return True


def call_on_all(process_set: ProcessSet, name: str, function: Any) -> Any:
    """Call a function once all ranks of a set have asked for it, and return its value. Collective.

    Args:
        process_set: Ranks that call it.
        name: Name that is equal on all ranks.
        function: Function of the set's communicator. It raises an error on all ranks or on none.
    """
    negotiation = process_set.require()
    call = Submission("call", negotiation.full_name("call", name), function=function)
    negotiation.wait(negotiation.submit(call))
    return call.value


# -- what the library offers: everything goes through MPI


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI."""
    _require_world()
    return thread_level() == "MULTIPLE"


def mpi_built() -> bool:
    """Return True: operations use MPI and the memory that ranks of a node share."""
    return True


def mpi_enabled() -> bool:
    """Return True: operations use MPI and the memory that ranks of a node share."""
    return True


def gloo_built() -> bool:
    """Return False: Gloo is not used."""
    return False


def gloo_enabled() -> bool:
    """Return False: Gloo is not used."""
    return False


def nccl_built() -> int:
    """Return 0: scripts would take another number for Horovod's own use of NCCL."""
    return 0


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return False: Horovod's kernels for CUDA are not used. Tensors on devices are communicated in any case."""
    return False


def rocm_built() -> bool:
    """Return False: Horovod's kernels for ROCm are not used. Tensors on devices are communicated in any case."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Refuse: Horovod's timeline is not provided.

    Args:
        file_path, mark_cycles: Ignored.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError("hvd.start_timeline is not provided; record a run of mpitrain.train with monitor.timeline")


def stop_timeline() -> None:
    """Do nothing: no timeline was started."""
