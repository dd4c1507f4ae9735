"""The parts of a process group that torch expects besides operations: errors, a store, names; differences of releases.

What goes wrong in a process group is a RuntimeError, too, and a wrong argument a ValueError. torch's other backends
find each other by a store that the ranks share, over a port of rank 0's. Ours need none. A store of each process for
itself would leave whoever waits in it for another rank's word waiting for ever.

Tested with 2.12.1, 2.13.0 and 2.14.1; 2.12 words some messages of its tests otherwise, and nothing else differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from mpitrain.errors import CommunicationError, InputError

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


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


_ProcessGroup: Any = Any if TYPE_CHECKING else dist.ProcessGroup  # its stubs name every parameter


class Base(_ProcessGroup):
    """What torch asks a process group beside the operations. It would look into registered backends; we have none.

    Python code calls the names with underscores and the properties, C++ the ones in its own style.
    """

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "mpitrain"

    def getGroupName(self) -> str:
        """The group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Change the group's name."""
        self._name = name

    _set_group_name = setGroupName
    group_name = pg_name = property(getGroupName)

    @property
    def _device_types(self) -> list[torch.device]:
        found = torch.accelerator.current_accelerator(check_available=True)
        return [torch.device("cpu"), *([] if found is None else [torch.device(found.type)])]

    def get_group_store(self) -> dist.Store:
        """The store that torch has given the group."""
        return self._store

    def _get_backend(self, device: torch.device) -> Base:
        return self

    def _set_sequence_number_for_group(self) -> None:
        return

    def _get_sequence_number_for_group(self) -> int:
        return 0

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    bound_device_id: torch.device | None = None
    comm: Communicator
