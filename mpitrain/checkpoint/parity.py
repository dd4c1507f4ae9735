"""Copies and parities of files on node-local disks, so that a lost node loses nothing.

partner: every file is also kept on the next node.

xor: files of different nodes form sets; a member's file is cut into as many segments as there are other members,
and each of those holds the exclusive or of one segment of every other. As in SCR (Moody, Bronevetsky, Mohror,
de Supinski, "Design, Modeling, and Evaluation of a Scalable Multi-level Checkpointing System", SC 2010):

    member 0    member 1    member 2         a0 is segment 0 of member 0's file;
    a0 a1       b0 b1       c0 c1            a member holds what is lost with none
    b0 ^ c0     a0 ^ c1     a1 ^ b1          of the segments in it

So a set survives any one lost member, for 1 / (members - 1) of the bytes. The functions here decide who sends what;
`exchange` moves it.

Moving the bytes of files between ranks, a window at a time, without a rank waiting for another's disk alone.

Every rank knows all messages. A rank whose disk fails goes on sending and receiving, so that nobody waits for it,
and raises at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpitrain.checkpoint.commit import TAG
from mpitrain.checkpoint.manifest import ParitySet
from mpitrain.checkpoint.reading import read_exactly
from mpitrain.errors import MpitrainError
from mpitrain.layout.boxes import split
from mpitrain.storage.disk import opened
from mpitrain.storage.hdf5 import write_at

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

GROUP = 8  # nodes of a parity set, about


@dataclass(frozen=True)
class Move:
    """A file that goes from one rank's folder to another's.

    Attributes:
        file: Its name.
        size: How many bytes it has.
        source: The rank that has it.
        dest: The rank that gets it.
    """

    file: str
    size: int
    source: int
    dest: int


def partner_copies(owners: Mapping[str, int], sizes: Mapping[str, int], nodes: Sequence[int]) -> list[Move]:
    """Copy every file to the next node.

    Args:
        owners: The rank that wrote each file.
        sizes: The bytes of each file.
        nodes: The node of each rank.

    Returns:
        A move for each file; none on a single node.
    """
    ranks = ranks_of(nodes)
    numbers = sorted(ranks)
    if len(numbers) < 2:
        return []
    moves = []
    for file, owner in owners.items():
        here = nodes[owner]
        there = ranks[numbers[(numbers.index(here) + 1) % len(numbers)]]
        moves.append(Move(file, sizes[file], owner, there[ranks[here].index(owner) % len(there)]))
    return moves


def ranks_of(nodes: Sequence[int]) -> dict[int, list[int]]:
    """The ranks of each node, in order."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return found


