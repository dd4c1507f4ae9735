"""The main job: `mpirun -n 8 python -m mpitrain.train [CONFIG.toml] [--section.key value]...`"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the other imports, which take seconds, and load MPI
    from mpitrain import early

    early.keep_signals()
    from mpitrain.config.settings import Config, help_text

    early.answer(sys.argv[1:], lambda: help_text("mpitrain.train"))
    config = early.read_arguments(lambda: Config.from_args(sys.argv[1:], lambda told: None))  # `main` says it
    early.allow(config.comm.timeout if config is not None else 0.0)

from mpitrain.comm import init
from mpitrain.comm.faults import ulfm
from mpitrain.config.settings import Config
from mpitrain.trainer.settings import shared_config
from mpitrain.trainer.trainer import Trainer


def main() -> int:
    """Train as the command line says; returns the exit code."""
    world = init()
    config = shared_config(world, lambda: Config.from_args(sys.argv[1:]))
    code = Trainer(config, world=world).fit()
    if config.elastic.mode != "off":
        ulfm.leave(init(), code)
    return code


if __name__ == "__main__":
    sys.exit(main())
