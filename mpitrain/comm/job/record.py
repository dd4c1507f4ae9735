"""Which operation a rank is in: written by the hot path, read by the watchdog and where a rank has left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Record:
    """The operation that a rank is in on one communicator. The operations write it, the watchdog reads it.

    Attributes:
        members: The ranks of the world that all carry out the same operations, in the same order.
        key: Name of the record, alike on all of them.
        awaited: The ranks of the world of which one is to send or receive a message.
        limited: Whether whoever waits stops waiting by itself.
        patient: Whether the wait may take any time, for as long as all ranks answer the watchdog.
    """

    __slots__ = (
        "__weakref__", "awaited", "key", "label", "limited", "members", "name", "patient", "sequence", "since",
        "tensor", "thread",
    )  # fmt: skip

    def __init__(self, label: str, members: Sequence[int] = (), key: str = "") -> None:
        self.label, self.members, self.key = label, members, key
        self.awaited: Sequence[int] = ()
        self.limited = self.patient = False
        self.sequence = 0
        self.name = ""
        self.tensor: torch.Tensor | None = None  # the operation's, as long as it lasts
        self.since = 0.0  # time.monotonic() of the beginning; 0: in no operation
        self.thread = 0

    def begin(self, name: str, tensor: torch.Tensor | None) -> None:
        """Note that an operation begins; `tensor` is None where it is on no data."""
        self.sequence += 1
        self.name, self.tensor = name, tensor
        self.thread = threading.get_ident()
        self.since = time.monotonic()

    def end(self) -> None:
        """Note that the operation has ended."""
        self.since, self.tensor = 0.0, None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Inside, this rank is in an operation on no data."""
        self.awaited = ()
        self.begin(name, None)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def comparing(self, name: str, tensor: torch.Tensor | None) -> Iterator[None]:
        """Inside, the ranks compare what they are about to do; the operation itself has not begun."""
        self.begin(f"before {name}", tensor)
        try:
            yield
        finally:
            self.end()
            self.sequence -= 1

    def text(self) -> str:
        """The operation in words, for messages."""
        tensor = self.tensor
        data = f" of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" if tensor is not None else ""
        return f"{self.label}: {self.name} #{self.sequence}{data}"
