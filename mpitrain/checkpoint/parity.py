"""Copies and parities of files on node-local disks, so that all files survive the loss of a node.

partner: every file is also stored on the next node.

xor: files of different nodes form a set. The file of each member is cut into one segment per other member, and each
member stores the exclusive or of one segment of every other member's file. The scheme is that of SCR (Moody,
Bronevetsky, Mohror, de Supinski, "Design, Modeling, and Evaluation of a Scalable Multi-level Checkpointing System",
SC 2010):

    member 0    member 1    member 2         a0 is segment 0 of member 0's file
    a0 a1       b0 b1       c0 c1            files
    b0 ^ c0     a0 ^ c1     a1 ^ b1          parities: none contains a segment of its own member

A set therefore survives the loss of any one member, and a parity has 1 / (members - 1) of the bytes of a file. Most
functions here list the messages; `exchange` sends them.

`exchange` moves the bytes of files between ranks in windows, so that no rank waits for another rank's disk alone. Every
rank knows all messages. A rank whose disk fails continues to send and receive, so that no other rank waits for it, and
raises its error at the end.
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

GROUP = 8  # approximate number of nodes of a parity set


@dataclass(frozen=True)
class FileCopy:
    """Copy of a file from one rank's folder to another's.

    Attributes:
        file: Name of the file.
        size: Size in bytes.
        source: Rank that has the file.
        dest: Rank that gets the copy.
    """

    file: str
    size: int
    source: int
    dest: int


def partner_copies(owners: Mapping[str, int], sizes: Mapping[str, int], nodes: Sequence[int]) -> list[FileCopy]:
    """Return the messages that copy every file to the next node.

    Args:
        owners: Rank that wrote each file.
        sizes: Size of each file in bytes.
        nodes: Node of each rank.

    Returns:
        One message per file; none on a single node.
    """
    ranks = ranks_of(nodes)
    numbers = sorted(ranks)
    if len(numbers) < 2:
        return []
    copies = []
    for file, owner in owners.items():
        here = nodes[owner]
        there = ranks[numbers[(numbers.index(here) + 1) % len(numbers)]]
        copies.append(FileCopy(file, sizes[file], owner, there[ranks[here].index(owner) % len(there)]))
    return copies


def ranks_of(nodes: Sequence[int]) -> dict[int, list[int]]:
    """Return the ranks of each node, in order."""
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


def parity_sets(
    owners: Mapping[str, int], sizes: Mapping[str, int], nodes: Sequence[int]
) -> list[tuple[ParitySet, tuple[int, ...]]]:
    """Group files of different nodes into sets that protect each other.

    Args:
        owners: Rank that wrote each file.
        sizes: Size of each file in bytes.
        nodes: Node of each rank.

    Returns:
        Sets, each with the ranks that act for its members; none on a single node.
    """
    ranks = ranks_of(nodes)
    numbers = sorted(ranks)
    bounds = split(len(numbers), max(1, len(numbers) // GROUP))
    sets = []
    for lo, hi in pairwise(bounds):
        members = numbers[lo:hi]
        if len(members) < 2:
            continue
        by_member = [
            sorted((owner, file) for file, owner in owners.items() if nodes[owner] == node) for node in members
        ]
        for lane in range(max(len(files) for files in by_member)):
            files = tuple(member_files[lane][1] if lane < len(member_files) else "" for member_files in by_member)
            largest = max(sizes[file] for file in files if file)
            parities = tuple(f"parity-{node:05d}-{lane:05d}.bin" for node in members)
            acting = tuple(
                member_files[lane][0] if lane < len(member_files) else ranks[node][lane % len(ranks[node])]
                for member_files, node in zip(by_member, members, strict=True)
            )
            sets.append((ParitySet(files, parities, -(-largest // (len(members) - 1))), acting))
    return sets


def segment(member: int, holder: int) -> int:
    """Return the number of the segment of `member`'s file that is part of `holder`'s parity.

    Args:
        member: Number of the member whose file it is.
        holder: Number of another member of the set.
    """
    return holder if holder < member else holder - 1


def copy_rounds(copies: Sequence[FileCopy], source: Path, dest: Path) -> Iterator[list[FileTransfer]]:
    """Yield the rounds of messages that copy files.

    Args:
        copies: Copies to make.
        source: Folder from which a rank reads its files.
        dest: Folder to which a rank writes the copies.
    """
    for first in range(0, max((m.size for m in copies), default=0), WINDOW):
        yield [
            FileTransfer(
                m.source,
                m.dest,
                min(WINDOW, m.size - first),
                partial(_read, source / m.file, first),
                partial(_write, dest / m.file, first, m.size),
            )
            for m in copies
            if m.size > first
        ]


def parity_rounds(
    sets: Sequence[tuple[ParitySet, tuple[int, ...]]], sizes: Mapping[str, int], folder: Path
) -> Iterator[list[FileTransfer]]:
    """Yield the rounds of messages that create the parities.

    Args:
        sets: Result of `parity_sets`.
        sizes: Size of each file in bytes.
        folder: Folder on each rank's node that has its file and gets its parity.
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
                    partial(_xor_into, folder / one.parities[holder], first, one.chunk),
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
    """Yield the rounds of messages that rebuild a lost file.

    Args:
        one: Parity set of the file.
        lost: Number of the member whose file is lost.
        sizes: Size of each file in bytes.
        holder_of: Function that returns a rank that has a given file or parity of the set.
        builder: Rank that gets the file.
        folder: Folder on each rank's node that has those files.
        target: Path of the rebuilt file.
    """
    total = sizes[one.files[lost]]
    for holder in range(len(one.files)):
        if holder == lost:
            continue
        begin = segment(lost, holder) * one.chunk
        for first in range(0, min(one.chunk, max(0, total - begin)), WINDOW):
            window = min(WINDOW, one.chunk - first)
            add = partial(_xor_into, target, begin + first, total)
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
    """Fill `into` with a member's segment, starting at byte `first` of it; bytes beyond the file stay zero."""
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


def _xor_into(path: Path, offset: int, size: int, data: memoryview) -> None:
    """Combine bytes by exclusive or into a file of `size` bytes, zeros at first; bytes beyond the end are dropped."""
    data = data[: max(0, size - offset)]
    with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        os.ftruncate(descriptor, size)
        before = bytearray(len(data))
        read_exactly(descriptor, memoryview(before), offset, path)
        mixed = np.bitwise_xor(np.frombuffer(before, np.uint8), np.frombuffer(data, np.uint8))
        write_at(descriptor, mixed.data, offset)


WINDOW = 8 << 20  # largest size of a message in bytes


@dataclass(frozen=True)
class FileTransfer:
    """Message that carries bytes of one rank's file to another's.

    Attributes:
        source: Rank that has the bytes.
        dest: Rank that gets them; may equal `source`.
        nbytes: Number of bytes.
        get: Function called on `source` with the memory to fill.
        put: Function called on `dest` with the bytes.
    """

    source: int
    dest: int
    nbytes: int
    get: Callable[[memoryview], None]
    put: Callable[[memoryview], None]


def exchange(comm: Communicator, rounds: Iterable[Sequence[FileTransfer]]) -> None:
    """Send and receive the messages of all rounds, one round after the other. Collective.

    Args:
        comm: Ranks that take part.
        rounds: Messages of each round, equal on all ranks.

    Raises:
        OSError, CheckpointError: After the last round, the first error of this rank's `get` or `put`.
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
