"""The parts of a process group that torch expects besides operations: errors, a store and names.

Errors of a process group are also RuntimeErrors, and errors in arguments also ValueErrors, as in torch's own backends.
Those backends let ranks find each other by a shared store at a port of rank 0. This backend needs none. Its store
raises an error at each use: a store local to each process would let a caller wait for ever for another rank's entry.

Tested with PyTorch 2.12.1, 2.13.0 and 2.14.1. In 2.12 some messages of PyTorch's tests differ, nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from mpitrain.errors import CommunicationError, InputError

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


class GroupError(CommunicationError, RuntimeError):
    """Error of a process-group operation that was misused or did not complete."""


class ArgumentError(InputError, ValueError):
    """Error in an argument of a process group."""


def translate_error(error: BaseException) -> BaseException:
    """Return the process-group error for an error of the communicator; return any other error unchanged."""
    if isinstance(error, CommunicationError) and not isinstance(error, GroupError):
        return GroupError(str(error), agreed=error.agreed)
    if isinstance(error, InputError) and not isinstance(error, ArgumentError):
        return ArgumentError(str(error), agreed=error.agreed)
    return error


class NoStore(dist.Store):
    """Store that raises GroupError at every use."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise GroupError(
            "process groups over MPI have no store that ranks share, which torch.distributed.rpc needs; create one "
            "on a free port with torch.distributed.TCPStore(host, port, world_size, rank == 0), or exchange objects "
            "with broadcast_object_list"
        )

    set = get = add = check = wait = append = compare_set = delete_key = num_keys = _refuse
    multi_get = multi_set = has_extended_api = queue_push = queue_pop = queue_len = list_keys = _refuse
    getNumKeys = deleteKey = compareSet = multiGet = multiSet = hasExtendedApi = _refuse  # as C++ calls them


_ProcessGroup: Any = Any if TYPE_CHECKING else dist.ProcessGroup  # torch's stubs fix the name of every parameter


class Base(_ProcessGroup):
    """Methods, other than operations, that torch calls on a process group.

    torch's own versions look into registered backends, of which this class has none. Python code calls the names with
    underscores and the properties; C++ code calls the names in camel case.
    """

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "mpitrain"

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Change the name of the group."""
        self._name = name

    _set_group_name = setGroupName
    group_name = pg_name = property(getGroupName)

    @property
    def _device_types(self) -> list[torch.device]:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return [torch.device("cpu"), *([] if accelerator is None else [torch.device(accelerator.type)])]

    def get_group_store(self) -> dist.Store:
        """Return the store that torch passed to the group."""
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
