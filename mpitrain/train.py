"""The main job: `mpirun -n 8 python -m mpitrain.train [CONFIG.toml] [--section.key value]...`"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the other imports, which take seconds
    from mpitrain import early

    early.keep_signals()
    from mpitrain.config.settings import start_timeout

    early.allow(start_timeout(sys.argv[1:]))

from mpitrain.comm import init
from mpitrain.comm.faults import ulfm
from mpitrain.config.settings import Config, help_text
from mpitrain.errors import EXIT_DONE
from mpitrain.trainer.settings import shared_config
from mpitrain.trainer.trainer import Trainer


def main() -> int:
    """Train as the command line says; returns the exit code."""
    world = init()
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        if world.rank == 0:
            print(help_text("mpitrain.train"))
        return EXIT_DONE
    config = shared_config(world, lambda: Config.from_args(arguments))
    code = Trainer(config, world=world).fit()
    if config.elastic.mode != "off":
        ulfm.leave(init(), code)
    return code


if __name__ == "__main__":
    sys.exit(main())
