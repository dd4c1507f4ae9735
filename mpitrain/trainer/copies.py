"""Copies of the ranks' state in host memory, each kept by two ranks, and read as a checkpoint is.

A copy is what a rank would write into its file of a checkpoint. Those of all ranks at one step are a set, with a
manifest whose files are the copies; a plan made from it says which bytes of which copy a rank needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpitrain.checkpoint import Manifest, Part, TensorSpec
from mpitrain.checkpoint.manifest import DTYPES, Extent, decode_extent, encode_extent
from mpitrain.checkpoint.reading import Block, plan, settle
from mpitrain.checkpoint.store import Snapshot, needed
from mpitrain.comm import Communicator
from mpitrain.comm.faults.ulfm import partners
from mpitrain.storage.hdf5 import crc32
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.folder import together
from mpitrain.trainer.state import merged

_TAG = 31_000  # apart from those of training's and checkpoints' messages
_KEPT = 2  # sets


class Key(NamedTuple):
    """Names a set: the step, how many ranks made it, and how often ranks had been lost before."""

    step: int
    ranks: int
    losses: int


class PeerCopy:
    """Memory for one rank's parts."""

    def __init__(self) -> None:
        self.key: Key | None = None  # None while it is being made
        self.owner = 0  # the rank whose parts they are, in the world that made the set
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.contents = ""  # JSON: what lies where in the memory
        self.values: dict[str, Any] = {}  # what goes with the parts; only where the owner is this rank

    def fill(self, snapshot: Snapshot, parts: Sequence[Part], values: dict[str, Any], owner: int) -> None:
        copies = snapshot.copy(parts)
        self.memory, self.contents = _flat(copies), _contents(copies)
        self.values, self.owner = values, owner


class Alone(NamedTuple):
    """A copy of all that a rank holds, which is what every rank of its column of the mesh holds (stage 0).

    columns: how many there are; a rank's is its number modulo that. crc: of the memory, the same in all of a column.
    """

    copy: PeerCopy
    columns: int
    crc: int


