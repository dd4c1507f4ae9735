"""Recovery from the death of ranks: copies of the state in other ranks' memory, and training without a new job.

At the end of every copied step, each rank stores a copy of its parts of a checkpoint in host memory and sends it to a
partner on another node. The copies of all ranks at one step are a set:

    rank 0   own parts | rank 2's         Ranks 0 and 1 are on node A, 2 and 3 on node B. Copies of two steps are kept,
    rank 1   own parts | rank 3's         so that one set is complete everywhere while the next one is made.
    rank 2   own parts | rank 0's
    rank 3   own parts | rank 1's

When ranks die, the others form a smaller world and load the newest complete set. It is read like a checkpoint whose
files are the copies: each rank plans from its manifest which bytes of which copy it needs. If a rank died together with
its partner, the others use the state of any rank in its column of the mesh, which is the same at stage 0; at other
stages they load the last checkpoint.

As many of the ranks train as the layout allows (`data_ranks`); the others wait and provide their copies. If no layout
fits, the newest set is written as a checkpoint, and the job ends for a restart.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpitrain.checkpoint import Manifest, Part, Store, TensorSpec
from mpitrain.checkpoint.manifest import DTYPES, Extent, decode_extent, decode_piece, encode_extent, encode_piece
from mpitrain.checkpoint.reading import Block, plan, wait_for_copies
from mpitrain.checkpoint.store import Snapshot, snapshot_bytes
from mpitrain.comm import Communicator
from mpitrain.comm.faults import ulfm
from mpitrain.comm.job.abort import exit_code, print_error
from mpitrain.config.settings import Config
from mpitrain.data.folders import agree_on_errors
from mpitrain.errors import EXIT_REQUEUE, CommunicationError, InputError, MpitrainError
from mpitrain.layout.mesh import axes_of, count_near, whole_groups_first
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.storage.hdf5 import crc32
from mpitrain.storage.text import counted
from mpitrain.trainer.data import microbatch_on
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.recording.records import Records
from mpitrain.trainer.run import Callback, Restored, Run, Step
from mpitrain.trainer.state import merge_states

_COPIES = 31_000  # tag of copies
_SETS = 2  # sets of copies


class Key(NamedTuple):
    """Identity of a set: its step, the number of ranks that made it, and the number of losses of ranks before it."""

    step: int
    ranks: int
    losses: int


class PeerCopy:
    """Host memory for a copy of one rank's parts."""

    def __init__(self) -> None:
        self.key: Key | None = None  # None while the copy is being made
        self.owner = 0  # rank whose parts they are, in the world that made the set
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.contents = ""  # JSON: position of each part in the memory
        self.values: dict[str, Any] = {}  # values stored with the parts; only if the owner is this rank

    def fill(self, snapshot: Snapshot, parts: Sequence[Part], values: dict[str, Any], owner: int) -> None:
        copies = snapshot.copy(parts)
        self.memory, self.values, self.owner = torch.empty(0, dtype=torch.uint8), values, owner
        if nbytes := snapshot_bytes(copies):  # all copies share one storage
            storage: Any = copies[0].data.untyped_storage()
            self.memory.set_(storage, 0, (nbytes,), (1,))
        listed = []  # shape and type of each part's tensor, and its extent
        for part in copies:
            offset = int(part.data.storage_offset()) * part.data.element_size()
            listed.append([part.spec.shape, part.spec.dtype, encode_extent(Extent(part.piece, "", offset, ()))])
        self.contents = json.dumps(listed)


class FullCopy(NamedTuple):
    """Copy of the whole state of a rank, which at stage 0 is equal on all ranks of its column of the mesh.

    columns: number of columns; a rank's column is its number modulo this. crc: CRC-32 of the copy, equal in a column.
    """

    copy: PeerCopy
    columns: int
    crc: int


