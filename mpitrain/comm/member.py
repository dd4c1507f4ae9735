"""A rank's place: which rank of how many it is, on which node of how many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.comm.process.topology import Topology, library_name

if TYPE_CHECKING:
    from mpitrain.comm.collectives.operations import Operations
    from mpitrain.comm.world import Process


class Member:
    """A rank of a communicator. label: the communicator's name in messages."""

    label: str
    process: Process
    _topology: Topology
    _background: Operations | None

    @property
    def rank(self) -> int:
        return self._topology.rank

    @property
    def size(self) -> int:
        return self._topology.size

    @property
    def node(self) -> int:
        return self._topology.nodes[self.rank]

    @property
    def num_nodes(self) -> int:
        return self._topology.num_nodes

    @property
    def local_rank(self) -> int:
        return self._topology.neighbours.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self._topology.neighbours)

    @property
    def world_ranks(self) -> tuple[int, ...]:
        return self._topology.world_ranks

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node number of each rank."""
        return self._topology.nodes

    @property
    def library(self) -> str:
        """The MPI library and its version."""
        return library_name()

    @property
    def overlaps(self) -> bool:
        """Whether operations begun with async_op make progress while this rank computes."""
        return self._background is not None

    def __repr__(self) -> str:
        return f"Communicator({self.label!r}, rank {self.rank} of {self.size}, node {self.node} of {self.num_nodes})"
