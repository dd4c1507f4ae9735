"""Saving and loading of a run's checkpoints by all ranks of a job together.

The order of a commit is: write and fsync every file; agree that all ranks succeeded; write and fsync the manifest;
fsync the folder, rename it and fsync its parent; only then remove older checkpoints. With node-local folders
(`checkpoint.local`) the first rank of each node does this in its node's folder, after copies or parities for the other
nodes have been written.

A save in the background copies the state to host memory, and a thread writes the copy while training continues. The
copy is one pass over the state, into memory that is reused by later saves. State on a device is copied once, to pinned
host memory, and this copy is the only wait for the device. An error in the thread is agreed on by all ranks there, and
raised by the next call from training.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.commit import FileLayout, Target, attempt, write_checkpoint
from mpitrain.checkpoint.files import Part
from mpitrain.checkpoint.local import LocalFolders
from mpitrain.checkpoint.manifest import NON_FINITE_SINCE, Manifest, Values, read_manifest, require_files, was_finite
from mpitrain.checkpoint.reading import Block, cooperative_read, files_of, plan
from mpitrain.errors import CheckpointError, InputError, MpitrainError, refusal
from mpitrain.storage import disk, locks

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


class Store:
    """Checkpoints of a run. Every method is collective over `comm`. Use it in `with`, or call `close`.

    Args:
        root: Checkpoint folder of the run.
        comm: Ranks that save and load together.
        keep: Number of newest checkpoints to keep.
        files: "rank" for one file per rank, or "node" for one file per node.
        local: Folder on a local disk of this rank's node, to which checkpoints are written; "" for none.
        redundancy: Protection of node-local checkpoints: "none", "partner" or "xor".
        flush_every: Interval, in node-local checkpoints, at which one is written to `root` instead.
        nodes: Node of each rank; default is the communicator's.

    Attributes:
        repairs: Sentence for each damaged file that was restored from other nodes.
        best, keeps_best: Step of the best checkpoint so far, which is kept regardless of `keep`; whether there may be
            one.
        waited_seconds: Time that the last save waited for the previous one, which was still being written.
        write_seconds: Time taken to write the last background save that is known to have ended.
    """

    def __init__(
        self,
        root: Path,
        comm: Communicator,
        keep: int,
        *,
        files: str = "rank",
        local: str = "",
        redundancy: str = "none",
        flush_every: int = 10,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.root, self.comm, self.keep, self.flush_every = root, comm, keep, flush_every
        self._files = files
        self._nodes = tuple(nodes) if nodes is not None else comm.nodes
        if redundancy != "none" and not local:
            raise refusal(
                f"checkpoint.redundancy {redundancy} protects checkpoints in checkpoint.local, which is not set; give "
                "a folder on each node's own disk"
            )
        self._local = LocalFolders(Path(local), self._nodes, redundancy) if local else None
        self._layout: FileLayout | None = None  # used by the thread that writes; created by the first save
        self._node: Communicator | None = None  # ranks that read together; created by the first load
        self._snapshot = Snapshot()
        self._task: BackgroundTask | None = None
        self._removal: BackgroundTask | None = None
        self._since_flush = 0
        self.repairs: list[str] = []
        self.waited_seconds = self.write_seconds = 0.0
        self.best, self.keeps_best = -1, False
        self._verified: set[int] = set()  # steps that this job has written or fully read
        self._unusable: set[int] = set()
        self._finite: dict[int, bool] = {}  # cached result of `was_finite` for steps in `root`

    @property
    def remark(self) -> str:
        """Warning about these settings for the user, or ""."""
        if self._local is None or len(set(self._nodes)) > 1:
            return ""
        return (
            f"checkpoint.local on one node: up to {self.flush_every} checkpoints are lost if the node fails "
            "(checkpoint.redundancy needs two)"
        )

    # -- the folders

    def prepare(self, set_aside: bool, *, lock: bool = False) -> None:
        """Create the folders, and remove leftovers of killed saves. Only the job that holds the run's lock may call it.

        Args:
            set_aside: If true, rename existing checkpoints, because their run is not resumed.
            lock: If true, take a lock of the folder until this process ends; taking it again does nothing.

        Raises:
            InputError: A folder cannot be used, or another job has locked it.
        """
        self.finish()  # older checkpoints that its last save still removes look like leftovers

        def make() -> None:
            what = f"checkpoint folder {self.root}"
            with disk.reporting(f"{what} cannot be used", "choose another folder"):
                if set_aside and folders.finished_steps(self.root):
                    folders.set_aside(self.root)
                self.root.mkdir(parents=True, exist_ok=True)
                try:
                    for folder in folders.locked_with(self.root) if lock else ():
                        locks.hold_until_exit(folder / locks.LOCK)
                except locks.LockHeld:
                    raise InputError(
                        f"{what} is in use by another job; save into another folder, or end that job"
                    ) from None
                folders.remove_leftovers(self.root)

        self.comm.on_root(make)
        if self._local is not None:
            self._local.prepare(self.comm, self.root)

    def make_way(self, step: int) -> list[str]:
        """Clear the way for saves after this step, and return a sentence for each folder that was renamed.

        Remains of damaged checkpoints of this run are renamed. Anything else in the way raises InputError.
        """

        def move() -> list[str]:
            later = [self.folder(finished) for finished in folders.finished_steps(self.root) if finished > step]
            moved = [(path, folders.set_aside(path)) for path in later if folders.lacks_manifest(path)]
            for path in later or [self.folder(step + 1)]:
                folders.require_free(path)
            return [f"{path} has no valid manifest; renamed to {new_path}" for path, new_path in moved]

        return self.comm.on_root(move)

    def require_room(self, nbytes: int, saves: int) -> None:
        """Raise InputError if the disks have no room for future saves, as far as this can be determined.

        Args:
            nbytes: Bytes of this rank's tensors in a checkpoint.
            saves: Number of saves, if the run is not interrupted.
        """
        of_ranks = np.empty(self.comm.size, dtype=np.int64)
        self.comm.all_gather(of_ranks, np.array([nbytes], dtype=np.int64))
        total, shared = int(of_ranks.sum()), saves
        if self._local is not None:
            self._local.require_room(self.comm, of_ranks.tolist(), saves)
            shared = min(saves, saves // self.flush_every + 1)
        fix = "make room, lower checkpoint.keep, or choose another run.dir"
        need = "checkpoint folder", total, shared, self.keep + self.keeps_best
        self.comm.on_root(lambda: folders.require_room(self.root, *need, fix))

    def newest_first(self) -> list[Path]:
        """Return the folders of the finished checkpoints, including those on the nodes' local disks."""
        steps = self.comm.on_root(lambda: folders.finished_steps(self.root))
        entries = [(step, 0, self.folder(step)) for step in steps]
        if self._local is not None:
            entries += [(step, 1, self._local.folder(step)) for step in self._local.steps(self.comm)]
        return [folder for *_, folder in sorted(entries, reverse=True)]

    def newest_finite(self) -> Path | None:
        """Return the newest checkpoint folder in `root` saved while training was still learning, or None."""
        step = self.comm.on_root(lambda: folders.newest_finite(self.root))
        return None if step is None else self.folder(step)

    def at(self, path: Path) -> list[Path]:
        """Return the checkpoint folders that a path in checkpoint.resume refers to, newest first.

        Raises:
            InputError: The path has no checkpoint.
        """
        paths = self.comm.on_root(lambda: list(map(str, folders.require(path, "checkpoint.resume"))))
        return list(map(Path, paths))

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint in `root`."""
        return self.root / folders.folder_name(step)

    def owns(self, folder: Path) -> bool:
        """Return whether a checkpoint folder belongs to this run."""
        return folder.parent == self.root or (self._local is not None and folder.parent == self._local.root)

    # -- saving

    def save(
        self,
        step: int,
        parts: Sequence[Part],
        values: Values,
        *,
        background: bool = False,
        durable: bool = False,
    ) -> Path:
        """Write a checkpoint of tensors that are distributed over the ranks, after the previous save has ended.

        Args:
            step: Step at which it is saved.
            parts: Parts that this rank writes. If several ranks pass the same piece, each of them writes it; see
                `mpitrain.layout.ownership` to avoid this.
            values: Values to store beside the tensors, as JSON; those of rank 0 are used.
            background: If true, return once the parts are copied, and write from a thread.
            durable: If true, write to `root` even if only a node-local checkpoint is due.

        Returns:
            Folder of the checkpoint.

        Raises:
            InputError, CheckpointError: On every rank if any rank cannot write its part; no files are left. A save in
                the background raises in the next `save` or `finish`.
        """
        began = time.perf_counter()
        self.finish()
        self.waited_seconds = time.perf_counter() - began
        if self._layout is None:
            saving = self.comm.split(0, self.comm.rank, label="checkpoint")
            self._layout = FileLayout(saving, self._nodes, self._files)
        if background:
            require_threads()
        shared = self._local is None or durable or self._since_flush + 1 >= self.flush_every
        self._since_flush = 0 if shared else self._since_flush + 1
        write = partial(self._write, step, shared=shared, best=self.best)
        if background:
            self._task = BackgroundTask(partial(write, self._snapshot.copy(parts), values))
        else:
            write(parts, values)
        return self.folder(step) if self._local is None or shared else self._local.folder(step)

    @property
    def failing(self) -> bool:
        """True if a save in the background has failed on this rank.

        Not collective: include it in a reduction that is made anyway, and call `finish` on all ranks if it is true on
        any.
        """
        return self._task is not None and self._task.error is not None

    def finish(self) -> None:
        """Wait until nothing is being written. Raises the error of a save in the background."""
        task, self._task = self._task, None
        if task is not None:
            task.wait()
            self.write_seconds = task.seconds
        removal, self._removal = self._removal, None
        if removal is not None:
            removal.wait()

    def abandon(self) -> None:
        """Wait until nothing is being written, ignoring errors. Not collective: for use after ranks have died."""
        for task in (self._task, self._removal):
            if task is not None:
                with suppress(Exception):
                    task.wait()
        self._task = self._removal = None

    def move_to(self, root: Path) -> None:
        """Use another folder for checkpoints from now on; the caller must prepare it."""
        if root != self.root:
            self.finish()
            self.root = root
            self._verified.clear()
            self._unusable.clear()

    def close(self) -> None:
        """Finish, and release the communicators; a later save or load creates them again."""
        self.finish()
        for communicator in (self._layout, self._node):
            if communicator is not None:
                communicator.free()
        self._layout = self._node = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, MpitrainError) and error.agreed:  # all ranks are here, so a running save can be finished
            with suppress(MpitrainError):
                self.close()

    def _write(self, step: int, parts: Sequence[Part], values: Values, *, shared: bool, best: int) -> None:
        layout = self._layout
        assert layout is not None
        if not shared and self._local is not None:
            self._local.save(layout, step, parts, values)
            return
        target = Target(self.folder(step), layout.comm.rank == 0, single_leader=True)
        finite = not values.get(NON_FINITE_SINCE)

        def after() -> None:
            folders.point_to(self.folder(step))
            if folders.is_checkpoint(self.folder(best)):
                folders.point_to(self.folder(best), folders.BEST)
            self._finite[step] = finite
            known = self._verified | {step}, self._unusable - {step}, self._was_finite
            old = folders.steps_to_remove(
                folders.finished_steps(self.root), self.keep, *known, folders.best_step(self.root)
            )
            hidden = [folders.hide(self.folder(step)) for step in old if folders.is_checkpoint(self.folder(step))]
            if hidden:  # removing gigabytes takes a while, so it is done in a thread
                self._removal = BackgroundTask(partial(folders.remove, *hidden))

        write_checkpoint(layout, target, step, parts, values, after=after)
        self._verified.add(step)
        self._unusable.discard(step)
        if self._local is not None:
            self._local.remove_up_to(layout.comm, step, finite=finite)

    def _was_finite(self, step: int) -> bool:
        if step not in self._finite:
            self._finite[step] = was_finite(self.folder(step))
        return self._finite[step]

    # -- loading

    def load(self, folder: Path, parts_for: Callable[[Manifest], Sequence[Part]]) -> Manifest:
        """Fill this rank's parts from a checkpoint written by any number of ranks in any layout.

        Args:
            folder: Folder of the checkpoint.
            parts_for: Function that returns the parts to fill, given the manifest.

        Returns:
            Manifest of the checkpoint.

        Raises:
            CheckpointError: On every rank, if a byte that any rank needs is missing or damaged.
        """
        self.finish()
        local = self._local if self._local is not None and folder.parent == self._local.root else None
        try:
            manifest = self._read(folder, parts_for, local)
        except CheckpointError:
            if local is None and folder.parent == self.root:
                self._unusable.update(s for s in folders.finished_steps(self.root) if self.folder(s) == folder)
            raise
        if folder.parent == self.root:
            self._verified.add(manifest.step)
        return manifest

    def _read(
        self, folder: Path, parts_for: Callable[[Manifest], Sequence[Part]], local: LocalFolders | None
    ) -> Manifest:
        def look() -> Manifest:
            manifest = read_manifest(folder)
            if self.comm.rank == 0:
                require_files(folder, manifest.files.items())
            return manifest

        def prepare(manifest: Manifest) -> list[Block]:
            blocks = plan(folder, manifest, parts_for(manifest))
            if local is None:
                require_files(folder, [(name, manifest.files[name]) for name in sorted(files_of(blocks))])
            return blocks

        if local is not None:
            manifest: Manifest | None = local.manifest(self.comm, folder)
        else:  # checked first, because the plan's memory depends on the sizes that the files claim to have
            manifest = attempt(self.comm, look, folder)
        assert manifest is not None
        blocks = attempt(self.comm, partial(prepare, manifest), folder) or []
        if self._node is None:
            self._node = self.comm.split(self._nodes[self.comm.rank], self.comm.rank, label="checkpoint node")
        fill = partial(cooperative_read, self._node, folder, manifest, blocks)
        if local is not None:
            self._fill_local(local, folder, manifest, blocks, fill)
        else:
            attempt(self.comm, fill, folder)
        return manifest

    def _fill_local(
        self, local: LocalFolders, folder: Path, manifest: Manifest, blocks: Sequence[Block], fill: Callable[[], None]
    ) -> None:
        """Read from the nodes' local disks; if that fails, verify every file and read again without damaged ones."""
        needed = files_of(blocks)
        try:
            local.fetch_files(self.comm, folder, manifest, needed)
            attempt(self.comm, fill, folder)
        except CheckpointError:
            damaged = local.fetch_files(self.comm, folder, manifest, needed, verify=True)
            attempt(self.comm, fill, folder)
            self.repairs += [
                f"{folder / name} was damaged on a node's disk; repaired from other nodes" for name in damaged
            ]


