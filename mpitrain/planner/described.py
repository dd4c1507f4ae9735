"""What the data of a configuration are, as far as a plan needs to know."""

from __future__ import annotations

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.data.format import TRAIN
from mpitrain.data.mix import check_data, open_split
from mpitrain.errors import InputError, refusal


def description_of(config: Config) -> Description:
    """What a configuration's data hold; embedded ones that are not there yet are made.

    Raises:
        InputError: They cannot be read, or are too few for a batch.
    """
    data = open_split(config, TRAIN)
    assert data is not None
    try:
        check_data(config, data)
    except InputError as error:
        raise refusal(str(error)) from None
    return data.description
