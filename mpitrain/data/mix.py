"""Data sets of a configuration: the one of data.path, or several of data.mix, mixed by weight.

    running position   0 1 2 3 4 5 6 7 8 9 | 10 ...     weights 0.5, 0.3, 0.2: a period of 10
    data set           a b a c a b a b c a | a b ...    of p positions, each set has weight * p, to within one
    its own position   0 0 1 0 2 1 3 2 1 4 | 5 3 ...    in its own shuffled order, epoch after epoch

The pattern is Tijdeman's solution of the chairman assignment problem (R. Tijdeman, "The chairman assignment problem",
Discrete Mathematics 32, 1980): of the data sets that are due a sample, take the one with the earliest deadline. With
rational weights the pattern is periodic, so the whole state is the running position, as for a single data set.

Sample ids count the samples of the first data set, then those of the second, and so on.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.config.settings import Config
from mpitrain.data.dataset import Dataset, Description, Ids, open_dataset
from mpitrain.data.folders import resolve
from mpitrain.data.format import TRAIN, DatasetManifest, read_manifest
from mpitrain.data.order import Ordering, SampleOrder
from mpitrain.errors import InputError


def data_paths(config: Config) -> list[str]:
    """Return the names of the data sets of a run: data.path, the keys of data.mix, or data.factory."""
    return list(config.data.mix) or [config.data.factory or config.data.path]


def open_split(
    config: Config, split: str, find: Callable[[str], Path] = resolve, threads: int | None = None
) -> Dataset | None:
    """Open one split of a configuration's data; return None if the data has no such split.

    Args:
        config: Configuration with the data sets and the tokens per sample.
        split: "train" or "held_out".
        find: Function that returns the folder of a value of data.path or a name in data.mix.
        threads: Threads that decode images; see `open_dataset`.

    Raises:
        InputError: The data cannot be opened; see `open_dataset` and `open_mix`.
    """
    if config.data.factory:
        from mpitrain.data.user_dataset import open_factory  # imports torch

        return open_factory(config, split)
    form: dict[str, Any] = {"sequence": config.model.sequence, "apart": config.data.documents == "apart"}
    if config.data.mix:
        return open_mix(config.data.mix, split, find=find, threads=threads, **form)
    folder = find(config.data.path)
    exists = split == TRAIN or split in read_manifest(folder).splits
    return open_dataset(folder, split, threads=threads, **form) if exists else None


def check_data(config: Config, data: Dataset) -> None:
    """Raise InputError if the training samples do not fit the settings.

    Args:
        config: Configuration of the run.
        data: Split of training samples.
    """
    if len(data) < config.train.batch:
        raise InputError(
            f"data set {' and '.join(data_paths(config))} has {len(data)} samples, fewer than train.batch "
            f"{config.train.batch}; use more data or a smaller train.batch"
        )


_LONGEST_PERIOD = 100_000  # samples; computing a pattern of this length takes a fraction of a second


class Weights:
    """Integers in the ratio of the weights of several data sets.

    Args:
        weights: Weights, taken exactly as they are written in decimals: 0.7 and 0.3 become 7 and 3.

    Attributes:
        parts: One integer per data set, without a common divisor.
        period: Number of samples after which the pattern repeats.

    Raises:
        InputError: The ratio needs numbers that are too large.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self.parts = tuple(part // math.gcd(*whole) for part in whole)
        self.period = sum(self.parts)
        if self.period > _LONGEST_PERIOD:
            raise InputError(
                f"data.mix: with weights in the ratio {' : '.join(map(str, self.parts))}, the order repeats only after "
                f"{self.period:,} samples; use weights with fewer digits, for at most {_LONGEST_PERIOD:,}"
            )

    @cached_property
    def pattern(self) -> npt.NDArray[np.int64]:
        """Number of the data set that each position of a period takes its sample from, int64 [period]."""
        total, several = self.period, 2 * len(self.parts) - 2
        if several == 0:
            return np.zeros(1, np.int64)
        counts = [0] * len(self.parts)
        pattern = np.empty(total, np.int64)
        for position in range(total):
            chosen, nearest = 0, math.inf
            for number, part in enumerate(self.parts):
                owed = several * ((position + 1) * part - counts[number] * total)
                if owed >= total and (deadline := ((several - 1) * total - owed) / part) < nearest:
                    chosen, nearest = number, deadline
            counts[chosen] += 1
            pattern[position] = chosen
        return pattern


class MixedOrder(Ordering):
    """Endless sequence of the samples of several data sets, each in its own order.

    Args:
        samples: Number of samples of each data set.
        weights: Weights of the data sets.
        seed: Seed of the orders.
    """

    def __init__(self, samples: Sequence[int], weights: Weights, seed: int) -> None:
        self._weights = weights
        self._orders = [SampleOrder(count, seed) for count in samples]
        self._firsts = list(accumulate(samples, initial=0))
        self._before = np.empty(weights.period, np.int64)  # samples of the same data set earlier in the period
        for number, part in enumerate(weights.parts):
            self._before[weights.pattern == number] = np.arange(part)

    def at(self, positions: npt.NDArray[np.int64]) -> Ids:
        periods, within = np.divmod(positions, self._weights.period)
        sets = self._weights.pattern[within]
        ids = np.empty(len(positions), np.int64)
        for number, part in enumerate(self._weights.parts):
            in_set = sets == number
            set_positions = periods[in_set] * part + self._before[within[in_set]]
            ids[in_set] = self._firsts[number] + self._orders[number].at(set_positions)
        return ids


class MixedDataset(Dataset):
    """Several data sets read as one.

    Args:
        parts: Data sets whose samples have equal shapes and dtypes.
        weights: Weights of the data sets.
        names: Names of the data sets in data.mix.
    """

    def __init__(self, parts: Sequence[Dataset], weights: Weights, names: Sequence[str]) -> None:
        self._parts, self._weights, self._names = list(parts), weights, list(names)
        self._firsts = np.array([0, *accumulate(map(len, parts))], np.int64)
        self.description = _mixed_description([part.description for part in parts], weights)

    def order(self, seed: int) -> MixedOrder:
        """Return the order of the samples in training."""
        return MixedOrder([len(part) for part in self._parts], self._weights, seed)

    def spread(self, places: npt.NDArray[np.int64], chosen: int) -> Ids:
        """Return some of `chosen` sample ids, which are divided over the data sets by weight.

        The ids of each data set are spread evenly over it.

        Args:
            places: Which of the `chosen` ids to return, 0 to chosen - 1, int64 [n].
            chosen: Total number of ids.

        Returns:
            Sample ids, int64 [n].
        """
        counts = self._counts(chosen)
        bounds = np.array([0, *accumulate(counts)], np.int64)
        sets = np.searchsorted(bounds, places, side="right") - 1
        sizes = np.diff(self._firsts)[sets]
        return self._firsts[sets] + (places - bounds[sets]) * sizes // np.array(counts, np.int64)[sets]

    def parts(self, chosen: int) -> dict[str, int]:
        return dict(zip(self._names, self._counts(chosen), strict=True))

    def _counts(self, chosen: int) -> list[int]:
        return _divide_by_weight(chosen, self._weights.parts, [len(part) for part in self._parts])

    def read(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        self._sort(ids)
        facts = self.description
        x = np.empty((len(ids), *facts.x_shape), facts.x_dtype)
        y = np.empty((len(ids), *facts.y_shape), facts.y_dtype)
        sets = np.searchsorted(self._firsts, ids, side="right") - 1
        for number in np.unique(sets).tolist():
            in_set = sets == number
            x[in_set], y[in_set] = self._parts[number].read(ids[in_set] - self._firsts[number])
        return x, y

    def close(self) -> None:
        """Close the files of all data sets."""
        for part in self._parts:
            part.close()


def open_mix(
    mix: Mapping[str, float],
    split: str = TRAIN,
    *,
    find: Callable[[str], Path],
    sequence: int | None = None,
    apart: bool = False,
    threads: int | None = None,
) -> Dataset | None:
    """Open one split of several data sets, mixed by weight.

    Args:
        mix: Weight of each data set, by the name that `data.path` would have for it.
        split: "train" or "held_out"; for the latter, data sets without that split are left out.
        find: Function that returns the folder of a data set.
        sequence: Tokens per sample; see `open_dataset`.
        apart: If true, attention must not cross documents; see `open_dataset`.
        threads: Threads that decode images of each part; see `open_dataset`.

    Returns:
        The data set; None if no part has such a split.

    Raises:
        InputError: A part cannot be read, or the parts do not fit each other.
    """
    folders = {path: find(path) for path in mix}
    manifests = {path: read_manifest(folder) for path, folder in folders.items()}
    _check_same_meaning(folders, manifests, apart)
    there = [path for path in mix if split == TRAIN or split in manifests[path].splits]
    if not there:
        return None
    parts = [open_dataset(folders[path], split, sequence=sequence, apart=apart, threads=threads) for path in there]
    for path, part in zip(there, parts, strict=True):
        one, other = _describe_form(parts[0].description), _describe_form(part.description)
        if one != other:
            raise InputError(
                f"data.mix: samples of {folders[there[0]]} and {folders[path]} have different shapes, types or classes "
                f"({one}; {other}); use data sets in which these are equal"
            )
    return MixedDataset(parts, Weights([mix[path] for path in there]), there)


def _describe_form(facts: Description) -> str:
    classes = "" if facts.classes is None else f", {len(facts.classes)} classes"
    return f"{facts.kind} {list(facts.x_shape)} {facts.x_dtype}, {list(facts.y_shape)} {facts.y_dtype}{classes}"


def _check_same_meaning(folders: Mapping[str, Path], manifests: Mapping[str, DatasetManifest], separate: bool) -> None:
    """Raise InputError unless tokens and classes have the same meaning in all data sets."""
    (first, one), *others = manifests.items()
    for path, other in others:
        pair = f"{folders[first]} and {folders[path]}"
        if one.tokenizer_crc32 != other.tokenizer_crc32:
            raise InputError(f"data.mix: {pair} have different tokenizers; prepare them with the same --tokenizer")
        if one.classes is not None and other.classes is not None and one.classes != other.classes:
            raise InputError(f"data.mix: {pair} have different classes; prepare them with the same classes")
        if separate and one.document_end != other.document_end:
            raise InputError(
                f"data.mix: documents of {pair} end with different tokens ({one.document_end} and "
                f"{other.document_end}); prepare them with the same --end-token, or set data.documents joined"
            )


def _mixed_description(parts: Sequence[Description], weights: Weights) -> Description:
    vocabularies = [part.vocabulary for part in parts if part.vocabulary is not None]
    ends = {part.document_end for part in parts}
    identity_bytes = repr((weights.parts, [part.identity for part in parts])).encode("ascii")
    return replace(
        parts[0],
        samples=sum(part.samples for part in parts),
        vocabulary=max(vocabularies) if vocabularies else None,
        identity=f"{zlib.crc32(identity_bytes):08x}",
        masked=any(part.masked for part in parts),
        document_end=ends.pop() if len(ends) == 1 else None,
    )


def _divide_by_weight(chosen: int, weights: Sequence[int], most: Sequence[int]) -> list[int]:
    """Divide `chosen` by weight into parts that do not exceed `most`; a shortfall is divided over the other parts."""
    counts = [0] * len(weights)
    while (left := chosen - sum(counts)) > 0:
        able = [k for k in range(len(weights)) if counts[k] < most[k]]
        total, before = sum(weights[k] for k in able), sum(counts)
        for k in able:
            counts[k] = min(most[k], counts[k] + left * weights[k] // total)
        if sum(counts) == before:  # less than one for each: give one to the heaviest
            counts[max(able, key=lambda k: weights[k])] += 1
    return counts