class Copies:
    """This rank's own copies, and those it keeps for another rank. losses: how often ranks were lost so far."""

    def __init__(self) -> None:
        self._own = [PeerCopy() for _ in range(_KEPT)]
        self._kept = [PeerCopy() for _ in range(_KEPT)]
        self._snapshots = [Snapshot() for _ in range(_KEPT)]
        self._next = 0
        self._alone: Alone | None = None
        self._world: Communicator | None = None  # whose ranks know each other's contents
        self.losses = 0

    def take(self, world: Communicator, engine: Engine, step: int, values: dict[str, Any]) -> None:
        """Copy the state at the end of a step. Collective.

        Between two calls must lie an operation that every rank takes part in.
        """
        parts, rest = engine.parts()
        slot, self._next = self._next, (self._next + 1) % _KEPT
        own, kept = self._own[slot], self._kept[slot]
        if self._own[slot - 1].key is not None:  # which is whole by now
            self._alone = None
        own.key = kept.key = None
        own.fill(self._snapshots[slot], parts, values | rest, world.rank)
        key = Key(step, world.size, self.losses)
        if world.size > 1:
            self._exchange(world, own, kept, slot)
            kept.key = key
        own.key = key

    def take_alone(self, engine: Engine, key: Key, values: dict[str, Any], rank: int, columns: int) -> None:
        """Copy all that this rank holds, after ranks died with those that kept their copies; needs stage 0.

        key: of the set it may stand in for. rank: in the world that made the engine.
        """
        copy = PeerCopy()
        parts, rest = engine.parts(alone=True)
        copy.fill(Snapshot(), parts, values | rest, rank)
        copy.key = key
        self._alone = Alone(copy, columns, crc32(copy.memory.numpy()))

    def _exchange(self, world: Communicator, own: PeerCopy, kept: PeerCopy, slot: int) -> None:
        """Give the partner this rank's copy, and keep the one of whose partner this rank is."""
        to = partners(world.nodes)
        dest, source = to[world.rank], to.index(world.rank)
        told_before = self._own[slot - 1].contents if self._world is world else ""
        news = own.contents if own.contents != told_before else ""
        text = torch.from_numpy(np.frombuffer(news.encode(), dtype=np.uint8).copy())
        sizes = torch.tensor([own.memory.numel(), text.numel()])
        theirs = torch.empty_like(sizes)
        _swap(world, sizes, dest, theirs, source)
        nbytes, length = int(theirs[0]), int(theirs[1])
        their_text = torch.empty(length, dtype=torch.uint8)
        _swap(world, text, dest, their_text, source)
        kept.contents = bytes(their_text.numpy()).decode() if length else self._kept[slot - 1].contents
        if kept.memory.numel() != nbytes:
            kept.memory = torch.empty(nbytes, dtype=torch.uint8)
        _swap(world, own.memory, dest, kept.memory, source)
        kept.owner = source
        self._world = world

    def restore(self, world: Communicator, engine: Engine | None) -> Manifest | None:
        """Fill the engine from the newest set that the ranks hold whole between them; None if there is none.

        Collective. engine: None on a rank that only gives. What was found stays until a newer set is whole.
        """
        found = self.newest(world)
        if found is None:
            return None
        key, files = found
        for slot in range(_KEPT):
            if self._own[slot].key != key:
                self._own[slot].key = self._kept[slot].key = None
            else:
                self._next = (slot + 1) % _KEPT
        manifest, holders = self._manifest(world, key, files)
        of = Path(f"the copy of step {key.step}")
        blocks = together(world, lambda: plan(of, manifest, engine.parts_to_load(manifest)) if engine else [])
        fetch(world, blocks, {name: copy.memory for name, copy in files.items()}, holders)
        if engine is not None:
            engine.finish_load(manifest)
        return manifest

    def parts(self, world: Communicator) -> tuple[int, list[Part], dict[str, Any]] | None:
        """The newest set that the ranks hold whole between them as a checkpoint is written: step, this rank's parts
        and the values that go with them; None if there is none. Collective."""
        found = self.newest(world)
        if found is None:
            return None
        key, files = found
        manifest, _ = self._manifest(world, key, files)
        return key.step, [part for copy in files.values() for part in _parts(copy)], manifest.values

    def newest(self, world: Communicator) -> tuple[Key, dict[str, PeerCopy]] | None:
        """The newest set that the ranks hold whole between them, and what this rank has of it. Collective.

        Only where there is none do copies of what a rank holds alone count, if all of one column are the same.
        """
        mine = [copy for copy in (*self._own, *self._kept) if copy.key is not None]
        alone = self._alone
        spare = None if alone is None else [alone.copy.key, alone.copy.owner, alone.columns, alone.crc]
        told = world.all_gather_object([[[copy.key, copy.owner] for copy in mine], spare])
        held = [(Key(*k), owner) for of, _ in told for k, owner in of]
        key = newest_whole(held)
        if key is not None:
            return key, {str(copy.owner): copy for copy in reversed(mine) if copy.key == key}
        spares = [(Key(*of[0]), int(of[1]), int(of[2]), int(of[3])) for _, of in told if of]
        more = [(k, other) for k, owner, columns, _ in spares for other in range(owner % columns, k.ranks, columns)]
        key = newest_whole([*held, *more])
        if key is None:
            return None
        columns = spares[0][2]
        lacking = {owner % columns for owner in range(key.ranks) if (key, owner) not in held}
        for column in lacking:
            if len({crc for k, owner, _, crc in spares if k == key and owner % columns == column}) != 1:
                return None
        files = {str(c.owner): c for c in reversed(mine) if c.key == key and c.owner % columns not in lacking}
        if alone is not None and alone.copy.key == key and alone.copy.owner % columns in lacking:
            files[str(key.ranks + alone.copy.owner)] = alone.copy
        return key, files

    def _manifest(
        self, world: Communicator, key: Key, files: Mapping[str, PeerCopy]
    ) -> tuple[Manifest, dict[str, int]]:
        """That of a set, and for each copy the rank to get it from: this one, if it has it."""
        told = world.all_gather_object([[name, copy.contents] for name, copy in files.items()])
        known = [copy.values for copy in (*self._own, *files.values()) if copy.key == key and copy.values]
        everyones: list[dict[str, Any]] = [values for of in world.all_gather_object(known[:1]) for values in of]
        values = (everyones[0] if everyones else {}) | {"optimizer": merged(some["optimizer"] for some in everyones)}
        holders: dict[str, int] = {}
        tensors: dict[str, TensorSpec] = {}
        extents: list[Extent] = []
        for rank, of in enumerate(told):
            for name, contents in of:
                if name in holders:
                    continue
                holders[name] = world.rank if name in files else rank
                for spec, extent in _decoded(contents):
                    tensors[spec.name] = spec
                    extents.append(Extent(extent.piece, name, extent.offset, ()))
        extents.sort(key=lambda extent: extent.file not in files)  # of two that hold a piece, the one that is here
        return Manifest(key.step, tensors, {}, tuple(extents), values), holders


