"""Signals of a program: the ranks of a node tell each other that they have come to a point, and wait for that later.

A signal is a short message to each of the others, on a communicator of the event's own, so that those of several
events match in order however a rank mixes them. It carries a row as on the `board`: which operation on what memory.
A rank goes on to touch the others' memory only where theirs is the same.
"""

from __future__ import annotations

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.board import ROW, difference
from mpitrain.errors import CommunicationError


class _Sent:
    """One signal: the row this rank sends, those of all ranks of the node, and the messages that carry them."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self.rows = [bytearray(ROW) for _ in range(node.size)]
        self.own = self.rows[node.rank]
        others = [rank for rank in range(node.size) if rank != node.rank]
        self.requests = [node.Recv_init([self.rows[rank], ROW, MPI.BYTE], rank) for rank in others]
        self.requests += [node.Send_init([self.own, ROW, MPI.BYTE], rank) for rank in others]


class Event:
    """Carries the signals of one event, for as many runs at a time as are under way.

    All ranks of the node must give the signals in the same order of runs.
    """

    def __init__(self, node: MPI.Intracomm, label: str) -> None:
        """Prepare an event, without sending anything.

        Args:
            node: A communicator of the node's ranks, for this event alone.
            label: The communicator that the event belongs to, for messages.
        """
        self._node, self.label = node, label
        self._idle: list[_Sent] = []

    def signal(self, row: bytes) -> _Sent:
        """Tell all other ranks that this one has come here; what is returned is for `wait`.

        Args:
            row: What this rank does, as on the board.
        """
        sent = self._idle.pop() if self._idle else _Sent(self._node)
        sent.own[:] = row
        MPI.Prequest.Startall(sent.requests)
        return sent

    def wait(self, sent: _Sent) -> str:
        """Wait until all other ranks have given a signal.

        Args:
            sent: What `signal` has returned.

        Returns:
            What is wrong if some of them gave it for something else, else an empty text.
        """
        MPI.Request.Waitall(sent.requests)
        self._idle.append(sent)
        same = all(row == sent.own for row in sent.rows)
        return "" if same else difference([bytes(row) for row in sent.rows], range(self._node.size))

    def free(self) -> None:
        """Release the requests that are idle. The communicator is released by whoever made it."""
        for sent in self._idle:
            for request in sent.requests:
                request.Free()
        self._idle.clear()


class Telling:
    """The part of a bound program in one event. One run of the program takes part in it at a time."""

    __slots__ = ("_event", "_row", "_sent")

    def __init__(self, event: Event, row: bytes) -> None:
        self._event, self._row = event, row
        self._sent: _Sent | None = None

    @property
    def pending(self) -> bool:
        """Whether the signal was given and is not waited for yet."""
        return self._sent is not None

    def signal(self) -> None:
        """Tell the other ranks of the node that this one has come here."""
        self._sent = self._event.signal(self._row)

    def wait(self) -> None:
        """Wait until all other ranks of the node have given the signal.

        Raises:
            CommunicationError: They gave it for different operations; raised on all ranks of the node.
        """
        sent, self._sent = self._sent, None
        assert sent is not None
        if wrong := self._event.wait(sent):
            raise CommunicationError(f"{self._event.label}: {wrong}")

    def arrived(self) -> bool:
        """Whether waiting would return at once; lets the messages make progress."""
        return self._sent is None or bool(MPI.Request.Testall(self._sent.requests))