class Copies:
    """Copies of this rank's own state and of another rank's. losses: number of losses of ranks so far."""

    def __init__(self) -> None:
        self._local_copies = [PeerCopy() for _ in range(_SETS)]
        self._peer_copies = [PeerCopy() for _ in range(_SETS)]
        self._snapshots = [Snapshot() for _ in range(_SETS)]
        self._next = 0
        self._full_copy: FullCopy | None = None
        self._world: Communicator | None = None  # world whose ranks know each other's contents
        self.losses = 0

    def take(self, world: Communicator, engine: Engine, step: int, values: dict[str, Any]) -> None:
        """Copy the state at the end of a step. Collective.

        Between two calls, all ranks must take part in some other collective operation.
        """
        parts, engine_values = engine.parts()
        slot, self._next = self._next, (self._next + 1) % _SETS
        local_copy, peer_copy = self._local_copies[slot], self._peer_copies[slot]
        if self._local_copies[slot - 1].key is not None:  # the previous set is complete by now
            self._full_copy = None
        local_copy.key = peer_copy.key = None
        local_copy.fill(self._snapshots[slot], parts, values | engine_values, world.rank)
        key = Key(step, world.size, self.losses)
        if world.size > 1:
            self._exchange(world, local_copy, peer_copy, slot)
            peer_copy.key = key
        local_copy.key = key

    def take_full(self, engine: Engine, key: Key, values: dict[str, Any], rank: int, columns: int) -> None:
        """Copy the whole state of this rank, at stage 0, after ranks died together with their partners.

        key: set that the copy may replace. rank: this rank's number in the engine's world. columns: of the mesh.
        """
        copy = PeerCopy()
        parts, engine_values = engine.parts(alone=True)
        copy.fill(Snapshot(), parts, values | engine_values, rank)
        copy.key = key
        self._full_copy = FullCopy(copy, columns, crc32(copy.memory.numpy()))

    def _exchange(self, world: Communicator, local: PeerCopy, peer: PeerCopy, slot: int) -> None:
        """Send this rank's copy to its partner, and receive the copy of the rank whose partner this one is."""
        to = ulfm.partners(world.nodes)
        dest, source = to[world.rank], to.index(world.rank)
        previous_contents = self._local_copies[slot - 1].contents if self._world is world else ""
        news = local.contents if local.contents != previous_contents else ""
        text = torch.from_numpy(np.frombuffer(news.encode(), dtype=np.uint8).copy())
        sizes = torch.tensor([local.memory.numel(), text.numel()])
        theirs = torch.empty_like(sizes)
        _send_receive(world, sizes, dest, theirs, source)
        nbytes, length = int(theirs[0]), int(theirs[1])
        their_text = torch.empty(length, dtype=torch.uint8)
        _send_receive(world, text, dest, their_text, source)
        peer.contents = bytes(their_text.numpy()).decode() if length else self._peer_copies[slot - 1].contents
        if peer.memory.numel() != nbytes:
            peer.memory = torch.empty(nbytes, dtype=torch.uint8)
        _send_receive(world, local.memory, dest, peer.memory, source)
        peer.owner = source
        self._world = world

    def restore(self, world: Communicator, engine: Engine | None) -> Manifest | None:
        """Load the newest complete set, and return its manifest; None if no set is complete. Collective.

        The set stays until a newer one is complete.

        Args:
            world: Ranks that have copies.
            engine: Engine to load; None on a rank that only provides its copies.
        """
        newest = self.newest(world)
        if newest is None:
            return None
        key, files = newest
        for slot in range(_SETS):
            if self._local_copies[slot].key != key:
                self._local_copies[slot].key = self._peer_copies[slot].key = None
            else:
                self._next = (slot + 1) % _SETS
        manifest, holders = self._manifest(world, key, files)
        path = Path(f"the copy of step {key.step}")
        blocks = agree_on_errors(world, lambda: plan(path, manifest, engine.parts_to_load(manifest)) if engine else [])
        fetch(world, blocks, {name: copy.memory for name, copy in files.items()}, holders)
        if engine is not None:
            engine.finish_load(manifest)
        return manifest

    def parts(self, world: Communicator) -> tuple[int, list[Part], dict[str, Any]] | None:
        """Return the newest complete set in the form of a checkpoint; None if no set is complete. Collective.

        Returns:
            Step, the parts for which this rank is the lowest rank that has them, and the values stored with the parts.
        """
        newest = self.newest(world)
        if newest is None:
            return None
        key, files = newest
        manifest, _ = self._manifest(world, key, files)
        own_parts = {part.piece: part for copy in files.values() for part in _parts(copy)}
        pieces_of_ranks = world.all_gather_object([encode_piece(piece) for piece in own_parts])
        before = {decode_piece(*piece) for pieces in pieces_of_ranks[: world.rank] for piece in pieces}
        return key.step, [part for piece, part in own_parts.items() if piece not in before], manifest.values

    def newest(self, world: Communicator) -> tuple[Key, dict[str, PeerCopy]] | None:
        """Return the key of the newest complete set, and this rank's copies in it by name. Collective.

        Copies of `take_full` are used only if no set is complete without them, and only if those of a column agree.
        """
        mine = [copy for copy in (*self._local_copies, *self._peer_copies) if copy.key is not None]
        alone = self._full_copy
        spare = None if alone is None else [alone.copy.key, alone.copy.owner, alone.columns, alone.crc]
        reports = world.all_gather_object([[[copy.key, copy.owner] for copy in mine], spare])
        copies = [(Key(*k), owner) for entry, _ in reports for k, owner in entry]
        key = newest_complete(copies)
        if key is not None:
            return key, {str(copy.owner): copy for copy in reversed(mine) if copy.key == key}
        spares = [(Key(*entry[0]), int(entry[1]), int(entry[2]), int(entry[3])) for _, entry in reports if entry]
        more = [(k, other) for k, owner, columns, _ in spares for other in range(owner % columns, k.ranks, columns)]
        key = newest_complete([*copies, *more])
        if key is None:
            return None
        columns = spares[0][2]
        lacking = {owner % columns for owner in range(key.ranks) if (key, owner) not in copies}
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
        """Return the manifest of a set, and for each copy the rank to read it from: this rank, if it has the copy."""
        contents_of_ranks = world.all_gather_object([[name, copy.contents] for name, copy in files.items()])
        known = [copy.values for copy in (*self._local_copies, *files.values()) if copy.key == key and copy.values]
        shared: list[dict[str, Any]] = [values for of_rank in world.all_gather_object(known[:1]) for values in of_rank]
        values = (shared[0] if shared else {}) | {"optimizer": merge_states(stored["optimizer"] for stored in shared)}
        holders: dict[str, int] = {}
        tensors: dict[str, TensorSpec] = {}
        extents: list[Extent] = []
        for rank, of_rank in enumerate(contents_of_ranks):
            for name, contents in of_rank:
                if name in holders:
                    continue
                holders[name] = world.rank if name in files else rank
                for spec, extent in _decode(contents):
                    tensors[spec.name] = spec
                    extents.append(Extent(extent.piece, name, extent.offset, ()))
        extents.sort(key=lambda extent: extent.file not in files)  # prefer copies of this rank
        return Manifest(key.step, tensors, {}, tuple(extents), values), holders


