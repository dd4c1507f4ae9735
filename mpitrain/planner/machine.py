"""A machine profile: what a machine's nodes and its network can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpitrain.comm.programs.simulate import Machine


@dataclass(frozen=True)
class Device:
    """The accelerators of a node.

    Attributes:
        kind: As PyTorch names it.
        count: Of a node.
        memory: Bytes of one.
        matrix: By precision, (size, operations per second) of products of square matrices of that size.
        memory_rate: Bytes per second of its own memory, reads and writes together.
        host_rate: Bytes per second between it and the host, one way.
        link_rate: Bytes per second of a message between two devices of a node; 0: no direct link, so that messages pass
            through host memory.
        link_latency: Seconds of a message over that link, or of a copy between a device and the host.
    """

    kind: str
    count: int
    memory: int
    matrix: Mapping[str, Sequence[tuple[int, float]]]
    memory_rate: float
    host_rate: float
    link_rate: float
    link_latency: float


@dataclass(frozen=True)
class Measured:
    """Seconds that one algorithm of a collective operation took.

    Attributes:
        operation: all_reduce, reduce_scatter, all_gather or broadcast.
        algorithm: By the name with which a caller chooses it.
        ranks: How many took part.
        nodes: On how many nodes.
        memory: Where the vectors lay: arena or private.
        nbytes: Bytes of a rank's whole vector.
        seconds: From the first rank's start to the last rank's end.
    """

    operation: str
    algorithm: str
    ranks: int
    nodes: int
    memory: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class MachineProfile:
    """The speeds and sizes of a machine whose nodes are all alike.

    Attributes:
        name: For people.
        origin: Where the figures come from: "measured ..." or "specification".
        cores: Of a node; a part of them where nodes are made of one machine's cores, or others use the rest.
        memory: Bytes of a node's memory.
        links: Speeds of messages, copies and sums, as `comm.programs.simulate` reckons with; `links.cores` is `cores`.
        matrix: By precision, (size, operations per second) of products of square matrices of that size on one core,
            while all other cores do the same.
        threads: Share of a core's speed that each further thread of a rank adds.
        update_rate: Elements per second that one core updates with AdamW, while all other cores do the same.
        overhead: Seconds of a training step of a rank that go into neither blocks nor messages nor the update.
        write_rate: Bytes per second that one node writes into the run folder.
        rank_write_rate: Bytes per second that one rank alone writes there.
        write_limit: Bytes per second that all nodes together write there.
        process: Bytes of a rank that trains next to nothing.
        device: The accelerators; None where there are none.
        collectives: What collective operations took where they were measured; empty: nowhere.
        seen_cores: How many cores the system tells ranks of. Ranks that believe to have one each keep it while they
            wait.
    """

    name: str
    origin: str
    cores: float
    memory: int
    links: Machine = field(default_factory=Machine)
    matrix: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    threads: float = 0.9
    update_rate: float = 5e8
    overhead: float = 2e-3
    write_rate: float = 1e9
    rank_write_rate: float = 5e8
    write_limit: float = 1e11
    process: int = 360 << 20
    device: Device | None = None
    collectives: tuple[Measured, ...] = ()
    seen_cores: float = 0.0  # 0: as many as there are
