"""Positions in DataLoaders: what their generators were when an iteration began, and which samples it has asked for."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader

from mpitrain.comm.memory import device as devices
from mpitrain.errors import InputError
from mpitrain.run.session import ScriptRun
from mpitrain.run.variables import VariableDecoder, VariableEncoder, generator_state, set_generator_state

_SCALARS = (bool, int, float, str)
_PASSERS = [str(Path(__file__).with_name(name)) for name in ("resume.py", "loaders.py")]  # which pass over batches


class LoaderIteration:
    """Iteration over a DataLoader.

    Attributes:
        loader: The DataLoader.
        code: CRC-32 of the indices of the samples asked for so far.
        count: Number of batches so far.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.code, self.count = loader, 0, 0
        self._before = random_states()
        self._keeps_workers = bool(loader.num_workers and loader.persistent_workers)
        self._states = [[name, generator_state(x)] for name, x in _generators(loader)]
        self._numbers = [[name, x] for name, x in _numbers(loader)]

    def describe(self, encoder: VariableEncoder) -> dict[str, Any]:
        """Return the iteration as a JSON value."""
        if self._keeps_workers:
            raise InputError(
                "--resume cannot save the state of persistent workers; make the DataLoader without persistent_workers",
                agreed=True,
            )
        states = encoder.encode(self._states, "generators of a DataLoader")
        before = encoder.encode(self._before, "generators")
        return {"code": self.code, "count": self.count, "before": before, "states": states, "numbers": self._numbers}


class Loaders:
    """Iterations over all DataLoaders; `install` records them from then on.

    Attributes:
        recent: Iterations that began since the last `begin`.
    """

    def __init__(self, session: ScriptRun) -> None:
        self._session = session
        self.recent: list[LoaderIteration] = []
        self._expected: list[tuple[Any, Any]] = []
        self._is_passing = False

    def install(self) -> None:
        """Replace the functions of torch with which an iteration begins and goes on."""
        iterate = dataloader.DataLoader.__iter__
        base: Any = dataloader._BaseDataLoaderIter
        following, next_index = base.__next__, base._next_index
        loaders = self

        def begin(self: Any) -> Any:
            loaders._restore(self)
            iteration = LoaderIteration(self)
            iterator = iterate(self)
            setattr(iterator, "iteration", iteration)  # noqa: B010 - an attribute that torch does not know
            loaders.recent.append(iteration)
            return iterator

        def ask(self: Any) -> Any:
            index = next_index(self)
            iteration = getattr(self, "iteration", None)
            if iteration is not None:
                iteration.code = zlib.crc32(repr(index).encode(), iteration.code)
            return index

        def read(self: Any) -> Any:
            content = None
            if not loaders._passes_over(self):
                content = following(self)
            else:
                if self._sampler_iter is None:
                    self._reset()
                ask(self)
                self._num_yielded += 1
            if (iteration := getattr(self, "iteration", None)) is not None:
                iteration.count += 1
            return content

        dataloader.DataLoader.__iter__ = begin  # type: ignore[method-assign]
        base._next_index, base.__next__ = ask, read

    def begin(self, iterations: list[LoaderIteration]) -> None:
        """Start a new list of iterations."""
        self.recent = iterations
        self._expected = []

    def expect(self, iterations: list[dict[str, Any]], decoder: VariableDecoder) -> None:
        """Give the generators of the next iterations the states that they had.

        Args:
            iterations: Values that `LoaderIteration.describe` returned.
            decoder: Decoder of the states.
        """
        self._expected = [(decoder.decode(each["states"]), each["numbers"]) for each in iterations]

    def agree(self, iterations: list[LoaderIteration], saved: list[dict[str, Any]]) -> bool:
        """Return whether iterations have asked for the same samples as those of a checkpoint.

        Args:
            iterations: Iterations of this process.
            saved: Values that `LoaderIteration.describe` returned.
        """
        return [each.code for each in iterations] == [each["code"] for each in saved]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Pass over batches in the body of the `with` statement, without reading samples where nobody sees them."""
        before, self._is_passing = self._is_passing, True
        try:
            yield
        finally:
            self._is_passing = before

    def continue_iteration(self, loader: Any, entry: dict[str, Any], decoder: VariableDecoder) -> Any:
        """Return an iterator over a DataLoader at the position of one that `LoaderIteration.describe` returned.

        Args:
            loader: The DataLoader.
            entry: Description of the iteration.
            decoder: VariableDecoder of the states of generators.

        Raises:
            InputError: It asks for other samples.
        """
        later = [(x, generator_state(x)) for _, x in _generators(loader)]
        set_random_states(decoder.decode(entry["before"]))
        self.expect([entry], decoder)
        iterator = iter(loader)
        with self.passing():
            for _ in range(entry["count"]):
                next(iterator)
        for x, state in later:
            set_generator_state(x, state)
        if iterator.iteration.code != entry["code"]:
            raise InputError("--resume: a DataLoader asks for other samples than at the checkpoint; use the same data",
                             agreed=True)  # fmt: skip
        return iterator

    def _restore(self, loader: Any) -> None:
        if not self._expected:
            return
        states, numbers = self._expected.pop(0)
        for (name, x), (other, state) in zip(_generators(loader), states, strict=False):
            if name == other:
                set_generator_state(x, state)
        for name, value in numbers:
            owner, _, attribute = name.rpartition(".")
            setattr(getattr(loader, owner), attribute, value)

    def _passes_over(self, iterator: Any) -> bool:
        """Return whether a batch is passed over, and between the loop and the DataLoader is no code of the script."""
        if not self._is_passing or iterator._num_workers or iterator._dataset_kind != dataloader._DatasetKind.Map:
            return False
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name in _PASSERS:
                return True
            if "tqdm" not in name:
                return False
            frame = frame.f_back
        return False


def _generators(loader: Any) -> list[tuple[str, Any]]:
    """Return the generators of a DataLoader and its samplers, with their names."""
    out = []
    for owner in ("", "sampler", "batch_sampler"):
        x = getattr(loader, owner, None) if owner else loader
        for name, value in vars(x).items() if hasattr(x, "__dict__") else ():
            if generator_state(value) is not None:
                out.append((f"{owner}.{name}", value))
    return out


def _numbers(loader: Any) -> list[tuple[str, Any]]:
    """Return the numbers and strings that are attributes of a DataLoader's samplers, such as their epoch."""
    return [
        (f"{owner}.{name}", value)
        for owner in ("sampler", "batch_sampler")
        for name, value in (
            vars(getattr(loader, owner)).items() if hasattr(getattr(loader, owner, None), "__dict__") else ()
        )
        if type(value) in _SCALARS
    ]


def random_states() -> list[Any]:
    """Return the states of the generators of torch, NumPy, Python and the device that have no name."""
    device = devices.used_accelerator()
    of_device = None if device is None else devices.generator_state(device)
    return [torch.get_rng_state(), list(np.random.get_state()), random.getstate(), of_device]


def set_random_states(states: list[Any]) -> None:
    """Give these generators states that `random_states` returned."""
    torch.set_rng_state(states[0])
    np.random.set_state(tuple(states[1]))
    random.setstate(states[2])
    if states[3] is not None and (device := torch.accelerator.current_accelerator()) is not None:
        devices.set_generator_state(device, states[3])