def newest_whole(held: Sequence[tuple[Key, int]]) -> Key | None:
    """The newest set of which every owner's copy is held by some rank; of one step, the one made last."""
    owners: dict[Key, set[int]] = {}
    for key, owner in held:
        owners.setdefault(key, set()).add(owner)
    whole = [key for key, of in owners.items() if len(of) == key.ranks]
    return max(whole, key=lambda key: (key.step, key.losses), default=None)


def fetch(
    world: Communicator, blocks: Sequence[Block], files: Mapping[str, torch.Tensor], holders: Mapping[str, int]
) -> None:
    """Read the blocks of a plan from the memory of the ranks that hold them. Collective.

    files: the bytes of those that this rank holds. holders: of all of them.
    """
    ordered = sorted(blocks, key=lambda block: holders[block.extent.file])
    asked = np.array([[int(b.extent.file), b.offset, b.size] for b in ordered], dtype=np.int64).reshape(-1, 3)
    from_rank = np.array([holders[b.extent.file] for b in ordered], dtype=np.int64)
    wanted = np.bincount(from_rank, minlength=world.size)  # blocks from each rank
    nbytes = np.bincount(from_rank, weights=asked[:, 2], minlength=world.size).astype(np.int64)
    given = np.empty_like(wanted)
    world.all_to_all(given, wanted)
    questions = np.empty((int(given.sum()), 3), dtype=np.int64)
    world.all_to_all(
        questions.reshape(-1), asked.reshape(-1), out_counts=(3 * given).tolist(), in_counts=(3 * wanted).tolist()
    )
    pieces = [files[str(owner)][offset : offset + size] for owner, offset, size in questions.tolist()]
    leaving = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    bounds = np.concatenate([[0], np.cumsum(given)])
    sent = [int(questions[lo:hi, 2].sum()) for lo, hi in pairwise(bounds)]
    arriving = np.empty(int(nbytes.sum()), dtype=np.uint8)
    world.all_to_all(arriving, leaving, out_counts=nbytes.tolist(), in_counts=sent)
    begin = 0
    for block in ordered:
        data = arriving[begin : begin + block.size]
        for use in block.uses:
            use.copy(data)
        begin += block.size
    settle(blocks)


def _swap(world: Communicator, x: torch.Tensor, dest: int, out: torch.Tensor, source: int) -> None:
    receive = world.irecv(out, source, _TAG)
    send = world.isend(x, dest, _TAG)
    receive.wait()
    send.wait()


def _flat(copies: Sequence[Part]) -> torch.Tensor:
    """The memory of a snapshot's parts, as bytes."""
    nbytes = needed(copies)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    storage: Any = copies[0].data.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))


def _contents(copies: Sequence[Part]) -> str:
    """Return the contents of that memory as JSON: shape and type of each part's tensor, and its extent."""
    listed = []
    for part in copies:
        offset = int(part.data.storage_offset()) * part.data.element_size()
        listed.append([part.spec.shape, part.spec.dtype, encode_extent(Extent(part.piece, "", offset, ()))])
    return json.dumps(listed)


def _decoded(contents: str) -> Iterator[tuple[TensorSpec, Extent]]:
    for shape, dtype, encoded in json.loads(contents):
        extent = decode_extent(encoded)
        yield TensorSpec(extent.piece.name, tuple(shape), dtype), extent


def _parts(copy: PeerCopy) -> Iterator[Part]:
    """The parts a copy was made of, in its memory."""
    for spec, extent in _decoded(copy.contents):
        data = copy.memory[extent.offset : extent.offset + extent.piece.numel * spec.itemsize]
        yield Part(spec, extent.piece, data.view(DTYPES[spec.dtype]))
