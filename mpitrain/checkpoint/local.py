"""Checkpoints on the nodes' local disks: written there, protected by other nodes, and restored after a loss.

    LOCAL/mpitrain-<id of the run>/step-00000100/
      manifest.json      the same on every node
      rank-00002.h5      files of this node's ranks
      rank-00000.h5      redundancy partner: copy of a file of the previous node
      parity-00001-00000.bin     redundancy xor: see `parity`

The id is stored in the run's checkpoint folder, and a run from the start gets a new one. A disk that was absent for
some time therefore cannot restore checkpoints of an abandoned run.
"""

from __future__ import annotations

import os
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.checkpoint import folders, parity
from mpitrain.checkpoint.commit import FileLayout, Target, attempt, write_checkpoint
from mpitrain.checkpoint.contents import has_intact_tensors
from mpitrain.checkpoint.files import Part
from mpitrain.checkpoint.manifest import (
    MANIFEST,
    NON_FINITE_SINCE,
    Manifest,
    Values,
    decode,
    missing_file,
    read_manifest,
)
from mpitrain.checkpoint.parity import FileTransfer, exchange
from mpitrain.errors import CheckpointError, InputError
from mpitrain.storage.disk import read_plain, remove_folder, reporting, sync, write_whole

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

IDENTITY = "identity"
_FETCHED = ".tmp-brought"


