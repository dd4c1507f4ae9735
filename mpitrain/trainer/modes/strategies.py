"""The strategy of each parallel.mode."""

from __future__ import annotations

from mpitrain.choices import Mode
from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.trainer.modes.local import Local
from mpitrain.trainer.modes.served import Served
from mpitrain.trainer.modes.strategy import Strategy, Synchronous

STRATEGIES: dict[Mode, type[Strategy]] = {"sync": Synchronous, "server": Served, "local": Local}


def strategy_of(config: Config, world: Communicator) -> Strategy:
    """The strategy that parallel.mode names. Raises InputError, on all ranks, for settings that do not go with it."""
    return STRATEGIES[config.parallel.mode](config, world)
