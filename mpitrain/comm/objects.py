"""Small Python values between ranks, as JSON: nothing that arrives is ever executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.comm.collectives.all_gather import all_gather
from mpitrain.comm.collectives.all_reduce import all_reduce
from mpitrain.comm.collectives.broadcast import broadcast
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.collectives.rooted import gather
from mpitrain.errors import InputError, MpitrainError


def _encode(value: Any) -> np.ndarray:
    try:
        text = json.dumps(value)
    except TypeError as error:
        raise InputError(f"{error}; only what JSON can hold travels between ranks: send arrays as arrays") from None
    data: np.ndarray = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    return data


def _measured(comm: Dispatcher, value: Any) -> tuple[np.ndarray, np.ndarray]:
    """This rank's value as bytes, and the numbers of bytes of all ranks' values."""
    data, lengths = _encode(value), np.empty(comm.size, dtype=np.int64)
    all_gather(comm, lengths, np.array([data.size], dtype=np.int64))
    return data, lengths


def broadcast_object(comm: Dispatcher, value: Any, root: int = 0) -> Any:
    """The root's value, on every rank. Collective.

    Args:
        value: What JSON can hold; of the other ranks it does not matter.
        root: The rank whose value all get.
    """
    data = _encode(value) if comm.rank == root else np.empty(0, dtype=np.uint8)
    length = np.array([data.size], dtype=np.int64)
    broadcast(comm, length, root)
    if comm.rank != root:
        data = np.empty(int(length[0]), dtype=np.uint8)
    broadcast(comm, data, root)
    return json.loads(data.tobytes())


def all_gather_object(comm: Dispatcher, value: Any) -> list[Any]:
    """Every rank's value, in order of rank. Collective.

    Args:
        value: What JSON can hold.
    """
    data, lengths = _measured(comm, value)
    everything = np.empty(int(lengths.sum()), dtype=np.uint8)
    all_gather(comm, everything, data, counts=[int(n) for n in lengths])
    ends = np.cumsum(lengths)
    return [json.loads(everything[end - n : end].tobytes()) for n, end in zip(lengths, ends, strict=True)]


def gather_objects(comm: Dispatcher, value: Any, root: int = 0) -> list[Any]:
    """Every rank's value, in order of rank, on the root; an empty list elsewhere. Collective.

    Args:
        value: What JSON can hold.
        root: The rank that gets the values.
    """
    data, lengths = _measured(comm, value)
    width = int(lengths.max())
    padded = np.zeros(width, dtype=np.uint8)
    padded[: data.size] = data
    everything = np.empty((comm.size, width), dtype=np.uint8) if comm.rank == root else None
    gather(comm, everything, padded, root)
    if everything is None:
        return []
    return [json.loads(row[:n].tobytes()) for row, n in zip(everything, lengths, strict=True)]


def agree(comm: Dispatcher, error: BaseException | None) -> None:
    """Raise on every rank if any rank has an error: the first such rank's, named. Collective.

    This is how ranks that can fail alone (files, memory) stay together.

    Args:
        error: This rank's; None where all went well here.

    Raises:
        MpitrainError: Of the kind of the first rank's error, or of this kind itself where that is not one of ours.
    """
    failed = np.array([comm.rank if error is not None else comm.size], dtype=np.int64)
    all_reduce(comm, failed, "min")
    first = int(failed[0])
    if first == comm.size:
        return
    told = None
    if comm.rank == first and error is not None:
        where = f"rank {first}: " if comm.size > 1 and not getattr(error, "agreed", False) else ""
        told = [type(error).__name__, where + (str(error) or type(error).__name__)]
    kind, text = broadcast_object(comm, told, first)
    known = {k.__name__: k for k in _all_errors(MpitrainError)}
    if kind in known:
        raise known[kind](text, agreed=True) from error
    raise MpitrainError(f"{text} ({kind})" if kind not in text else text, agreed=True) from error


def on_root(comm: Dispatcher, function: Callable[[], Any], root: int = 0) -> Any:
    """Call a function on one rank; every rank returns its value or raises its error. Collective.

    Args:
        function: What is called; its value is what JSON can hold.
        root: The rank that calls it.
    """
    value, error = None, None
    if comm.rank == root:
        try:
            value = function()
        except Exception as caught:  # told to all ranks by agree()
            error = caught
    agree(comm, error)
    return broadcast_object(comm, value, root)


def _all_errors(kind: type[MpitrainError]) -> list[type[MpitrainError]]:
    found = [kind]
    for child in kind.__subclasses__():
        found += _all_errors(child)
    return found
