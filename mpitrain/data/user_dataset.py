"""A torch `Dataset` or `IterableDataset` of the user's as a data set of the main job: data.factory.

    function(split, **data.options) -> a data set for "train" and one for "held_out", or None if there is none

The function returns a torch data set, a pair (data set, collate function), or a DataLoader, of which the data set and
the collate function are used. A sample is a pair (x, y), or whatever the collate function makes a pair of batches from.

`Dataset`           any sample by number, in the order of `order.py`, as for prepared data
`IterableDataset`   a stream in its own order; every rank iterates over all of it, and keeps its part of each batch

    stream        0 1 2 3 | 4 5 6 7 | 8 9 ...       two ranks, batches of 4: rank 0 keeps 0 1, 4 5, ...
    after its end it is iterated again: the next epoch, announced by set_epoch(epoch) if it has that method

The samples are therefore the same on any number of ranks, and a resumed run continues with the next one; a stream is
skipped up to there. If reading draws from the generators of torch, NumPy or Python, each sample is read after these
were seeded by (seed, epoch, number), and they are restored afterwards. These generators belong to the whole process, so
such samples are read between steps and not by reader threads.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from mpitrain.config.named import describe_error, find
from mpitrain.config.settings import Config
from mpitrain.data.dataset import Batch, Dataset, Description, Ids
from mpitrain.data.format import HELD_OUT
from mpitrain.data.order import Ordering, mix64
from mpitrain.errors import InputError

ENDLESS = 1 << 62  # number of samples of a stream without a length
_PROBED = 4  # samples read to find out whether reading draws random numbers
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SALT = np.uint64(0x7573657264617461)  # makes these numbers independent of those of `order` and of `Augment`
Collate = Callable[[list[Any]], Any]


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the seed of the random numbers of a sample in an epoch, 0 to 2^64 - 1.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch.
        sample: Number of the sample.
    """
    values = np.array([[seed], [epoch], [sample]], np.int64).astype(np.uint64)
    key = mix64(mix64(mix64(values[0] ^ _SALT) + values[1] * _STEP) + values[2] * _STEP)
    return int(key[0])


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restore the state of the generators of torch, NumPy and Python at the end of the `with` block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices too
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _states() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return bytes(torch.get_rng_state().numpy()), numpy_state[1].tobytes(), numpy_state[2], random.getstate()


class IterableOrder(Ordering):
    """The order of a stream: its own."""

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return positions


