"""The name "mpitrain" in torch.distributed: how its groups are made, and how ranks find each other (they know).

Ranks need no address: MPI has connected them. The store that torch wants refuses all use. Scripts that read RANK,
WORLD_SIZE and their kin find them as torchrun sets them, from MPI or from what its launcher left:

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | this process among all |
| LOCAL_RANK, LOCAL_WORLD_SIZE | this process among those of its node |
| GROUP_RANK, GROUP_WORLD_SIZE | its node among all |
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from mpitrain.backend import patches
from mpitrain.early import launched_first
from mpitrain.errors import InputError

if TYPE_CHECKING:
    from mpitrain.backend.process_group import MPIProcessGroup
    from mpitrain.comm import Communicator

# what the launchers call rank, size and local rank
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def from_launcher(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE and LOCAL_RANK as the launcher says them; None if no launcher we know does."""
    for names in _LAUNCHERS:
        if all(environment.get(name, "").isdigit() for name in names):
            rank, size, local = (environment[name] for name in names)
            return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}
    return None


def publish(world: Communicator) -> None:
    """Set the variables to what MPI says."""
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node,
        "GROUP_WORLD_SIZE": world.num_nodes,
    }
    os.environ.update({name: str(value) for name, value in values.items()})


def announce() -> None:
    """Set the variables before the script reads them, and without MPI where the launcher says enough.

    Raises:
        InputError: Processes of torchrun or accelerate launch are no ranks of MPI, or several are the same one.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        sys.excepthook = _say
        raise InputError(
            "torchrun (or accelerate launch, which calls it) starts processes that MPI does not know; start the script "
            f"with mpirun or srun instead: mpirun -n N python -m mpitrain.backend {os.path.basename(sys.argv[0])}"
        )
    told = from_launcher(os.environ)
    if told is not None:
        os.environ.update(told)
    elif multiprocessing.parent_process() is None and not _is_command():
        from mpitrain.comm import init

        publish(init(abort_on_error=False))


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an error before there is MPI, which would see to it that one rank speaks."""
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, trace)
        return
    if launched_first() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"mpitrain: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)


def _is_command() -> bool:
    """Return whether this is `python -m mpitrain.backend`, which reads its arguments before it starts MPI."""
    return ("-m", "mpitrain.backend") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)


NAME = "mpitrain"
ADDRESS = "mpitrain://"  # init_method
_LEAST = 10.0  # seconds: a limit for ending the whole job is not for waiting shortly


def register() -> None:
    """Make the backend known to torch.distributed. Twice is fine."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    register_rendezvous_handler(NAME, meet)
    patches.install(NAME, ADDRESS)
    patches.know_devices(NAME)
    announce()


def meet(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Rendezvous: rank and size are MPI's.

    Raises:
        ArgumentError: The caller gives others.
    """
    from mpitrain.backend.failures import ArgumentError
    from mpitrain.backend.groups import place

    control = place().control
    given = {name: int(value) for name, value in parse_qsl(urlsplit(url).query) if name in ("rank", "world_size")}
    for name, number in (("rank", control.rank), ("world_size", control.size)):
        if given.get(name, -1) not in (-1, number):
            control.process.faults.install()  # this rank may be the only one
            raise ArgumentError(
                f"init_process_group was given {name} {given[name]}, but MPI says {number}; leave rank and world_size "
                "to MPI, or start the script with as many ranks"
            )
    publish(control)
    yield place().store, control.rank, control.size


def create(options: Any, _: Any = None) -> MPIProcessGroup:
    """A process group of the given ranks (none: all). Collective over them.

    The default group's timeout is the one after which an unfinished collective ends the job.
    """
    from mpitrain.backend.groups import place
    from mpitrain.backend.process_group import MPIProcessGroup

    here = place()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if options.group_size > here.control.size:
        raise InputError(
            f"the process group has {options.group_size} ranks, MPI has {here.control.size}; start the script with "
            "mpirun or srun, and leave rank and world_size to MPI"
        )
    if ranks[options.group_rank] != here.control.rank:
        raise InputError(
            f"rank {ranks[options.group_rank]} was given to init_process_group, but MPI says {here.control.rank}; "
            "leave rank and world_size to MPI"
        )
    if not c10d.is_initialized():
        from mpitrain.comm import set_timeout

        here.control.process.faults.install()  # an error on one rank ends the job instead of leaving the others
        set_timeout(max(options.timeout.total_seconds(), _LEAST))
    comm = here.take(ranks)
    return MPIProcessGroup(comm, options.group_id, options.store, options.timeout)
