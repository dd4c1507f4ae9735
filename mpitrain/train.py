"""Main training job: `mpirun -n 8 python -m mpitrain.train [CONFIG.toml] [--section.key value]...`

With --dry-run, the job is assembled and takes a few steps on made-up samples (see `mpitrain.trainer.rehearsal`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mpitrain import early

if __name__ == "__main__":  # before the other imports, which take seconds and load MPI
    early.record_signals()
    with early.without_collecting():
        from mpitrain.config.settings import Config, help_text

    early.print_help(
        sys.argv[1:], lambda: help_text("mpitrain.train") + "\n\n" + early.rehearsal_parser().format_help()
    )
    config = early.read_arguments(lambda: Config.from_args(early.rehearsal_options(sys.argv[1:])[1]))
    early.set_start_timeout(config.comm.timeout if config is not None else 0.0)
    with early.without_collecting():
        import mpitrain.trainer.trainer  # noqa: F401

from mpitrain.comm import init
from mpitrain.comm.faults import ulfm
from mpitrain.config.settings import Config
from mpitrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    import argparse


def main(config: Config | None = None) -> int:
    """Train, and return the exit code.

    Args:
        config: Configuration of the command line, if it was already read.
    """
    options, rest = early.rehearsal_options(sys.argv[1:])
    if options.dry_run:
        return _rehearse(options, config or Config.from_args(rest))
    trainer = Trainer(config or (lambda: Config.from_args(rest)), world=init())
    code = trainer.fit()
    if trainer.config.elastic.mode != "off":
        ulfm.leave(init(), code)
    return code


def _rehearse(options: argparse.Namespace, config: Config) -> int:
    """Rehearse the job, and return the exit code."""
    from mpitrain.comm.rehearsal import play_rank
    from mpitrain.planner.machine import size_of
    from mpitrain.trainer.rehearsal import Rehearsal

    world, memory = init(), size_of(options.memory, "--memory") if options.memory else None
    if options.as_rank is not None:
        world = play_rank(world, options.as_rank, options.ranks, options.ranks_per_node)
    return Rehearsal(config, world, memory).fit()


if __name__ == "__main__":
    sys.exit(main(config))
