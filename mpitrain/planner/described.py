"""What the data of a configuration are, as far as a plan needs to know."""

from __future__ import annotations

from mpitrain.config.settings import Config
from mpitrain.data import Description, open_dataset, resolve
from mpitrain.errors import refusal


def description_of(config: Config) -> Description:
    """What a configuration's data hold; embedded ones that are not there yet are made.

    Raises:
        InputError: They cannot be read, or are too few for a batch.
    """
    folder = resolve(config.data.path)
    data = open_dataset(folder, sequence=config.model.sequence)
    if len(data) < config.train.batch:
        raise refusal(
            f"data set {folder} has {len(data)} samples, fewer than train.batch {config.train.batch}; give more data "
            "or a smaller train.batch"
        )
    return data.description
