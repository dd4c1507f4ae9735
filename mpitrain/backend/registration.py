"""The name "mpitrain" in torch.distributed: how its groups are made, and how ranks find each other (they know).

Ranks need no address: MPI has connected them. The store that torch wants refuses all use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from mpitrain.backend import environment, patches
from mpitrain.errors import InputError

if TYPE_CHECKING:
    from mpitrain.backend.process_group import MPIProcessGroup

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
    environment.announce()


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
    environment.publish(control)
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
