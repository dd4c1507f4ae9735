"""Errors as torch's clients expect them, and the store that raises one for every use.

What goes wrong in a process group is a RuntimeError, too, and a wrong argument a ValueError. torch's other backends
find each other by a store that the ranks share, over a port of rank 0's. Ours need none. A store of each process for
itself would leave whoever waits in it for another rank's word waiting for ever.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

from mpitrain.errors import CommunicationError, InputError


class GroupError(CommunicationError, RuntimeError):
    """An operation of a process group was misused or did not complete."""


class ArgumentError(InputError, ValueError):
    """An argument that a process group cannot work with."""


def translation(error: BaseException) -> BaseException:
    """The communicator's error as one of a process group; another error as it is."""
    if isinstance(error, CommunicationError) and not isinstance(error, GroupError):
        return GroupError(str(error), agreed=error.agreed)
    if isinstance(error, InputError) and not isinstance(error, ArgumentError):
        return ArgumentError(str(error), agreed=error.agreed)
    return error


class NoStore(dist.Store):
    """Raises GroupError for every use."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise GroupError(
            "process groups over MPI have no store that ranks share, as torch.distributed.rpc and the like need it; "
            "make one: torch.distributed.TCPStore(host, port, world_size, rank == 0) on a port that is free, and "
            "exchange objects with broadcast_object_list"
        )

    set = get = add = check = wait = append = compare_set = delete_key = num_keys = _refuse
    multi_get = multi_set = has_extended_api = queue_push = queue_pop = queue_len = list_keys = _refuse
    getNumKeys = deleteKey = compareSet = multiGet = multiSet = hasExtendedApi = _refuse  # as C++ calls them