def parity_sets(
    owners: Mapping[str, int], sizes: Mapping[str, int], nodes: Sequence[int]
) -> list[tuple[ParitySet, tuple[int, ...]]]:
    """Put files into sets that protect each other.

    Args:
        owners: The rank that wrote each file.
        sizes: The bytes of each file.
        nodes: The node of each rank.

    Returns:
        The sets, each with the ranks that act for its members; none on a single node.
    """
    ranks = ranks_of(nodes)
    numbers = sorted(ranks)
    bounds = split(len(numbers), max(1, len(numbers) // GROUP))
    sets = []
    for lo, hi in pairwise(bounds):
        members = numbers[lo:hi]
        if len(members) < 2:
            continue
        held = [sorted((owner, file) for file, owner in owners.items() if nodes[owner] == node) for node in members]
        for lane in range(max(len(files) for files in held)):
            files = tuple(of[lane][1] if lane < len(of) else "" for of in held)
            largest = max(sizes[file] for file in files if file)
            parities = tuple(f"parity-{node:05d}-{lane:05d}.bin" for node in members)
            acting = tuple(
                of[lane][0] if lane < len(of) else ranks[node][lane % len(ranks[node])]
                for of, node in zip(held, members, strict=True)
            )
            sets.append((ParitySet(files, parities, -(-largest // (len(members) - 1))), acting))
    return sets


def segment(member: int, holder: int) -> int:
    """The number of the segment of `member`'s file that goes into `holder`'s parity."""
    return holder if holder < member else holder - 1


def copy_rounds(moves: Sequence[Move], source: Path, dest: Path) -> Iterator[list[FileTransfer]]:
    """The messages that copy files.

    Args:
        moves: The files.
        source: The folder that a rank's files are read from.
        dest: The folder that a rank's files are written into.
    """
    for first in range(0, max((m.size for m in moves), default=0), WINDOW):
        yield [
            FileTransfer(
                m.source,
                m.dest,
                min(WINDOW, m.size - first),
                partial(_read, source / m.file, first),
                partial(_write, dest / m.file, first, m.size),
            )
            for m in moves
            if m.size > first
        ]


def parity_rounds(
    sets: Sequence[tuple[ParitySet, tuple[int, ...]]], sizes: Mapping[str, int], folder: Path
) -> Iterator[list[FileTransfer]]:
    """The messages that make the parities.

    Args:
        sets: As of `parity_sets`.
        sizes: The bytes of each file.
        folder: Each rank's folder, which has its file and gets its parity.
    """
    for one, ranks in sets:
        size = len(one.files)
        for first in range(0, one.chunk, WINDOW):
            window = min(WINDOW, one.chunk - first)
            yield [
                FileTransfer(
                    ranks[member],
                    ranks[holder],
                    window,
                    partial(_read_segment, folder, one, sizes, member, holder, first),
                    partial(_add, folder / one.parities[holder], first, one.chunk),
                )
                for holder in range(size)
                for member in range(size)
                if member != holder and one.files[member]
            ]


def rebuild_rounds(
    one: ParitySet,
    lost: int,
    sizes: Mapping[str, int],
    holder_of: Callable[[str], int],
    builder: int,
    folder: Path,
    target: Path,
) -> Iterator[list[FileTransfer]]:
    """The messages that rebuild a lost file.

    Args:
        one: The set that the file is in.
        lost: The number of the member whose file is lost.
        sizes: The bytes of each file.
        holder_of: Gives a rank that has a file of the set, or a parity.
        builder: The rank that gets the file.
        folder: Each rank's folder, which has those files.
        target: Where the file is written.
    """
    total = sizes[one.files[lost]]
    for holder in range(len(one.files)):
        if holder == lost:
            continue
        begin = segment(lost, holder) * one.chunk
        for first in range(0, min(one.chunk, max(0, total - begin)), WINDOW):
            window = min(WINDOW, one.chunk - first)
            add = partial(_add, target, begin + first, total)
            gets = {one.parities[holder]: partial(_read, folder / one.parities[holder], first)}
            for member, file in enumerate(one.files):
                if member not in (lost, holder) and file:
                    gets[file] = partial(_read_segment, folder, one, sizes, member, holder, first)
            yield [FileTransfer(holder_of(name), builder, window, get, add) for name, get in gets.items()]


def _read(path: Path, offset: int, into: memoryview) -> None:
    with opened(path) as descriptor:
        read_exactly(descriptor, into, offset, path)


def _read_segment(
    folder: Path, one: ParitySet, sizes: Mapping[str, int], member: int, holder: int, first: int, into: memoryview
) -> None:
    """Bytes of a member's segment from `first` on; what lies beyond its file is zero."""
    file = one.files[member]
    offset = segment(member, holder) * one.chunk + first
    available = min(len(into), one.chunk - first, sizes[file] - offset)
    if available > 0:
        _read(folder / file, offset, into[:available])


def _write(path: Path, offset: int, size: int, data: memoryview) -> None:
    with opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        write_at(descriptor, data, offset)
        if offset + len(data) >= size:
            os.fsync(descriptor)


def _add(path: Path, offset: int, size: int, data: memoryview) -> None:
    """Exclusive or of these bytes into a file that has `size` bytes, zeros at first; what goes beyond is dropped."""
    data = data[: max(0, size - offset)]
    with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        os.ftruncate(descriptor, size)
        before = bytearray(len(data))
        read_exactly(descriptor, memoryview(before), offset, path)
        mixed = np.bitwise_xor(np.frombuffer(before, np.uint8), np.frombuffer(data, np.uint8))
        write_at(descriptor, mixed.data, offset)


WINDOW = 8 << 20  # bytes of a message at most


@dataclass(frozen=True)
class FileTransfer:
    """Bytes that go from one rank's file to another's.

    Attributes:
        source: The rank that has them.
        dest: The rank that gets them, which may be the same.
        nbytes: How many.
        get: Called on `source` with the memory to fill.
        put: Called on `dest` with the bytes.
    """

    source: int
    dest: int
    nbytes: int
    get: Callable[[memoryview], None]
    put: Callable[[memoryview], None]


def exchange(comm: Communicator, rounds: Iterable[Sequence[FileTransfer]]) -> None:
    """Send and receive the messages of each round, then those of the next. Collective.

    Args:
        comm: The ranks.
        rounds: The messages of each round, the same on all ranks.

    Raises:
        OSError, CheckpointError: After the last round, what this rank's `get` or `put` raised first.
    """
    failures: list[Exception] = []
    limit = comm.process.watchdog.timeout

    def unless_failed(act: Callable[[memoryview], None], data: torch.Tensor) -> None:
        if not failures:
            try:
                act(data.numpy().data)
            except (OSError, MpitrainError) as error:
                failures.append(error)

    for messages in rounds:
        receiving = []
        for message in messages:
            if message.dest == comm.rank != message.source:
                data = torch.empty(message.nbytes, dtype=torch.uint8)
                receiving.append((message, data, comm.irecv(data, message.source, TAG)))
        sending = []
        for message in messages:
            if message.source != comm.rank:
                continue
            data = torch.zeros(message.nbytes, dtype=torch.uint8)
            unless_failed(message.get, data)
            if message.dest == comm.rank:
                unless_failed(message.put, data)
            else:
                sending.append(comm.isend(data, message.dest, TAG))
        for message, data, work in receiving:
            work.wait(limit)
            unless_failed(message.put, data)
        for work in sending:
            work.wait(limit)
    if failures:
        raise failures[0]
