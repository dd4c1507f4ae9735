"""Meetings of the ranks that run one script, each of which compares what the ranks are about to do.

Before ranks exchange anything, they compare a checksum of the operation and of its line in the script. Where they
differ, the job ends with one line that names both places. So no rank waits for one that does something else. The values
of a small exchange travel with the checksum.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import torch

from mpitrain.comm.programs.program import tree_order
from mpitrain.errors import EXIT_FAILED, InputError, printable
from mpitrain.run.layouts import Layouts, Rows
from mpitrain.run.meetings import Meetings
from mpitrain.run.outputs import Outputs
from mpitrain.run.pending import PendingSums

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_FIRST_CAPACITY = 1 << 20  # bytes of the memory in which ranks exchange
_ALIGNMENT = 64


class ScriptRun:
    """One run of a script.

    Attributes:
        world: Communicator over all ranks.
        folder: Folder of the script, whose files are its own code.
        layouts: Layouts of all batches.
        plans: OperationPlan of each operation, by its arguments.
        sums: Sums that have not been exchanged yet.
        crossings: Number of operations so far whose result for one row depends on others, on its number or on chance.
        results: Batches that operations have made, while a module is observed; None at other times.
        gathered: Operations that ran on the whole batch on every rank, with their places in the script.
        outputs: Files that the script has opened to write, and its terminal.
        alone: True while ranks run different code on purpose, as when each reads its own samples.
        home: Function that returns the rank that shall have the gradient of a parameter, or None if all shall.

    Args:
        world: Communicator over all ranks.
        script: Path of the script.
    """

    def __init__(self, world: Communicator, script: str) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        self.folder = os.path.dirname(os.path.abspath(script)) + os.sep
        self.layouts = Layouts(world.rank, world.size)
        self.plans: dict[tuple[object, ...], Any] = {}
        self.sums = PendingSums(self)
        self.crossings = 0
        self.results: list[torch.Tensor] | None = None
        self.gathered: Counter[str] = Counter()
        self.alone = False
        self.home: Callable[[torch.Tensor], int | None] = lambda p: None
        self.errors: TextIO = sys.stderr
        self.outputs = Outputs()
        self._home = os.getpid(), threading.get_ident()
        self._meetings = Meetings(world)
        self._memory = world.arena(_FIRST_CAPACITY, torch.uint8)
        self._slots: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def is_main(self) -> bool:
        """Return whether this is the process and the thread in which the script began."""
        return (os.getpid(), threading.get_ident()) == self._home

    # -- places in the script

    def is_script(self, filename: str) -> bool:
        """Return whether a file of code belongs to the script."""
        return filename.startswith(self.folder) and "site-packages" not in filename

    def place(self) -> str:
        """Return the innermost line of the script that is running, as " at script.py:12", or ""."""
        frame = sys._getframe(1)
        while frame is not None:
            if self.is_script(name := frame.f_code.co_filename):
                return f" at {name[len(self.folder) :]}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    # -- meetings

    @contextmanager
    def without_meetings(self) -> Iterator[None]:
        """Run the body of the `with` statement without meetings, because ranks do different things in it."""
        before, self.alone = self.alone, True
        try:
            yield
        finally:
            self.alone = before

    def meet(self, what: str, flag: bool = False) -> bool:
        """Compare with the other ranks that all are about to do the same; end the job with one line if not.

        Args:
            what: Operation, and the values that must be equal.
            flag: Flag of this rank.

        Returns:
            True if the flag of any rank is true.
        """
        if self.size == 1:
            return flag
        self._require_main_thread(what)
        text = what + self.place()
        flag_of_any = self._meetings.meet(zlib.crc32(text.encode()), flag)
        if flag_of_any is None:
            self._part(text)
        return flag_of_any

    def _require_main_thread(self, what: str) -> None:
        if not self.is_main():
            raise InputError(f"mpitrain.run: {what} outside the script's main thread; ranks only meet in that one")

    def _part(self, text: str) -> NoReturn:
        texts = self.world.all_gather_object(text)
        first = {line: rank for rank, line in reversed(list(enumerate(texts)))}
        places = "; ".join(
            f"rank {rank}: {printable(line)}" for line, rank in sorted(first.items(), key=lambda x: x[1])
        )
        self.end(f"the ranks part: {places}; make this equal on all ranks (seeds, clocks, files, order of sets)")

    def end(self, line: str, code: int = EXIT_FAILED) -> NoReturn:
        """End the job on all ranks, which all call this, with one line.

        Args:
            line: Text for rank 0 to print.
            code: Exit code.
        """
        if self.rank == 0:
            print(f"mpitrain: {line}", file=self.errors, flush=True)
        sys.stdout.flush()
        self.world.barrier()
        os._exit(code)

    # -- exchanges

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, with the same bits on every rank. Collective.

        Half precision is summed in float32, and bool in int64.

        Args:
            x: Summand of this rank.
        """
        self.crossings += 1
        if self.size == 1:
            return x.clone()
        what = f"the sum of {tuple(x.shape)} {x.dtype}"
        wide = torch.int64 if x.dtype == torch.bool else x.dtype
        if x.is_floating_point():
            wide = torch.promote_types(x.dtype, torch.float32)
        if x.numel() * wide.itemsize <= self._meetings.capacity:
            parts = self._show(what, x, wide, x.numel())
            total = tree_order(parts, torch.add)  # the bits of a reproducible all_reduce
            return total.view(x.shape).to(x.device, x.dtype)
        self.meet(what)
        slot = self._slot(0, x.numel(), wide) if x.is_cpu else x.new_empty(x.numel(), dtype=wide)
        slot.view(x.shape).copy_(x)
        self.world.all_reduce(slot, reproducible=True)
        return slot.view(x.shape).to(x.dtype, copy=True)

    def gather(self, local: torch.Tensor, at: int, rows: Rows) -> torch.Tensor:
        """Return the rows of all ranks on every rank. Collective.

        Args:
            local: Rows of this rank.
            at: Dimension that is divided.
            rows: Division of that dimension.

        Returns:
            Contiguous whole tensor.
        """
        first = local.movedim(at, 0)
        shape = (rows.total, *first.shape[1:])
        self.crossings += 1
        what, of_row = f"the rows of {shape} {local.dtype}", math.prod(shape[1:])
        numel, each, most = first.numel(), of_row * local.element_size(), max(rows.counts)
        if most * each <= self._meetings.capacity:
            parts = self._show(what, first, local.dtype, most * of_row)
            pieces = [x[: n * of_row].view(n, *shape[1:]) for x, n in zip(parts, rows.counts, strict=True)]
            return torch.cat(pieces).to(local.device).movedim(0, at).contiguous()
        self.meet(what)
        if not local.is_cpu:
            whole = local.new_empty(shape)
            self.world.all_gather(_bytes(whole), _bytes(first.contiguous()), counts=[n * each for n in rows.counts])
            return whole.movedim(0, at).contiguous()
        nbytes = rows.total * each
        start = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._reserve(2 * start)
        part = self._slot(start, numel, local.dtype)
        part.view(first.shape).copy_(first)
        out = self._slot(0, nbytes, torch.uint8)
        mine = self._slot(start, numel * local.element_size(), torch.uint8)
        self.world.all_gather(out, mine, counts=[n * each for n in rows.counts])
        whole = self._slot(0, nbytes // local.element_size(), local.dtype).view(shape).movedim(0, at)
        return whole.clone(memory_format=torch.contiguous_format)

    def _show(self, what: str, x: torch.Tensor, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """Meet, and return flat views of what all ranks show, to be read before the next meeting. Collective.

        Args:
            what: Operation, for messages.
            x: Tensor of this rank.
            dtype: Element type to show.
            numel: Elements of each view; at least those of x.
        """
        self._require_main_thread(what)
        views = self._meetings.values(numel, dtype)
        views[self.rank][: x.numel()].view(x.shape).copy_(x)
        self.meet(what)
        return views

    def _slot(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of the exchange memory, which starts at byte `start`."""
        key = (start, numel, dtype)
        if key not in self._slots:
            nbytes = numel * dtype.itemsize
            self._reserve(start + nbytes)
            if len(self._slots) > 10_000:
                self._slots.clear()
            self._slots[key] = self._memory.tensor[start : start + nbytes].view(dtype)
        return self._slots[key]

    def _reserve(self, nbytes: int) -> None:
        """Make the exchange memory larger if it has fewer bytes. Collective."""
        if nbytes > self._memory.tensor.numel():
            self._slots.clear()
            self._memory.free()
            self._memory = self.world.arena(1 << (nbytes - 1).bit_length(), torch.uint8)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