class UserDataset(Dataset):
    """One split of the user's data.

    Args:
        label: Beginning of messages.
        dataset: The user's data set.
        collate: Function of a list of samples that returns a pair of batches (x, y).
        split: Name of the split.
        seed: Seed of the run.
        options: Arguments that the data set was made with, which its identity depends on.

    Attributes:
        is_stream: True for an `IterableDataset`, whose samples can only be read in order.
        draws: True if reading a sample draws random numbers, so that no reader threads may do it.

    Raises:
        InputError: A sample cannot be read, differs when it is read again, or is not a pair of arrays.
    """

    def __init__(
        self, label: str, dataset: Any, collate: Collate, split: str, seed: int, options: Mapping[str, Any]
    ) -> None:
        self._label, self._dataset, self._collate, self._seed = label, dataset, collate, seed
        self.is_stream = isinstance(dataset, IterableDataset)
        self.draws = False
        self._lock = threading.Lock()
        self._iterator: Iterator[Any] = iter(())
        self._next, self._epoch = 0, -1  # position of the iterator's next sample; epoch that it is in
        samples, self._options = self._count(split), options
        self._forms: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...] = ()
        before = _states()
        with _preserved_generators():
            probed = self._fetch(np.arange(min(samples, _PROBED)))
            self.draws = _states() != before
            if self.draws and self.is_stream:
                raise InputError(
                    f"{label} draws from the generators of torch, NumPy or Python, which differ between ranks; draw "
                    "from a generator of its own, seeded by the epoch of set_epoch(epoch)"
                )
            x, y = self._pair(probed, 0)
        self._forms = tuple((part.shape[1:], part.dtype) for part in (x, y))
        self.description = self._describe(split, samples, x, y)
        self._require_repeatable(np.arange(len(x)), (x, y))
        self.fingerprint = 0 if self.draws else zlib.crc32(y.tobytes(), zlib.crc32(x.tobytes()))

    def order(self, seed: int) -> Ordering:
        return IterableOrder() if self.is_stream else super().order(seed)

    def spread(self, places: Ids, chosen: int) -> Ids:
        return places if self.is_stream else super().spread(places, chosen)

    def read(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return self.read_at(ids, ids * 0)

    def read_at(self, ids: Ids, positions: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if not len(ids):
            x, y = (np.empty((0, *shape), dtype) for shape, dtype in self._forms)
            return x, y
        if not self.draws:
            return self._pair(self._fetch(ids), int(ids[0]))
        with _preserved_generators():
            samples = []
            for number, position in zip(ids.tolist(), positions.tolist(), strict=True):
                _seed_generators(sample_seed(self._seed, position // len(self), number))
                samples += self._fetch(np.array([number], np.int64))
            return self._pair(samples, int(ids[0]))

    def close(self) -> None:
        """Forget the iterator of a stream. A later read begins another one."""
        with self._lock:
            self._iterator, self._next, self._epoch = iter(()), 0, -1

    def _require_repeatable(self, ids: Ids, before: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
        """Raise InputError if samples differ when they are read again, as with a generator of the data set's own."""
        if self.is_stream:
            return
        pairs = zip(self.read(ids) if self.draws else before, self.read(ids), strict=True)
        if not all(np.array_equal(some, others, equal_nan=True) for some, others in pairs):
            raise InputError(
                f"{self._label}: a sample differs when it is read again, so it would differ between numbers of ranks; "
                "draw random numbers from the generators of torch, NumPy or Python, or in a function of data.augment"
            )

    def _count(self, split: str) -> int:
        try:
            samples = len(self._dataset)
        except TypeError:
            samples = 0 if not self.is_stream or split == HELD_OUT else ENDLESS
        except Exception as error:
            raise InputError(f"{self._label}: its length raised {describe_error(error)}; fix it") from error
        if samples < 1:
            raise InputError(f"{self._label} has no samples or no length; give it a method __len__")
        return samples

    def _fetch(self, ids: Ids) -> list[Any]:
        """Return samples by number, before they are collated."""
        samples, at_once = list[Any](), not self.is_stream and hasattr(self._dataset, "__getitems__")
        try:
            if at_once:
                return list(self._dataset.__getitems__(ids.tolist()))
            for number in ids.tolist():
                samples.append(self._take(number) if self.is_stream else self._dataset[number])
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            which = f"reading samples from {ids[0]} on" if at_once else f"sample {ids[len(samples)]}"
            raise InputError(f"{self._label}: {which} raised {describe_error(error)}; fix it") from error
        return samples

    def _take(self, position: int) -> Any:
        """Return the sample of the stream at a position, after skipping those before it."""
        with self._lock:
            if position < self._next or self._epoch < 0:
                self._next, self._epoch = 0, -1
                self._begin_epoch()
            while self._next < position:
                self._advance()
            return self._advance()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        self._iterator = iter(self._dataset)

    def _advance(self) -> Any:
        sample = next(self._iterator, self)
        if sample is self:  # the end of the stream
            self._begin_epoch()
            sample = next(self._iterator, self)
            if sample is self:
                raise InputError(f"{self._label} yields no samples in epoch {self._epoch}; fix its __iter__")
        self._next += 1
        return sample

    def _pair(self, samples: list[Any], first: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the batches x and y of samples."""
        try:
            pair = self._collate(samples)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{self._label}: collating samples from {first} on raised {describe_error(error)}; fix the samples, or "
                "return (data set, collate function)"
            ) from error
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(
                f"{self._label}: a batch is {type(pair).__name__}, not a pair (x, y); return (data set, collate "
                "function) with a function that makes such pairs"
            )
        x, y = (self._as_array(part, name, len(samples), first) for part, name in zip(pair, "xy", strict=True))
        for name, part, (shape, dtype) in zip("xy", (x, y), self._forms, strict=False):
            if part.shape[1:] != shape or part.dtype != dtype:
                raise InputError(
                    f"{self._label}: {name} of the samples from {first} on is {part.dtype} {list(part.shape[1:])}, but "
                    f"that of sample 0 is {dtype} {list(shape)}; give all samples one shape, for instance by padding"
                )
        return x, y

    def _as_array(self, part: Any, name: str, count: int, first: int) -> npt.NDArray[Any]:
        try:
            tensor = torch.as_tensor(part).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{self._label}: {name} is not an array ({describe_error(error)}); fix it") from None
        if not tensor.ndim or len(tensor) != count:
            raise InputError(
                f"{self._label}: {name} of {count} samples from {first} on has the shape {list(tensor.shape)}; its "
                "first axis must be that of the samples"
            )
        integers = not (tensor.is_floating_point() or tensor.dtype == torch.bool)
        return tensor.to(torch.int64 if integers else torch.float32).contiguous().numpy()

    def _describe(self, split: str, samples: int, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Description:
        vocabulary, classes = getattr(self._dataset, "vocabulary", None), getattr(self._dataset, "classes", None)
        is_tokens = bool(vocabulary) and x.ndim == 2 and x.shape == y.shape and x.dtype == y.dtype == np.int64
        if isinstance(classes, int):
            classes = tuple(map(str, range(classes)))
        names = tuple(map(str, classes)) if classes is not None and y.ndim == 1 and y.dtype == np.int64 else None
        forms = x.shape[1:], x.dtype, y.shape[1:], y.dtype
        identity = f"{zlib.crc32(repr((self._label, sorted(self._options.items()), samples, forms)).encode()):08x}"
        vocabulary = int(vocabulary) if vocabulary else None
        # the user's targets may contain -100, which no loss counts
        return Description(
            "tokens" if is_tokens else "arrays", split, samples, *forms, vocabulary, names, identity, masked=is_tokens
        )


def open_factory(config: Config, split: str) -> UserDataset | None:
    """Return one split of the data of data.factory; None if its function returns None for it.

    Args:
        config: The settings.
        split: "train" or "held_out".

    Raises:
        InputError: The function is missing or raises, or does not return a data set.
    """
    path, options = config.data.factory, config.data.options
    label = f"data.factory {path}"
    try:
        with _preserved_generators():
            _seed_generators(
                sample_seed(config.run.seed, 0, 0)
            )  # a random division into splits is the same on all ranks
            result = find("data.factory", path)(split, **options)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{label} raised {describe_error(error)}; fix it or data.options") from error
    if result is None and split == HELD_OUT:
        return None
    dataset, collate = result if isinstance(result, tuple) and len(result) == 2 else (result, default_collate)
    if isinstance(dataset, DataLoader):
        collate, dataset = dataset.collate_fn, dataset.dataset
    if not isinstance(dataset, IterableDataset) and not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise InputError(
            f"{label} returned {type(result).__name__} for {split!r}; return a torch Dataset or IterableDataset, a "
            "pair (data set, collate function), or a DataLoader"
        )
    return UserDataset(f"{label}, {split}", dataset, collate, split, config.run.seed, options)


class UserAugment:
    """Functions of data.augment that are called as function(x, y, generator) for each sample and return (x, y).

    The generator is seeded by (seed, epoch, number of the sample), so what it draws is the same on any number of ranks.

    Args:
        paths: Functions, as package.module:function.
        seed: Seed of the run.

    Raises:
        InputError: A function is missing.
    """

    def __init__(self, paths: tuple[str, ...], seed: int) -> None:
        self._functions = [(path, find("data.augment", path)) for path in paths]
        self._seed = seed

    def check(self, data: Dataset) -> None:
        """Call the functions twice for the first samples.

        Args:
            data: The training data set.

        Raises:
            InputError: A function raises, changes a shape or dtype, or does not draw from its generator alone.
        """
        if not self._functions:
            return
        ids = np.arange(min(len(data), _PROBED), dtype=np.int64)
        x, y = map(torch.from_numpy, data.read(ids))
        before = _states()
        with _preserved_generators():
            first, again = (self(Batch(ids, x.clone(), y.clone(), 0), ids * 0) for _ in range(2))
            draws = _states() != before
        pairs = zip(first, again, strict=True)
        if draws or not all(np.array_equal(some.numpy(), other.numpy(), equal_nan=True) for some, other in pairs):
            raise InputError(
                f"data.augment {', '.join(path for path, _ in self._functions)} draws random numbers that differ "
                "between ranks; draw all of them from the argument generator"
            )

    def __call__(self, batch: Batch, epochs: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and y of a batch, changed by all functions in turn.

        Args:
            batch: Batch in host memory.
            epochs: Epoch of each sample, int64 [n].

        Raises:
            InputError: A function raises, or changes a shape or dtype.
        """
        if not self._functions or not len(batch.ids):
            return batch.x, batch.y
        changed = []
        for x, y, number, epoch in zip(batch.x, batch.y, batch.ids.tolist(), epochs.tolist(), strict=True):
            generator = torch.Generator()
            generator.manual_seed(sample_seed(self._seed, epoch, number))
            before = [(part.shape, part.dtype) for part in (x, y)]
            for path, function in self._functions:
                try:
                    x, y = function(x, y, generator)
                    after = [(part.shape, part.dtype) for part in (x, y)]
                except (Exception, SystemExit) as error:
                    raise InputError(f"data.augment {path} raised {describe_error(error)}; fix it") from error
                if after != before:
                    raise InputError(
                        f"data.augment {path} result {after} of {before}; return x and y in their old form"
                    )
            changed.append((x, y))
        return torch.stack([x for x, _ in changed]), torch.stack([y for _, y in changed])
