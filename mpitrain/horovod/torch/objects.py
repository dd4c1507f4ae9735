"""Python values and states of models and optimizers, sent from rank to rank.

Values travel as JSON, tensors beside it, so that nothing which another rank sends is ever executed. Horovod pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.horovod.torch.handles import synchronize
from mpitrain.horovod.torch.moving import broadcast_async_
from mpitrain.horovod.torch.session import ProcessSet, call_on_all, global_process_set, rank
from mpitrain.horovod.torch.submission import HorovodArgumentError, Submission
from mpitrain.shard.ddp import broadcast_tensors

_PLAIN = (type(None), bool, int, float, str)
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON can represent it, with its tensors apart; `decode` reverses this.

    Args:
        value: None, numbers, text, bytes, tensors, NumPy arrays and scalars, and lists, tuples, sets and dictionaries
            of them.
        tensors: List to which the tensors are added.

    Raises:
        InputError: The value is, or contains, something else.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        tensors.append(value.detach())
        return ["tensor", isinstance(value, torch.nn.Parameter)]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return [
            "array" if isinstance(value, np.ndarray) else "scalar",
            encode(torch.from_numpy(np.array(value)), tensors),
        ]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, (torch.dtype, torch.device)):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if isinstance(value, (set, frozenset)):
        return [kind.__name__, [encode(each, tensors) for each in sorted(value, key=repr)]]
    if kind in (list, tuple, torch.Size):
        return [kind.__name__.lower(), [encode(each, tensors) for each in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, tensors), encode(each, tensors)] for key, each in value.items()]]
    if isinstance(value, _PLAIN):  # a subclass, such as an IntEnum
        return next(plain(value) for plain in _PLAIN[1:] if isinstance(value, plain))
    raise InputError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent: mpitrain sends numbers, text, tensors, "
        "arrays, and lists, tuples, sets and dictionaries of them, and never unpickles what another rank sends; send "
        "the state of the object instead"
    )


def decode(coded: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return the value of which `encode` has returned this form.

    Args:
        coded: Form of the value.
        tensors: Its tensors, in order.
    """
    return _decode(coded, iter(tensors))


def _decode(coded: Any, tensors: Any) -> Any:
    if not isinstance(coded, list):
        return coded
    kind, content = coded
    if kind == "tensor":
        return torch.nn.Parameter(next(tensors)) if content else next(tensors)
    if kind in ("array", "scalar"):
        array = _decode(content, tensors).numpy()
        return array if kind == "array" else array[()]
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "dict":
        return {_decode(key, tensors): _decode(each, tensors) for key, each in content}
    return _CONTAINERS[kind]([_decode(each, tensors) for each in content])


def _message(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an encoded value, and the dtype, shape and device of each of its tensors."""
    coded = encode(value, tensors)
    return [coded, [[str(x.dtype)[6:], list(x.shape), x.device.type] for x in tensors]]


def _empty_tensors(message: Any) -> list[torch.Tensor]:
    """Return uninitialized tensors for those of another rank's message, in order."""
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape, device in message[1]]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's value on every rank. Collective.

    Args:
        obj: Value on the root, see `encode`; ignored on the other ranks.
        root_rank: Global rank whose value is returned.
        name: Name of the operation, the same on all ranks.
        process_set: Ranks that take part.

    Raises:
        InputError: The value cannot be sent. All ranks raise it.
    """
    process_set.require()
    if root_rank not in (process_set.ranks or ()):
        raise HorovodArgumentError(
            f"broadcast_object: root_rank {root_rank} is not among the ranks {process_set.ranks}"
        )
    root = (process_set.ranks or []).index(root_rank)

    def send(comm: Communicator) -> Any:
        return _send_object(comm, obj, root)

    return call_on_all(process_set, f"broadcast_object.{name or ''}.{root}", send)


def _send_object(comm: Communicator, value: Any, root: int) -> Any:
    tensors: list[torch.Tensor] = []
    message = comm.on_root(lambda: _message(value, tensors), root)
    if comm.rank != root:
        tensors = _empty_tensors(message)
    broadcast_tensors(tensors, comm, root)
    return value if comm.rank == root else decode(message[0], tensors)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's value, in order of rank. Collective.

    Args:
        obj: Value of this rank, see `encode`.
        name: Name of the operation, the same on all ranks.
        process_set: Ranks that take part.

    Raises:
        InputError: A value cannot be sent. All ranks raise it.
    """

    def gather(comm: Communicator) -> list[Any]:
        tensors: list[torch.Tensor] = []
        mine, error = None, None
        try:
            mine = _message(obj, tensors)
        except Exception as caught:  # agree() raises it on all ranks
            error = caught
        comm.agree(error)
        values = []
        for source, message in enumerate(comm.all_gather_object(mine)):
            received = tensors if source == comm.rank else _empty_tensors(message)
            broadcast_tensors(received, comm, source)
            values.append(obj if source == comm.rank else decode(message[0], received))
        return values

    return call_on_all(process_set, f"allgather_object.{name or ''}", gather)


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the root's parameters into those of all ranks, in place. Collective.

    Args:
        params: A state dictionary, named parameters, or parameters, the same on all ranks.
        root_rank: Global rank whose values are copied.
        process_set: Ranks that take part.
    """
    if isinstance(params, dict):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise HorovodArgumentError(
            f"broadcast_parameters: pass a state dictionary or parameters, not {type(params).__name__}"
        )
    handles: Sequence[Submission] = [
        broadcast_async_(p, root_rank, name, process_set) for name, p in named if isinstance(p, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give the optimizers of all ranks the root's state and options. Collective.

    Args:
        optimizer: Optimizer of the same parameters on all ranks.
        root_rank: Global rank whose state is copied.
        model: Not used; Horovod needs it for sparse parameters.
        process_set: Ranks that take part.
    """
    is_root = rank() == root_rank
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank, "optimizer", process_set)
    if not is_root:
        groups = optimizer.param_groups
        optimizer.load_state_dict(state)
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups  # a scheduler made before the optimizer was wrapped changes these