def newest_complete(copies: Sequence[tuple[Key, int]]) -> Key | None:
    """Return the newest set for which each owner's copy is on some rank; for equal steps, the one made last."""
    owners = Counter(key for key, _ in dict.fromkeys(copies))
    whole = [key for key, count in owners.items() if count == key.ranks]
    return max(whole, key=lambda key: (key.step, key.losses), default=None)


def fetch(
    world: Communicator, blocks: Sequence[Block], files: Mapping[str, torch.Tensor], holders: Mapping[str, int]
) -> None:
    """Copy the blocks of a plan from the memory of the ranks that have them. Collective.

    Args:
        blocks: Blocks that this rank needs.
        files: Memory of the copies on this rank, by name.
        holders: Rank from which each copy is read, by name.
    """
    ordered = sorted(blocks, key=lambda block: holders[block.extent.file])
    requests = np.array([[int(b.extent.file), b.offset, b.size] for b in ordered], dtype=np.int64).reshape(-1, 3)
    from_rank = np.array([holders[b.extent.file] for b in ordered], dtype=np.int64)
    demand = np.bincount(from_rank, minlength=world.size)  # number of blocks from each rank
    nbytes = np.bincount(from_rank, weights=requests[:, 2], minlength=world.size).astype(np.int64)
    supply = np.empty_like(demand)
    world.all_to_all(supply, demand)
    questions = np.empty((int(supply.sum()), 3), dtype=np.int64)
    world.all_to_all(
        questions.reshape(-1), requests.reshape(-1), out_counts=(3 * supply).tolist(), in_counts=(3 * demand).tolist()
    )
    pieces = [files[str(owner)][offset : offset + size] for owner, offset, size in questions.tolist()]
    leaving = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    sent = [int(each[:, 2].sum()) for each in np.split(questions, np.cumsum(supply)[:-1])]
    arriving = np.empty(int(nbytes.sum()), dtype=np.uint8)
    world.all_to_all(arriving, leaving, out_counts=nbytes.tolist(), in_counts=sent)
    begin = 0
    for block in ordered:
        data = arriving[begin : begin + block.size]
        for use in block.uses:
            use.copy(data)
        begin += block.size
    wait_for_copies(blocks)


