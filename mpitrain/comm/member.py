"""A rank's place: which rank of how many it is, on which node of how many."""

from __future__ import annotations

from mpitrain.comm.process.topology import Topology, library_name


class Member:
    """A rank of a communicator.

    label: the communicator's name in messages. rank, size: this rank's number and the number of ranks. node,
    num_nodes: likewise for nodes. local_rank, local_size: this rank's number among the communicator's ranks on its
    node, and theirs. world_ranks: the number in the world of each rank.
    """

    def __init__(self, topology: Topology, label: str) -> None:
        self._topology, self.label = topology, label

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

    def __repr__(self) -> str:
        return f"Communicator({self.label!r}, rank {self.rank} of {self.size}, node {self.node} of {self.num_nodes})"
