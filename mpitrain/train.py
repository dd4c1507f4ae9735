"""Main training job: `mpirun -n 8 python -m mpitrain.train [CONFIG.toml] [--section.key value]...`"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the other imports, which take seconds and load MPI
    from mpitrain import early

    early.record_signals()
    with early.without_collecting():
        from mpitrain.config.settings import Config, help_text

    early.print_help(sys.argv[1:], lambda: help_text("mpitrain.train"))
    config = early.read_arguments(lambda: Config.from_args(sys.argv[1:]))
    early.set_start_timeout(config.comm.timeout if config is not None else 0.0)
    with early.without_collecting():
        import mpitrain.trainer.trainer  # noqa: F401

from mpitrain.comm import init
from mpitrain.comm.faults import ulfm
from mpitrain.config.settings import Config
from mpitrain.trainer.trainer import Trainer


def main(config: Config | None = None) -> int:
    """Train, and return the exit code.

    Args:
        config: Configuration of the command line, if it was already read.
    """
    trainer = Trainer(config or (lambda: Config.from_args(sys.argv[1:])), world=init())
    code = trainer.fit()
    if trainer.config.elastic.mode != "off":
        ulfm.leave(init(), code)
    return code


if __name__ == "__main__":
    sys.exit(main(config))