_ALIGNMENT = 64  # bytes
_ROUNDING = 2 << 20  # bytes of a huge page


class Snapshot:
    """Host memory for a copy of one rank's parts, which grows as needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """Copy parts into this memory; the copies are valid until the next call."""
        nbytes = snapshot_bytes(parts)
        device_tensors = [part.data for part in parts if not part.data.is_cpu]
        if nbytes > self._memory.numel() or (device_tensors and not self._pinned):
            self._allocate(nbytes, device_tensors)
        copies, begin = [], 0
        for part in parts:
            end = begin + part.data.nbytes
            into = self._memory[begin:end].view(part.data.dtype)
            into.copy_(part.data, non_blocking=True)
            copies.append(replace(part, data=into))
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if device_tensors:
            from mpitrain.comm.memory.device import record_event

            record_event(device_tensors[0].device).synchronize()
        return copies

    def _allocate(self, nbytes: int, device_tensors: Sequence[torch.Tensor]) -> None:
        """Allocate memory, pinned if any tensor of the parts is on a device (`device_tensors`)."""
        self._memory = torch.empty(0, dtype=torch.uint8)  # give the old memory back first
        self._pinned = bool(device_tensors)
        if device_tensors:
            from mpitrain.comm.memory.device import empty_pinned

            self._memory = empty_pinned((nbytes,), torch.uint8, device_tensors[0].device)
        else:  # huge pages, because the page faults of small ones cost more than the copy
            block = mmap.mmap(-1, -(-nbytes // _ROUNDING) * _ROUNDING, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(block, dtype=torch.uint8)


def snapshot_bytes(parts: Sequence[Part]) -> int:
    """Return the size in bytes of a snapshot of these parts."""
    return sum(-(-p.data.nbytes // _ALIGNMENT) * _ALIGNMENT for p in parts)


def require_threads() -> None:
    """Raise InputError if MPI cannot be called from the thread that saves."""
    from mpitrain.comm.inspection import thread_level

    level = thread_level()
    if level != "MULTIPLE":
        raise refusal(
            f"checkpoint.background needs an MPI with THREAD_MULTIPLE, but this one provides {level}; use another MPI "
            "or set checkpoint.background = false"
        )


class BackgroundTask:
    """Function that runs in a thread.

    Args:
        function: Function, which starts at once.

    Attributes:
        error: Exception that it raised, or None.
        seconds: Time it took, once it has ended.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(function,), name="mpitrain-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], object]) -> None:
        began = time.perf_counter()
        try:
            function()
        except BaseException as error:  # raised by wait()
            self.error = error
        self.seconds = time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the function has ended. Raises the exception that it raised."""
        self._thread.join()
        if self.error is not None:
            raise self.error
