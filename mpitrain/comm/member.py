"""A rank's place: which rank of how many it is, on which node of how many."""

from __future__ import annotations

from mpitrain.comm.job.topology import Topology, library_name


class Member:
    """A rank of a communicator.

    Attributes:
        label: The communicator's name in messages.
        rank: This rank's number.
        size: The number of ranks.
        nodes: The node number of each rank.
        node: This rank's.
        num_nodes: The number of nodes.
        local_rank: This rank's number among the communicator's ranks on its node.
        local_size: The number of these.
        world_ranks: The number in the world of each rank.
    """

    def __init__(self, topology: Topology, label: str) -> None:
        self._topology, self.label = topology, label
        self.rank, self.size, self.world_ranks = topology.rank, topology.size, topology.world_ranks
        self.nodes, self.node, self.num_nodes = topology.nodes, topology.nodes[topology.rank], topology.num_nodes
        neighbours = topology.neighbours
        self.local_rank, self.local_size = neighbours.index(topology.rank), len(neighbours)

    @property
    def library(self) -> str:
        """The MPI library and its version."""
        return library_name()

    def __repr__(self) -> str:
        return f"Communicator({self.label!r}, rank {self.rank} of {self.size}, node {self.node} of {self.num_nodes})"