def _send_receive(world: Communicator, x: torch.Tensor, dest: int, out: torch.Tensor, source: int) -> None:
    receive = world.irecv(out, source, _COPIES)
    send = world.isend(x, dest, _COPIES)
    receive.wait()
    send.wait()


def _decode(contents: str) -> Iterator[tuple[TensorSpec, Extent]]:
    for shape, dtype, encoded in json.loads(contents):
        extent = decode_extent(encoded)
        yield TensorSpec(extent.piece.name, tuple(shape), dtype), extent


def _parts(copy: PeerCopy) -> Iterator[Part]:
    """Yield the parts of a copy, as views of its memory."""
    for spec, extent in _decode(copy.contents):
        data = copy.memory[extent.offset : extent.offset + extent.piece.numel * spec.itemsize]
        yield Part(spec, extent.piece, data.view(DTYPES[spec.dtype]))


_TAG = 31_500  # differs from the tags of training's messages, of copies and of checkpoints
_PAUSE = 0.02  # seconds between two polls of a waiting rank
_RESTORE, _SAVE, _END = range(3)  # messages to waiting ranks


class TooFewRanks(MpitrainError):
    """Error if the remaining ranks cannot continue; the job must be restarted."""

    exit_code = EXIT_REQUEUE


class LastState(NamedTuple):
    """State in the engine after a step's update. buffers: copies of the model's, which the next step changes."""

    engine: Engine
    key: Key
    values: dict[str, Any]
    buffers: list[torch.Tensor]


