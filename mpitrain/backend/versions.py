"""What differs between versions of PyTorch, and which functions of torch.distributed we put ours before.

Tested with 2.12.1, 2.13.0 and 2.14.1; 2.12 words some messages of its tests otherwise, and nothing else differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpitrain.backend.failures import ArgumentError

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


def asynchronous(options: Any) -> bool:
    """Whether the caller goes on before the operation is complete; releases before 2.8 do not say, so it may."""
    return bool(getattr(options, "asyncOp", True))


def premultiplier(op: Any) -> float | torch.Tensor:
    """The factor of a PREMUL_SUM operation."""
    try:
        return op.factor
    except AttributeError:
        raise ArgumentError(
            f"torch {torch.__version__} does not tell the factor of PREMUL_SUM; multiply the tensor and use SUM"
        ) from None


_ProcessGroup: Any = Any if TYPE_CHECKING else dist.ProcessGroup  # its stubs name every parameter


class Base(_ProcessGroup):
    """What torch asks a process group beside the operations. It would look into registered backends; we have none.

    Python code calls the names with underscores and the properties, C++ the ones in its own style.
    """

    def _described(self, name: str, store: dist.Store) -> None:
        self._name, self._description, self._store = name, "undefined", store

    def rank(self) -> int:
        """This rank's number in the group."""
        return self.comm.rank

    def size(self) -> int:
        """The number of ranks of the group."""
        return self.comm.size

    def name(self) -> str:
        """The backend's name."""
        return "mpitrain"

    getRank, getSize = rank, size
    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        """The group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Change the group's name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Change what the group is said to be for."""
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = pg_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        found = torch.accelerator.current_accelerator(check_available=True)
        return [torch.device("cpu"), *([] if found is None else [torch.device(found.type)])]

    def get_group_store(self) -> dist.Store:
        """The store that torch has given the group."""
        return self._store

    def _get_backend(self, device: torch.device) -> Base:
        return self

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        return

    _set_sequence_number_for_group = _wait_for_pending_works

    def _get_sequence_number_for_group(self) -> int:
        return 0

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    bound_device_id: torch.device | None = None
    comm: Communicator
