"""Predicted time of a program on a machine of any size: all ranks at once, step by step, without MPI.

The model: a message costs latency + bytes / bandwidth (Hockney, Parallel Computing 20, 1994), with separate
figures inside a node and between nodes; messages that leave a node at the same time share its network link,
and memory traffic at the same time shares its memory; more ranks than cores take turns in a step, as far as they
have something to do in it. A block cut into segments is received from another node, added and sent at the same
time, as the executor does, so that only the slower counts. Inside a node it is the ranks themselves that move the
bytes, and they cannot add meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.comm.programs.program import NONE, WORK, Await, Combine, Copy, Exchange, Fence, Program, Signal, Span


@dataclass(frozen=True)
class Machine:
    """The speeds of a simulated machine. Times are in seconds, rates in bytes per second.

    The defaults are those of a present-day CPU cluster.
    """

    latency: float = 2e-6  # of a message between nodes
    bandwidth: float = 12.5e9  # of a node's network link
    local_latency: float = 0.7e-6  # of a message inside a node
    local_bandwidth: float = 6e9  # of one message inside a node
    copy_rate: float = 10e9  # of one core copying
    reduce_rate: float = 8e9  # of one core adding two vectors, per byte of the result
    memory_rate: float = 100e9  # of all cores of a node copying at once
    step: float = 2e-6  # of starting any one step in Python
    fence: float = 1e-6  # of a barrier in a node, per doubling of its ranks
    cores: float = 64  # per node; a fraction of them where others use the rest
    eager: float = 1 << 16  # bytes: a longer message between nodes is asked for first, see `flights`

    def flights(self, nbytes: np.ndarray | float) -> np.ndarray | float:
        """How many latencies pass until the first byte of a message between nodes is there.

        A long message goes from the sender's memory to the receiver's only when both are ready: it is announced, and
        asked for, before it goes (the rendezvous protocol of MPI libraries).
        """
        return np.where(np.asarray(nbytes) > self.eager, 3.0, 1.0)


def simulate(program: Program, chunk_bytes: Sequence[float], machine: Machine = Machine()) -> float:
    """Predict how many seconds a program takes, until its last rank is done.

    Args:
        program: The program.
        chunk_bytes: The size of each of its chunks, in bytes.
        machine: The speeds to reckon with.

    Reference:
        R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994), for the cost of a message.
    """
    return _Simulation(program, chunk_bytes, machine).run()


class _Simulation:
    def __init__(self, program: Program, chunk_bytes: Sequence[float], machine: Machine) -> None:
        self.program, self.machine = program, machine
        self.ranks = np.arange(program.size)
        self.node = np.unique(np.array(program.nodes), return_inverse=True)[1]
        per_node = np.bincount(self.node)
        local = per_node[self.node]
        share = machine.memory_rate / np.minimum(local, machine.cores)
        self.copy_rate = np.minimum(machine.copy_rate, share)
        self.reduce_rate = np.minimum(machine.reduce_rate, share)
        self.local_rate = np.minimum(machine.local_bandwidth, share)
        self.fence = machine.fence * np.ceil(np.log2(np.maximum(local, 2))) * np.maximum(1.0, local / machine.cores)
        self.offsets = np.concatenate([[0], np.cumsum(np.asarray(chunk_bytes, dtype=float))])
        self.cell = float(max(chunk_bytes, default=0))
        self.overlaps = program.segments > 1
        self.clock = np.zeros(program.size)  # when each rank is free for its next step
        self.adding = np.zeros(program.size)  # when the additions of earlier segments are done
        self.signals: dict[str, np.ndarray] = {}  # when the last rank of each rank's node has given them

    def run(self) -> float:
        for step in self.program.steps(self.ranks):
            if isinstance(step, Exchange):
                self._exchange(step)
            elif isinstance(step, Combine):
                for owner, _ in step.parts[1:]:
                    self._busy(owner, step.into, self.reduce_rate)
            elif isinstance(step, Copy):
                self._busy(step.dest, step.of, self.copy_rate)
            elif isinstance(step, Fence):
                self._wait(self._last())
            elif isinstance(step, Signal):
                self.signals[step.event] = self._last()
            elif isinstance(step, Await):
                self._wait(self.signals[step.event])
        return float(np.maximum(self.clock, self.adding).max())

    def _bytes(self, span: Span) -> np.ndarray:
        lo, hi = np.asarray(span.lo), np.asarray(span.hi)
        sizes = self.offsets[hi] - self.offsets[lo] if span.memory == WORK else (hi - lo) * self.cell
        return np.broadcast_to(sizes, self.ranks.shape)

    def _turns(self, works: np.ndarray) -> np.ndarray:
        """How many of a node's ranks that work share a core; for each rank."""
        return np.maximum(1.0, np.bincount(self.node, weights=works)[self.node] / self.machine.cores)

    def _busy(self, peer: int | np.ndarray, span: Span, rate: np.ndarray) -> None:
        """Local work of the ranks whose peer is not NONE."""
        size = self._bytes(span)
        works = np.broadcast_to(np.asarray(peer) != NONE, self.ranks.shape) & (size > 0)
        takes = (self.machine.step + size / rate) * self._turns(works)
        self.clock = np.where(works, self.clock + takes, self.clock)

    def _last(self) -> np.ndarray:
        """When the last rank of each rank's node has come to this step."""
        last = np.zeros(self.node.max() + 1)
        np.maximum.at(last, self.node, np.maximum(self.clock, self.adding))
        return last[self.node]

    def _wait(self, last: np.ndarray) -> None:
        self.clock = np.maximum(np.maximum(self.clock, self.adding), last) + self.fence
        self.adding = self.clock.copy()

    def _exchange(self, step: Exchange) -> None:
        to = np.broadcast_to(step.to, self.ranks.shape)
        source = np.broadcast_to(step.source, self.ranks.shape)
        sends, receives = to != NONE, source != NONE
        begin = self.clock if self.overlaps else np.maximum(self.clock, self.adding)
        peer_to, peer_from = np.where(sends, to, self.ranks), np.where(receives, source, self.ranks)
        leaves = sends & (self.node[peer_to] != self.node)
        enters = receives & (self.node[peer_from] != self.node)
        link = self.machine.bandwidth / np.maximum(1, np.bincount(self.node, weights=leaves))
        turns = self._turns(sends | receives)
        local_rate = self.local_rate / turns
        rate_out = np.where(leaves, link[self.node], local_rate)
        rate_in = np.where(enters, link[self.node[peer_from]], local_rate[peer_from])
        size_in, size_out = self._bytes(step.recv), self._bytes(step.send)
        far_in, far_out = (self.machine.latency * self.machine.flights(size) for size in (size_in, size_out))
        latency_out = np.where(leaves, far_out, self.machine.local_latency)
        latency_in = np.where(enters, far_in, self.machine.local_latency)
        sent = np.maximum(begin, begin[peer_to]) + latency_out + size_out / rate_out
        got = np.maximum(begin, begin[peer_from]) + latency_in + size_in / rate_in
        end = np.maximum(np.where(sends, sent, begin), np.where(receives, got, begin))
        self.clock = np.where(sends | receives, end + self.machine.step * turns, self.clock)
        if step.reduce:
            added = np.maximum(self.clock, self.adding) + size_in / self.reduce_rate * self._turns(receives)
            self.adding = np.where(receives, added, self.adding)
            self.clock = np.where(receives & ~enters, added, self.clock)
        else:  # what is passed on must have been added
            self.clock = np.where(sends, np.maximum(self.clock, self.adding), self.clock)
