"""The data sets that a configuration names: data.path, or those of data.mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mpitrain.config.settings import Config
from mpitrain.data.dataset import Dataset, open_dataset
from mpitrain.data.defaults import resolve
from mpitrain.data.format import TRAIN, read_manifest
from mpitrain.data.mix import open_mix
from mpitrain.errors import InputError


def data_paths(config: Config) -> list[str]:
    """What names the data sets of a run: data.path, or those of data.mix."""
    return list(config.data.mix) or [config.data.path]


def open_split(config: Config, split: str, find: Callable[[str], Path] = resolve) -> Dataset | None:
    """Open one split of a configuration's data; None where they have no such one.

    Args:
        config: Says which data sets, and how many tokens a sample has.
        split: "train" or "held_out".
        find: Gives the folder of what data.path or a name in data.mix says.

    Raises:
        InputError: As of `open_dataset` and `open_mix`.
    """
    sequence, apart = config.model.sequence, config.data.documents == "apart"
    if config.data.mix:
        return open_mix(config.data.mix, split, find=find, sequence=sequence, apart=apart)
    folder = find(config.data.path)
    there = split == TRAIN or split in read_manifest(folder).splits
    return open_dataset(folder, split, sequence=sequence, apart=apart) if there else None


def check_data(config: Config, data: Dataset) -> None:
    """Raise InputError where the training samples do not fit the settings."""
    if len(data) < config.train.batch:
        raise InputError(
            f"data set {' and '.join(data_paths(config))} has {len(data)} samples, fewer than train.batch "
            f"{config.train.batch}; give more data or a smaller train.batch"
        )
    if data.description.masked and config.parallel.slices > 1:
        raise InputError(
            f"parallel.slices {config.parallel.slices} cannot weigh targets that are not trained on, which differ from "
            "slice to slice, and these data have such; set parallel.slices to 1"
        )
