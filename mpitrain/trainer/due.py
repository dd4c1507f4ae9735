"""At which steps a run is evaluated and saved."""

from __future__ import annotations

from mpitrain.config.settings import Config


def due(since: int, step: int, every: int) -> bool:
    """Whether one of every `every`-th steps is after step `since`, and not after this one; 0: none is."""
    return every > 0 and step // every > since // every


def saves_after(step: int, config: Config) -> int:
    """Checkpoints still to be written after this step, if the run is not stopped; with "auto" the most there may be."""
    steps, every = config.train.steps, config.checkpoint.every
    if step >= steps:
        return 0
    if every == "auto":
        return steps - step
    evaluated = config.train.evaluate_every if config.checkpoint.best else 0
    best = steps // evaluated - step // evaluated if evaluated else 0
    return best + (steps // every - step // every + (steps % every > 0) if every else 1)