class LocalFolders:
    """Node-local checkpoints of a run. Methods that take a communicator are collective over it.

    Args:
        base: Folder on the local disk of this rank's node.
        nodes: Node of each rank.
        redundancy: Protection against the loss of a node: "none", "partner" or "xor".

    Attributes:
        root: Folder of this run on this rank's node after `prepare`; `base` before.
    """

    def __init__(self, base: Path, nodes: Sequence[int], redundancy: str) -> None:
        self._base, self._nodes, self._redundancy = base, tuple(nodes), redundancy
        self._leaders = {node: ranks[0] for node, ranks in parity.ranks_of(nodes).items()}
        self.root = base

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.root / folders.folder_name(step)

    def _is_leader(self, comm: Communicator) -> bool:
        return self._leaders[self._nodes[comm.rank]] == comm.rank

    def _on_leaders(self, comm: Communicator, act: Callable[[], object], folder: Path | None = None) -> None:
        """Run a function on the first rank of each node; errors are raised on all ranks, see `attempt`. Collective."""
        attempt(comm, act if self._is_leader(comm) else None, folder)

    def prepare(self, comm: Communicator, shared: Path) -> None:
        """Create the folders and remove leftovers. Collective.

        Args:
            comm: All ranks.
            shared: Checkpoint folder of the run.

        Raises:
            InputError: A folder cannot be used, or several nodes share one folder.
        """
        identity = comm.on_root(lambda: _identity(shared))
        self.root = self._base / f"mpitrain-{identity}"
        probe = comm.broadcast_object(secrets.token_hex(4))
        probe_file = self.root / f"{folders.PROBE}-{self._nodes[comm.rank]}.tmp-{probe}"

        def make() -> None:
            with reporting(f"checkpoint.local {self._base} cannot be used", "give a folder on each node's disk"):
                self.root.mkdir(parents=True, exist_ok=True)
                folders.remove_leftovers(self.root)

        def check_others() -> None:
            if len(list(self.root.glob(f"{folders.PROBE}-*.tmp-{probe}"))) > 1:
                raise InputError(
                    f"checkpoint.local {self._base} is one folder for several nodes; use one on each node's own disk, "
                    "or leave it empty"
                )

        self._on_leaders(comm, make)
        try:
            self._on_leaders(comm, probe_file.touch)
            self._on_leaders(comm, check_others)
        finally:
            if self._is_leader(comm):
                probe_file.unlink(missing_ok=True)

    def require_room(self, comm: Communicator, of_ranks: Sequence[int], saves: int) -> None:
        """Raise InputError if a node's disk has no room for its part of future saves and its redundancy. Collective.

        Args:
            comm: All ranks.
            of_ranks: Bytes of each rank's tensors in a checkpoint.
            saves: Number of saves.
        """
        of_nodes = [sum(of_ranks[rank] for rank in ranks) for _, ranks in sorted(parity.ranks_of(self._nodes).items())]
        number, nodes = sorted(self._leaders).index(self._nodes[comm.rank]), len(of_nodes)
        size = of_nodes[number]
        if nodes > 1 and self._redundancy == "partner":
            size += of_nodes[number - 1]
        elif nodes > 1 and self._redundancy == "xor":
            size += size // (nodes - 1)
        fix = "make room on that node, or choose another folder"
        self._on_leaders(comm, partial(folders.require_room, self.root, "checkpoint.local", size, saves, 1, fix))

    # -- saving

    def save(self, layout: FileLayout, step: int, parts: Sequence[Part], values: Values) -> None:
        """Write a checkpoint to the nodes' disks, then remove the older ones there. Collective.

        Args:
            layout: Ranks that save together, with their files.
            step: Step at which the checkpoint is saved.
            parts: Parts that this rank writes.
            values: Values that the manifest stores beside the tensors.
        """
        target = Target(self.folder(step), self._is_leader(layout.comm), single_leader=False)
        write_checkpoint(layout, target, step, parts, values, partial(self._add_redundancy, layout.comm))
        self.remove_up_to(layout.comm, step - 1, finite=not values.get(NON_FINITE_SINCE))

    def _add_redundancy(
        self, comm: Communicator, folder: Path, owners: dict[str, int], sizes: dict[str, int]
    ) -> Sequence[parity.ParitySet]:
        if self._redundancy == "partner":
            exchange(comm, parity.copy_rounds(parity.partner_copies(owners, sizes, self._nodes), folder, folder))
        if self._redundancy != "xor":
            return ()
        sets = parity.parity_sets(owners, sizes, self._nodes)
        exchange(comm, parity.parity_rounds(sets, sizes, folder))
        for one, ranks in sets:
            for name, rank in zip(one.parities, ranks, strict=True):
                if rank == comm.rank and (folder / name).exists():
                    sync(folder / name)
        return [one for one, _ in sets]

    def remove_up_to(self, comm: Communicator, step: int, *, finite: bool = True) -> None:
        """Remove the checkpoints up to a step. Collective.

        Args:
            comm: All ranks.
            step: Last step whose checkpoint is removed.
            finite: If true, the checkpoint that replaces them was saved while training was learning; if false, the
                newest such checkpoint is kept.
        """

        def remove() -> None:
            newest_finite = None if finite else folders.newest_finite(self.root)
            for old in folders.finished_steps(self.root):
                if old <= step and old != newest_finite:
                    folders.discard(self.folder(old))
            with suppress(OSError):  # a run that ended well leaves no folder on the nodes
                self.root.rmdir()

        self._on_leaders(comm, remove)

    # -- loading

    def steps(self, comm: Communicator) -> list[int]:
        """Return the steps for which any node has a checkpoint folder, newest first. Collective."""
        mine = folders.finished_steps(self.root) if self._is_leader(comm) else []
        return sorted({step for steps in comm.all_gather_object(mine) for step in steps}, reverse=True)

    def manifest(self, comm: Communicator, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint from any node, and write it on nodes that lack it. Collective.

        Args:
            comm: All ranks.
            folder: Folder of the checkpoint on this rank's node.

        Raises:
            CheckpointError: No node has a readable manifest.
        """
        mine: tuple[int, bytes] | None = None  # CRC-32 and bytes of this node's manifest, if it is whole
        if self._is_leader(comm):
            with suppress(CheckpointError, OSError):
                read_manifest(folder)
                data = (folder / MANIFEST).read_bytes()
                mine = zlib.crc32(data), data
        hashes = comm.all_gather_object(mine and mine[0])
        candidates = [rank for rank, crc in enumerate(hashes) if crc]
        if not candidates:
            raise CheckpointError(f"{folder} has no readable {MANIFEST} on any node", agreed=True)
        most = max(candidates, key=lambda rank: (hashes.count(hashes[rank]), -rank))
        text = comm.broadcast_object(mine[1].decode() if mine and comm.rank == most else "", most)

        def keep() -> None:
            if mine is not None and mine[0] == hashes[most]:
                return
            if mine is not None:  # left by an earlier attempt of this run
                folders.discard(folder)
            folder.mkdir(parents=True, exist_ok=True)  # a folder with a damaged manifest may have files that are whole
            (folder / MANIFEST).write_text(text, encoding="utf-8")

        self._on_leaders(comm, keep)
        return decode(text.encode())

    def fetch_files(
        self, comm: Communicator, folder: Path, manifest: Manifest, needed: Collection[str], *, verify: bool = False
    ) -> list[str]:
        """Copy or rebuild the files that this node's ranks need, so that they are in this node's folder. Collective.

        Args:
            comm: All ranks.
            folder: Folder of the checkpoint on this rank's node.
            manifest: Contents of the checkpoint.
            needed: Names of the files that this rank needs.
            verify: If true, hash the tensors in every file, and treat a file with damaged bytes as lost.

        Returns:
            Names of the files with damaged bytes, on any node.

        Raises:
            CheckpointError: No node has a file, and it cannot be rebuilt.
        """
        self._on_leaders(comm, partial(_remove_temporary_files, folder), folder)
        sizes = manifest.files | {p: one.chunk for one in manifest.parity for p in one.parities}
        is_leader = self._is_leader(comm)
        mine = [name for name, size in sizes.items() if is_leader and not missing_file(folder, [(name, size)])]
        damaged = [n for n in mine if verify and n in manifest.files and not has_intact_tensors(folder, manifest, n)]
        intact_files = comm.all_gather_object([name for name in mine if name not in damaged])
        all_damaged = sorted({name for names in comm.all_gather_object(damaged) for name in names})
        targets: dict[int, set[str]] = {node: set() for node in self._leaders}
        for rank, requested in enumerate(comm.all_gather_object(sorted(needed))):
            targets[self._nodes[rank]].update(requested)
        where: dict[str, int] = {}
        for rank in self._leaders.values():
            for name in intact_files[rank]:
                where.setdefault(name, rank)
        missing = sorted({name for requested in targets.values() for name in requested} - set(where))
        built = {n: next(self._leaders[node] for node in sorted(targets) if n in targets[node]) for n in missing}
        work = [_rebuild(folder, manifest, n, n in all_damaged, where, built[n]) for n in missing]
        attempt(comm, lambda: exchange(comm, chain.from_iterable(work)), folder)
        built_here = [name for name, rank in built.items() if rank == comm.rank]
        attempt(comm, partial(_install_rebuilt_files, folder, manifest, built_here, verify), folder)
        where |= built
        copies = []
        for node, leader in self._leaders.items():
            lacking = sorted(n for n in targets[node] if n not in intact_files[leader] and built.get(n) != leader)
            copies += [parity.FileCopy(name, manifest.files[name], where[name], leader) for name in lacking]
        fetched = folder / _FETCHED
        self._on_leaders(comm, partial(fetched.mkdir, exist_ok=True), folder)
        attempt(comm, lambda: exchange(comm, parity.copy_rounds(copies, folder, fetched)), folder)
        arrived = [m.file for m in copies if m.dest == comm.rank]

        def settle() -> None:
            for name in arrived:
                os.replace(fetched / name, folder / name)
            remove_folder(fetched)

        self._on_leaders(comm, settle, folder)
        return all_damaged


def _rebuild(
    folder: Path, manifest: Manifest, name: str, damaged: bool, where: Mapping[str, int], builder: int
) -> Iterator[Sequence[FileTransfer]]:
    """Return the rounds of messages that rebuild a file on rank `builder`. Raises CheckpointError.

    Args:
        folder: Folder of the checkpoint on each node.
        manifest: Contents of the checkpoint.
        name: Name of the file.
        damaged: If true, the message says that the file is damaged rather than missing.
        where: A rank that has each available file.
        builder: Rank that gets the file.
    """
    one = next((s for s in manifest.parity if name in s.files), None)
    problem = f"{folder / name} is " + ("damaged on every node that has it" if damaged else "on no node of this job")
    if one is None:
        raise CheckpointError(f"{problem}, and there is no {'whole ' * damaged}copy", agreed=True)
    lost = one.files.index(name)
    needed_files = [file for file in one.files if file not in ("", name)]
    needed_files += [parity_file for holder, parity_file in enumerate(one.parities) if holder != lost]
    absent = [other for other in needed_files if other not in where]
    if absent:
        raise CheckpointError(f"{problem}, and cannot be rebuilt without {absent[0]}", agreed=True)
    target = folder / f"{name}{_FETCHED}"
    return parity.rebuild_rounds(one, lost, manifest.files, where.__getitem__, builder, folder, target)


def _remove_temporary_files(folder: Path) -> None:
    """Remove temporary files that an interrupted restart has left."""
    for path in folder.glob(f"*{_FETCHED}"):
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink()


def _install_rebuilt_files(folder: Path, manifest: Manifest, names: Sequence[str], verify: bool) -> None:
    for name in names:
        rebuilt = folder / f"{name}{_FETCHED}"
        sync(rebuilt)
        os.replace(rebuilt, folder / name)
        if verify and not has_intact_tensors(folder, manifest, name):
            raise CheckpointError(
                f"{folder / name} cannot be rebuilt: a parity file that it is computed from is damaged as well"
            )


def _identity(shared: Path) -> str:
    path = shared / IDENTITY
    with reporting(f"{path} cannot be used", "choose another run.dir"):
        if not path.exists():
            write_whole(path, secrets.token_hex(8) + "\n")
        identity = read_plain(path).decode(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{16}", identity):  # the identity is used as part of a folder name
        raise InputError(f"{path} does not contain the identity of a run; remove it")
    return identity