class Survivors(Callback):
    """Callback that keeps the state of a run when ranks die. everyone: all living ranks, training or waiting."""

    def __init__(self, trainer: Run) -> None:
        self._trainer, self.everyone = trainer, trainer.world
        self._copies = Copies()
        self._last_state: LastState | None = None
        self._store: Store | None = None
        self.is_training = True  # false if this rank waits
        self._even = True  # true if each rank needs the same number of microbatches, or if that is unknown
        self.must_rebuild = False  # true after ranks died, until the others have formed a new world
        self.misfit = ""  # reason why the remaining ranks cannot train
        self.has_shrunk = False  # true after ranks were lost, until training continues
        self._lost: list[int] = []  # lost ranks, until the first step without them
        self._step = 0  # step from which training continues
        self._failed = 0.0  # time.monotonic() when the first of the lost ranks failed
        self._is_bound = False  # true if that time is only a lower bound
        self._last_alive = time.monotonic()  # last time at which all ranks were known to be alive

    # -- during training

    def on_fit_start(self, trainer: Run) -> None:
        self.copy(trainer)
        self._step, self.has_shrunk = trainer.step, False

    def copy(self, trainer: Run) -> None:
        """Copy the state at the end of a step. Collective over the training ranks."""
        self._copies.take(trainer.world, trainer.engine, trainer.step, trainer.state())

    def on_update(self, trainer: Run, step: Step) -> None:
        """Remember the state after this step at stage 0, where each rank has all of it."""
        engine = trainer.engine
        self._even = engine.synchronous
        if engine.config.parallel.zero in ("auto", 0):  # auto is 0 here
            key = Key(trainer.step, trainer.world.size, self._copies.losses)
            buffers = [buffer.clone() for buffer in engine.module.buffers()]
            self._last_state = LastState(engine, key, trainer.state(), buffers)

    def on_step_end(self, trainer: Run, step: Step) -> None:
        """Report the recovery time after the first step without the lost ranks."""
        self._last_alive = step.met
        if not self._lost:
            return
        seconds = self._last_alive - self._failed
        if trainer.world.rank == 0:
            which = "rank" if len(self._lost) == 1 else "ranks"
            waiting = self.everyone.size - trainer.world.size
            print_error(
                f"mpitrain: {which} {', '.join(map(str, sorted(self._lost)))} died; continuing from step {self._step} "
                f"with {counted(trainer.world.size, 'rank')}{f' ({waiting} waiting)' if waiting else ''}, "
                f"step {self._step + 1} done {'at most ' if self._is_bound else ''}{seconds:.1f} s after the failure"
            )
        step.lost, self._lost = tuple(sorted(self._lost)), []
        step.extras["recovered_s"] = seconds

    # -- after ranks died

    def rebuild_world(self) -> None:
        """Form the world of the remaining ranks, and choose which of them train. Collective over them."""
        near = count_near(axes_of(self._trainer.config.parallel))
        self._shrink_world(lambda nodes: whole_groups_first(nodes, near))
        self._copy_last_state()
        self._trainer.let_go()
        self._reset_settings()
        self._choose_ranks()

    def _shrink_world(self, order: Callable[[Sequence[int]], Sequence[int]] | None) -> None:
        """Form the world of the remaining ranks, with their nodes in the order of `order`. Collective over them."""
        trainer = self._trainer
        self.everyone, loss = ulfm.shrink(self.everyone, order)
        self._copies.losses += 1
        self.must_rebuild, self.has_shrunk, self.misfit = False, True, ""
        self._lost += loss.lost
        left = f"{self.everyone.size} of {self.everyone.size + len(loss.lost)} ranks are left"
        trainer.folder.log.info("lost %s; %s, this one is rank %d", list(loss.lost), left, self.everyone.rank)
        if not loss.is_main_part:
            raise TooFewRanks(
                f"{left}, without a connection to ranks {', '.join(map(str, loss.partitioned))}, which may still run; "
                "start the job again when their nodes can be reached",
                agreed=True,
            )
        well = time.monotonic() - self._last_alive if self.is_training else 0.0
        ago, self._is_bound = ulfm.seconds_since_failure(self.everyone, self._lost, well)
        self._failed = time.monotonic() - ago
        if self._store is not None:
            self._store.abandon()
            self._store = None
        reports = self.everyone.all_gather_object([trainer.saved, self._even])
        trainer.saved, self._even = any(saved for saved, _ in reports), any(even for _, even in reports)

    def _copy_last_state(self) -> None:
        """Copy the state in the engines if no set of copies is complete. Collective over the remaining ranks."""
        last, self._last_state = self._last_state, None
        if self._copies.newest(self.everyone) is not None or last is None or not last.engine.settled:
            return
        with torch.no_grad():
            for buffer, saved in zip(last.engine.module.buffers(), last.buffers, strict=True):
                buffer.copy_(saved)
        columns = self._trainer.config.parallel.ranks_per_data
        self._copies.take_full(last.engine, last.key, last.values, self._trainer.world.rank, columns)

    def _reset_settings(self) -> None:
        """Change the settings for the remaining ranks."""
        trainer, config = self._trainer, self._trainer.config
        parallel, resume = config.parallel, config.checkpoint.resume
        if resume == "never" or trainer.saved:  # earlier checkpoints have been moved away with "never"
            resume = "auto"
        trainer.config = config.model_copy(
            update={
                "parallel": parallel.model_copy(update={"data": "auto"}),
                "checkpoint": config.checkpoint.model_copy(update={"resume": resume}),
            }
        )

    def _choose_ranks(self) -> None:
        """Choose which of the remaining ranks train."""
        trainer, size = self._trainer, self.everyone.size
        parallel = trainer.config.parallel
        ranks = data_ranks(trainer.config, size, even=self._even) * parallel.ranks_per_data
        trainer.world, self.is_training = self.everyone, True
        if ranks == 0:
            sizes = [f"parallel.{axis.name} {ranks}" for axis, ranks in axes_of(parallel) if ranks not in (1, "auto")]
            self.misfit = f"too few for {' x '.join(sizes)}"
        elif ranks < size:
            self.is_training = self.everyone.rank < ranks
            team = self.everyone.split(0 if self.is_training else None, self.everyone.rank, label="training")
            trainer.world = team or self.everyone
        if self.is_training:
            trainer.folder.move_to(trainer.world)
        else:
            trainer.folder.log.info("waiting: %d of %d ranks train", ranks, size)
            trainer.folder.release()

    def restore(self, trainer: Run) -> Restored | None:
        """Load the copies into the engine; return None if no set is complete."""
        self._store = trainer.store
        self._request(_RESTORE)
        manifest = self._copies.restore(self.everyone, trainer.engine)
        return None if manifest is None else Restored(manifest.step, manifest.values)

    # -- ranks that wait

    def wait(self) -> int:
        """Provide this rank's copies to the training ranks until these end, and return their exit code."""
        while True:
            request = torch.empty(2, dtype=torch.int64)
            message = self.everyone.irecv(request, 0, _TAG)
            while not message.done():
                if ulfm.has_failure(self.everyone):
                    raise CommunicationError("ranks died while this rank waited for the training ranks")
                time.sleep(_PAUSE)
            what, code = request.tolist()
            if what == _END:
                return int(code)
            if what == _RESTORE:
                self._copies.restore(self.everyone, None)
                self.has_shrunk, self._lost = False, []
            else:
                self._save()

    def _request(self, what: int, code: int = 0) -> None:
        world = self._trainer.world
        if world.rank == 0:
            for rank in range(world.size, self.everyone.size):
                self.everyone.send(torch.tensor([what, code]), rank, _TAG)

    def end_waiting(self, code: int) -> None:
        """End the waiting ranks with an exit code."""
        with suppress(Exception):  # a waiting rank that died does not matter any more
            self._request(_END, code)

    # -- if no layout fits

    def save_for_restart(self) -> TooFewRanks:
        """Write the newest set as a checkpoint, and return the error to raise. Collective over the training ranks."""
        self._request(_SAVE)
        saved = self._save()
        size = self.everyone.size
        left = f"{counted(size, 'rank')} {'is' if size == 1 else 'are'} left"
        return TooFewRanks(f"{left}, which cannot train: {self.misfit}; {saved}; start the job again", agreed=True)

    def _save(self) -> str:
        """Write the newest set as a checkpoint, and return a description of the outcome. Collective over `everyone`."""
        newest = self._copies.parts(self.everyone)
        if newest is None:
            return "no complete copy of the state is left, so a restart continues from the last checkpoint"
        step, parts, values = newest
        try:
            with self._trainer.open_store(self.everyone) as store:
                store.prepare(set_aside=False)
                if all(folder.name < store.folder(step).name for folder in store.newest_first()):
                    store.save(step, parts, values, durable=True)
        except MpitrainError as error:
            if not error.agreed:
                raise
            return f"step {step} could not be saved ({error})"
        return f"step {step} was saved"


