"""A run folder's files, by name.

RUN/config.toml              resolved configuration
RUN/tokenizer.json           a copy of the data's tokenizer, where the data are tokenized text
RUN/metrics.jsonl            one line a step, from rank 0: mpitrain.monitor.run_files
RUN/events.jsonl             starts, saves, losses of ranks, ends, from rank 0: mpitrain.monitor.run_files
RUN/ranks/rank-00003.jsonl   each rank's time, memory and traffic: mpitrain.monitor.run_files
RUN/logs/rank-00003.log      each rank's log: mpitrain.monitor.logs
RUN/timeline/steps-5-8/      the steps that monitor.timeline names: mpitrain.monitor.timeline
RUN/checkpoints/             see mpitrain.checkpoint
RUN/tensorboard/, wandb/, mlflow/   see mpitrain.monitor.trackers
RUN/lock                     held while a job works in the folder: mpitrain.storage.locks
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from mpitrain.storage.disk import reporting

CONFIG = "config.toml"
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
RANKS, LOGS, TIMELINE, CHECKPOINTS = "ranks", "logs", "timeline", "checkpoints"
TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"


def rank_path(folder: Path, rank: int, ending: str) -> Path:
    """Return the path of a rank's file in one of these folders.

    Args:
        folder: RUN/ranks, RUN/logs, or a folder of a timeline.
        rank: Number of the rank.
        ending: "jsonl", "log" or "json".
    """
    return folder / f"rank-{rank:05d}.{ending}"


def rank_paths(folder: Path, ending: str) -> list[Path]:
    """Return the paths of all ranks' files in such a folder, by rank. Raises OSError."""
    return sorted(folder.glob(f"rank-[0-9]*.{ending}"))


def writing(what: str) -> AbstractContextManager[None]:
    """Raise InputError where a file of a run folder cannot be written. what: a message's name for the file."""
    return reporting(f"{what} cannot be written", "make room, or choose another run.dir")
