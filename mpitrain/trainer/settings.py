"""The settings of a run, from what the caller of the trainer gives, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config


def shared_config(world: Communicator, make: Callable[[], Config]) -> Config:
    """The settings that rank 0 makes, on all ranks, which know what was set explicitly. Collective.

    Raises InputError, on all ranks, where they are wrong.
    """
    return Config.from_dict(world.on_root(lambda: make().model_dump(exclude_unset=True)))