def data_ranks(config: Config, ranks: int, *, even: bool) -> int:
    """Return the number of data-parallel ranks that train after a loss; 0 if there are too few for one replica.

    The sizes of pipeline and tensor groups and the global batch do not change. With run.reproducible, the result
    divides run.workers. ranks: all remaining ranks. even: if true, each must have the same number of microbatches
    (batch norms).
    """
    parallel, section, sizes = config.parallel, config.run, config.train.batch_sizes.after(0)
    for data in range(ranks // parallel.ranks_per_data, 0, -1):
        if section.reproducible and section.workers % data:
            continue
        cut = VirtualWorkers(0, data, section.workers if section.reproducible else data)
        if not even or all(cut.is_even(size, microbatch_on(config, data, parallel.pipeline, size)) for size in sizes):
            return data
    return 0


class PeriodicCopies(Callback):
    """Callback that copies the state every elastic.copy_every steps, after the step is recorded."""

    def __init__(self, survivors: Survivors) -> None:
        self._survivors = survivors

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if step.number % trainer.config.elastic.copy_every == 0 and not trainer.last_step:
            self._survivors.copy(trainer)


def fit(trainer: Run) -> int:
    """Train, continue with the remaining ranks when ranks die, and return the exit code of the run.

    Raises:
        InputError: If the MPI library cannot continue after ranks die.
        TooFewRanks: If the remaining ranks do not fit the layout, after the newest set of copies was saved.
    """
    trainer.world = trainer.folder.world = ulfm.begin(trainer.world)
    survivors = trainer.strategy.survivors(trainer)
    assert isinstance(survivors, Survivors)
    at = next(at for at, one in enumerate(trainer.callbacks) if isinstance(one, Records))
    trainer.callbacks.insert(at, survivors)  # before the records, which write what it adds to a step
    trainer.callbacks.insert(at + 2, PeriodicCopies(survivors))  # after the records, so that a copied step is recorded
    with trainer.working():
        return _train_with_recovery(trainer, survivors)


def _train_with_recovery(trainer: Run, survivors: Survivors) -> int:
    while True:
        try:
            if survivors.must_rebuild:
                survivors.rebuild_world()
            if survivors.misfit:
                raise survivors.save_for_restart()
            if not survivors.is_training:
                return survivors.wait()
            code = trainer.train()
            survivors.end_waiting(code)
            return code
        except Exception as error:
            if ulfm.ranks_died(survivors.everyone, error):
                survivors.must_rebuild = True
                trainer.folder.log.info("ranks died: %s", error)
            elif survivors.has_shrunk and isinstance(error, InputError) and error.agreed:
                survivors.misfit = str(error)
            else:
                if isinstance(error, MpitrainError) and error.agreed:
                    survivors.end_waiting(exit_code(error))
                raise
