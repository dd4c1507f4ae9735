"""Checkpoints of a script that was not written for them, and its continuation from one (`--resume`).

A checkpoint holds the position (`loops.py`), the values of the script's variables (`variables.py`), the generators of
random numbers, and the lengths of its files (`outputs.py`). The script then runs again from its start, silently. At
each loop that leads to the position, the generators get the state that they had there, so samplers give the same order,
and the iterations that were done are passed over. At the position itself the variables get their values.

What cannot be right is refused: a value that cannot be saved, a script, data or an order of samples that has changed,
and a script that does not come to the position again.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten

from mpitrain.checkpoint import Store
from mpitrain.errors import CheckpointError, InputError, printable
from mpitrain.run.loaders import Loaders, random_states, set_random_states
from mpitrain.run.loops import Loop, Loops
from mpitrain.run.record import ScriptRecord
from mpitrain.run.session import ScriptRun
from mpitrain.run.shares import shared_parts, whole_parts
from mpitrain.run.tensors import BatchTensor, WholeTensor
from mpitrain.run.variables import LostError, VariableDecoder, VariableEncoder, checksum, large_tensors
from mpitrain.storage.run_folder import CHECKPOINTS

_COLD = 200  # times that a loop begins without steps inside, after which the generators are not remembered
_PASSES_ON = ("contextlib.py", "functools.py", "_contextlib.py", "runpy.py", "/click/", "/absl/", "/fire/", "/typer/",
              "/hydra/", "<frozen ")  # fmt: skip
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_NAMELESS = ("<module>", "<lambda>")
_IDENTITY = {
    "arguments": "other arguments", "text": "another text", "python": "another Python",
    "precision": "another --train.precision",
}  # fmt: skip
_VALUES = "script"  # key under which a checkpoint has the values of a script


class Resume:
    """Saving of a script's checkpoints, and its continuation.

    Attributes:
        steps: Calls of `step` of optimizers so far.
        step: Training steps so far: iterations of the innermost loop around calls of `step`.
        outputs: Files and terminal of the script.
        folder: Run folder.
        has_ended: True if the script has come to its end before, so that there is nothing to do.
        seed: Seed of the run; None until it is known.
        forget: Functions that make unknown again what was learned about the script.
        whole_states: Function that returns a context in which every rank has all states of optimizers.

    Args:
        session: Run of the script.
        words: Path of the script, and its arguments.
        options: Options of the command. Without `resume`, the script is followed for its record only.
    """

    def __init__(self, session: ScriptRun, words: list[str], options: argparse.Namespace) -> None:
        self.session, self.steps, self.step, self.has_ended = session, 0, 0, False
        self.seed: int | None = None
        self.outputs, self.loops = session.outputs, Loops(self, session.folder)
        self.folder = Path(options.folder or os.path.join("runs", Path(words[0]).stem)).absolute()
        self._store = Store(self.folder / CHECKPOINTS, session.world, options.keep)
        self._record = ScriptRecord(session, self.folder)
        self._every: int = options.every if options.resume else 0
        self._words, self._precision = words, options.precision
        self._last_steps = 0
        self._constants: dict[int, int] | None = None  # None until the first step
        self._cold: dict[str, int] = {}
        self._loaders = Loaders(session)
        self._source = random.Random()
        self._target: SavedPosition | None = None
        self.forget: list[Callable[[], None]] = []
        self.whole_states: Callable[[], AbstractContextManager[None]] = nullcontext

    def is_script(self, filename: str) -> bool:
        """Return whether a file of code belongs to the script."""
        return self.session.is_script(filename) and not filename.startswith(_PACKAGE)

    # -- the start

    def begin_job(self, options: argparse.Namespace) -> None:
        """Find out where to begin, and record it. Collective."""
        if self._every and self._record.has_ended():
            self.has_ended = True
            if self.session.rank == 0:
                line = f"{printable(self._words[0])} has come to its end; remove {self.folder} to run it again"
                print(f"mpitrain.run: {line}", file=self.session.errors)
            return
        if self._every:
            self.load()
        sections = {
            "run": {"dir": str(self.folder)}, "checkpoint": {"every": options.every, "keep": options.keep},
            "train": {"precision": options.precision},
        }  # fmt: skip
        self._record.begin(self.step, self._words, sections)

    def load(self) -> None:
        """Read the newest checkpoint that is whole, if there is any. Collective."""
        self._store.prepare(set_aside=False, lock=True)
        damage: CheckpointError | None = None
        for folder in self._store.newest_first():
            tensors: dict[str, torch.Tensor] = {}
            try:
                manifest = self._store.load(folder, lambda manifest: whole_parts(manifest, tensors))  # noqa: B023
            except CheckpointError as error:
                damage = error
                continue
            values = manifest.value(_VALUES)
            self._check_script(values, folder)
            decoder = VariableDecoder(
                values["table"], tensors.__getitem__, self.is_script, self._divide, self._loaders.continue_iteration
            )
            self._target = SavedPosition(self, values, decoder)
            self.step = manifest.step
            if self.session.rank == 0:
                print(f"mpitrain.run: continues after step {manifest.step} from {folder}", file=sys.stderr, flush=True)
            self.session.errors = self.outputs.silence()
            self.seed = values["seed"]
            return
        if damage is not None:
            raise InputError(f"{damage}; no checkpoint is whole: remove {self._store.root} to start anew", agreed=True)

    def _check_script(self, values: dict[str, Any], folder: Path) -> None:
        ours = self._identity()
        for name, what in _IDENTITY.items():
            if values[name] != ours[name]:
                raise InputError(
                    f"{printable(self._words[0])} has {what} than when {folder} was saved; start it as then, or anew "
                    "with another --run.dir", agreed=True,
                )  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        return {
            "arguments": self._words[1:], "text": _text_checksum(self._words[0]), "python": list(sys.version_info[:2]),
            "precision": self._precision,
        }  # fmt: skip

    def install(self, seed: int, source: random.Random) -> None:
        """Follow the script from now on.

        Args:
            seed: Seed of the run.
            source: Generator of the seeds of generators that the script makes without one.
        """
        self.seed, self._source = seed, source
        self.loops.install()
        self._record.install()
        self._loaders.install()
        register_optimizer_step_post_hook(self._after_step)

    @property
    def replaying(self) -> bool:
        """True until the script has come to the position of the checkpoint."""
        return self._target is not None

    def execute(self, words: list[str]) -> None:
        """Run the script as `__main__`. Collective.

        Args:
            words: Path of the script, and its arguments.

        Raises:
            InputError: It ended before it came to the position of the checkpoint.
        """
        try:
            self.loops.execute(words)
        except SystemExit:
            if self.replaying:
                self.part("exits before that")
            raise
        if self.replaying:
            self.part("ends before that")

    def part(self, what: str) -> NoReturn:
        """Raise the error of a script that does not come to the position again."""
        raise InputError(
            f"--resume: the script does not come to the position of the checkpoint of step {self.step}: it {what}; "
            f"remove {self._store.root} to start anew", agreed=True,
        )  # fmt: skip

    def end(self, code: int, error: BaseException | None) -> None:
        """ScriptRecord how the script ended. Collective.

        Args:
            code: Exit code of the script.
            error: Exception that ended it, or None.
        """
        self.outputs.speak()
        if self._every and not self.steps and not code and self.session.rank == 0:
            print("mpitrain.run: no optimizer took a step, so no checkpoint was saved", file=self.session.errors)
        with self.session.without_meetings():
            self._record.end(self.step, code, error)
            self._store.close()

    # -- what the loops report

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self._record.optimizer = optimizer
        if self.steps == 1 and self._every and not self.replaying:
            frames, _ = self._chain(sys._getframe(1))
            if not self.loops.is_inside(frames):
                raise InputError(
                    f"--resume needs a loop of the script around optimizer.step(){self.session.place()}, and there is "
                    "none; run it without --resume", agreed=True,
                )  # fmt: skip

    def enter(self, place: str, frame: FrameType) -> Any:
        """Return the states of the generators before a loop; give them those of the checkpoint if it leads there.

        Args:
            place: File, line and column of the loop.
            frame: Frame that runs it.
        """
        if not self.session.is_main():
            return None
        self._loaders.begin([])
        if self._target is not None:
            self._target.enter(place, frame)
        count = self._cold.get(place, 0)
        if count >= _COLD:
            return None
        self._cold[place] = count + 1
        return _Entry(random_states(), self._loaders.recent)

    def begin(self, loop: Loop, frame: FrameType) -> None:
        """Pass over the iterations of a loop that were done before the checkpoint.

        Args:
            loop: The loop.
            frame: Frame that runs it.
        """
        if self._target is not None:
            self._target.begin(loop, frame)
        self._loaders.begin([])

    def reach(self, place: str, loop: Loop | None, frame: FrameType) -> None:
        """Note that the script is at the head of a loop after steps; save if it is time.

        Args:
            place: File, line and column of the loop.
            loop: Iterator of a `for` loop, None for `while`.
            frame: Frame that runs it.
        """
        if not self.session.is_main():
            return
        if self._target is not None:
            self._target.reach(place, loop, frame)
            return
        if self.steps == self._last_steps:
            return
        self._last_steps = self.steps
        self.step += 1
        for each in self.loops.active():
            self._cold[each.place] = -(1 << 60)
        self._record.write(self.step)
        if self._every and self._constants is None:
            self._note_constants(place, loop, frame)
        if self._every and self.step % self._every == 0:
            self._save(place, loop, frame)

    # -- saving

    def _note_constants(self, place: str, loop: Loop | None, frame: FrameType) -> None:
        """Remember large tensors, and find at the first step what cannot be saved."""
        encoder = VariableEncoder(self.is_script, {})
        with self.whole_states():
            self._encode(encoder, place, loop, frame)
        self._constants = {id(x): checksum(x) for x in large_tensors(encoder)}

    def _save(self, place: str, loop: Loop | None, frame: FrameType) -> None:
        session, began = self.session, time.perf_counter()
        encoder = VariableEncoder(self.is_script, self._constants or {})
        with self.whole_states():
            values = self._encode(encoder, place, loop, frame)
        shapes = zlib.crc32(repr([(n, x.numel(), x.dtype) for n, x in encoder.tensors.items()]).encode())
        session.meet(f"a checkpoint after step {self.step} with {len(encoder.tensors)} tensors, checksum {shapes:08x}")
        values |= self._identity() | {"table": encoder.table, "seed": self.seed, "steps": self.steps}
        parts = shared_parts(encoder.tensors, session.rank, session.size)
        with session.without_meetings(), torch.device("cpu"):  # whatever the script's default device is
            values["files"] = session.world.on_root(self.outputs.describe)
            folder = self._store.save(self.step, parts, {_VALUES: values})
            self._record.event("save", self.step, folder=folder.name, seconds=time.perf_counter() - began)
        self._forget_all()

    def _forget_all(self) -> None:
        """Learn about the script anew, so that a run that continues here computes the same bits."""
        for function in self.forget:
            function()

    def _encode(self, encoder: VariableEncoder, place: str, loop: Loop | None, frame: FrameType) -> dict[str, Any]:
        frames, foreign = self._chain(frame)
        if foreign:
            raise InputError(
                f"--resume: the loop at {place} is called by {foreign}, whose own position cannot be saved; run the "
                "script without --resume", agreed=True,
            )  # fmt: skip
        active = self.loops.active()
        position = []
        for each in frames:
            loops, name = [x for x in active if x.frame == id(each)], each.f_code.co_name
            if any(x.is_comprehension for x in loops) or (name.startswith("<") and name not in _NAMELESS):
                raise InputError(
                    f"--resume: the loop at {place} is inside a comprehension; write a for loop instead", agreed=True
                )
            described = [self._describe(encoder, x) for x in loops]
            position.append({"code": self._code_of(each), "instruction": each.f_lasti, "loops": described})
        modules = {name: _encode_all(encoder, vars(module), name) for name, module in self._modules().items()}
        for each, entry in zip(frames, position, strict=True):
            if each.f_code.co_name != "<module>":
                entry["names"] = _encode_all(encoder, dict(each.f_locals), each.f_code.co_name)
        return {
            "position": position, "place": place, "is_for": loop is not None, "modules": modules,
            "texts": {n: _text_checksum(m.__file__) for n, m in self._modules().items()},
            "generators": encoder.encode([*random_states(), self._source.getstate()], "generators"),
        }  # fmt: skip

    def _describe(self, encoder: VariableEncoder, loop: Loop) -> dict[str, Any]:
        entry: _Entry | None = loop.entry
        return {
            "place": loop.place, "count": loop.count,
            "item": content_checksum(loop.item) if entry is None or not entry.loaders else None,
            "states": None if entry is None else encoder.encode(entry.states, "generators"),
            "loaders": [] if entry is None else [each.describe(encoder) for each in entry.loaders],
        }  # fmt: skip

    def _modules(self) -> dict[str, Any]:
        """Return the modules of the script by name."""
        modules = [(n, m) for n, m in list(sys.modules.items()) if n == "__main__" or _is_file_of(self, m)]
        return dict(sorted(modules, key=lambda pair: pair[0]))

    def _code_of(self, frame: FrameType) -> list[str]:
        code = frame.f_code
        return [code.co_filename.removeprefix(self.session.folder), getattr(code, "co_qualname", code.co_name)]

    def _chain(self, frame: FrameType | None) -> tuple[list[FrameType], str]:
        """Return the frames of the script down to this one, outermost first, and library code between them."""
        frames: list[FrameType] = []
        foreign = between = ""
        while frame is not None and frame.f_code is not Loops.execute.__code__:
            name = frame.f_code.co_filename
            if self.is_script(name):
                foreign = foreign or between
                frames.insert(0, frame)
            elif frames and not name.startswith(_HERE) and not any(each in name for each in _PASSES_ON):
                between = between or f"{frame.f_code.co_name} of {printable(name)}"
            frame = frame.f_back
        return frames, foreign

    def _divide(self, whole: torch.Tensor, at: int, counts: list[int]) -> torch.Tensor:
        """Return a batch, with the same rows on each rank as before if there are as many ranks."""
        layouts, total = self.session.layouts, whole.shape[at]
        if total < self.session.size or self.session.size == 1:
            return whole
        rows = layouts.rows(tuple(counts)) if len(counts) == self.session.size else layouts.share(total)
        local = rows.cut(whole, at).clone()
        return BatchTensor(self.session, local, layouts.of(local, at, rows))

    def continue_files(self, files: list[list[Any]]) -> None:
        """Let the files of the script continue those of the checkpoint. Collective."""
        with self.session.without_meetings():
            self.session.world.on_root(lambda: self.outputs.continue_files(files))

    def arrive(self, steps: int) -> None:
        """Go on from the position of the checkpoint, whose number of steps of optimizers is given."""
        self._target = None
        self.steps = self._last_steps = steps
        for each in self.loops.active():
            each.continues = False
            each.begin_again()
        self._forget_all()
        self.outputs.speak()
        self.session.errors = sys.stderr


def follow(session: ScriptRun, words: list[str], options: argparse.Namespace) -> Resume:
    """Return a run that is recorded in a run folder, and that saves checkpoints or continues. Collective.

    Args:
        session: Run of the script.
        words: Path of the script, and its arguments.
        options: Options of the command.
    """
    run = Resume(session, words, options)
    run.begin_job(options)
    return run


class _Entry:
    """Generators before a loop. loaders: iterators of DataLoaders that were made for it."""

    __slots__ = ("loaders", "states")

    def __init__(self, states: list[Any], loaders: list[Any]) -> None:
        self.states, self.loaders = states, loaders


class SavedPosition:
    """Position of a checkpoint, to which the script is on its way.

    Args:
        run: Run that continues.
        values: Values of the checkpoint.
        decoder: VariableDecoder of its variables.
    """

    def __init__(self, run: Resume, values: dict[str, Any], decoder: VariableDecoder) -> None:
        self._run, self._values, self._decoder = run, values, decoder
        self._position: list[dict[str, Any]] = values["position"]
        self._path = [(depth, entry) for depth, each in enumerate(self._position) for entry in each["loops"]]
        self._loops: list[Loop] = []
        self._passed: list[Loop] = []  # loops whose current item has been returned

    def _leads(self, place: str, frame: FrameType, loops: int | None = None) -> bool:
        """Return whether a loop in this frame is the next one on the way."""
        if len(self._loops) >= len(self._path):
            return False
        depth, entry = self._path[len(self._loops)]
        return bool(entry["place"] == place) and self._is_at(frame, depth)

    def _is_at(self, frame: FrameType, depth: int) -> bool:
        run = self._run
        frames, _ = run._chain(frame)
        if len(frames) != depth + 1:
            return False
        known = zip(frames, self._position, strict=False)
        return all(
            run._code_of(f) == each["code"] and (f is frame or f.f_lasti == each["instruction"]) for f, each in known
        )

    def enter(self, place: str, frame: FrameType) -> None:
        """Give the generators the states that they had before this loop, if it is on the way.

        Args:
            place: File, line and column of the loop.
            frame: Frame that runs it.
        """
        if not self._leads(place, frame):
            return
        entry = self._path[len(self._loops)][1]
        if entry["states"] is not None:
            set_random_states(self._decoder.decode(entry["states"]))
        self._run._loaders.expect(entry["loaders"], self._decoder)

    def begin(self, loop: Loop, frame: FrameType) -> None:
        """Pass over the iterations of a loop that were done, if it is on the way.

        Args:
            loop: The loop.
            frame: Frame that runs it.
        """
        if not self._leads(loop.place, frame):
            return
        run, entry = self._run, self._path[len(self._loops)][1]
        self._loops.append(loop)
        loop.continues = True
        is_last = len(self._loops) == len(self._path) and self._values["is_for"]
        for number in range(entry["count"]):
            if number == entry["count"] - 1 and not is_last:
                break  # its body is running at the position, so the script gets this item
            with run._loaders.passing():
                try:
                    loop.item = loop.advance()
                except StopIteration:
                    run.part(f"ends the loop at {loop.place} after {number} of {entry['count']} iterations")
            loop.count += 1

    def reach(self, place: str, loop: Loop | None, frame: FrameType) -> None:
        """Give the variables their values if this is the position.

        Args:
            place: File, line and column of the loop.
            loop: Iterator of a `for` loop, None for `while`.
            frame: Frame that runs it.
        """
        run = self._run
        is_complete = len(self._loops) == len(self._path)
        if (
            loop is not None
            and loop.continues
            and not (is_complete and loop is self._loops[-1] and self._values["is_for"])
        ):
            if loop in self._passed:
                run.part(f"goes on with the loop at {loop.place} instead")
            self._passed.append(loop)
            return
        is_there = is_complete and place == self._values["place"] and (loop is not None) == self._values["is_for"]
        if not is_there or not self._is_at(frame, len(self._position) - 1):
            return
        self._check_loops()
        frames, _ = run._chain(frame)
        run.session.meet(f"the position of the checkpoint at {place}")
        run.continue_files(self._values["files"])
        self._restore(frames)
        run.arrive(self._values["steps"])

    def _check_loops(self) -> None:
        run = self._run
        for loop, (_, entry) in zip(self._loops, self._path, strict=True):
            recent = loop.entry.loaders if loop.entry is not None else []
            if not run._loaders.agree(recent, entry["loaders"]):
                run.part(f"reads other samples in the loop at {loop.place} (another data set or sampler)")
            if entry["item"] is not None and content_checksum(loop.item) != entry["item"]:
                run.part(f"has another item in the loop at {loop.place}")

    def _restore(self, frames: list[FrameType]) -> None:
        for name, saved in self._values["modules"].items():
            if name in sys.modules:
                if _text_checksum(sys.modules[name].__file__) != self._values["texts"][name]:
                    self._run.part(f"has another text in {name}")
                self._fill(vars(sys.modules[name]), saved)
        for frame, each in zip(frames, self._position, strict=True):
            if "names" in each:
                values = frame.f_locals
                self._fill(values, each["names"])
                if sys.version_info < (3, 13):
                    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(1))
        *states, source = self._decoder.decode(self._values["generators"])
        set_random_states(states)
        self._run._source.setstate(source)

    def _fill(self, names: Any, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            try:
                names[name] = self._decoder.decode(value, names.get(name))
            except LostError as error:  # a variable that is not set raises NameError if it is read
                if name in names:
                    self._run.part(f"has made another {name} than the checkpoint ({error})")
        if isinstance(names, dict):
            for name in [n for n in names if n not in saved and not _is_internal(n)]:
                del names[name]


def _text_checksum(path: Any) -> int:
    return zlib.crc32(Path(path).read_bytes())


def content_checksum(item: Any) -> int | None:
    """Return a CRC-32 of the numbers and tensors of a loop's item, or None if it has none. Collective for batches."""
    code, count = 0, 0
    for x in tree_flatten(item)[0]:
        if isinstance(x, WholeTensor):
            x = x.whole()
        if isinstance(x, (torch.Tensor, np.ndarray)):
            if isinstance(x, torch.Tensor) and x.layout != torch.strided:
                continue
            text = str(checksum(x)) if isinstance(x, torch.Tensor) or not x.dtype.hasobject else ""
        elif isinstance(x, (bool, int, float, str)):
            text = repr(x)
        else:
            continue
        code, count = zlib.crc32(text.encode(), code), count + 1
    return code if count else None


def _encode_all(encoder: VariableEncoder, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the variables of a function or a module as JSON values."""
    prefix = "" if where == "__main__" else f"{where}."
    return {n: encoder.encode(v, f"{prefix}{n}") for n, v in list(values.items()) if not _is_internal(n)}


def _is_internal(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_file_of(run: Resume, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and run.is_script(file)
