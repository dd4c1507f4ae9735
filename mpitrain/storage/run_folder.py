"""Names of the files in a run folder.

RUN/config.toml              resolved configuration
RUN/tokenizer.json           a copy of the data's tokenizer, if the data is tokenized text
RUN/metrics.jsonl            one line per step, written by rank 0: mpitrain.monitor.run_files
RUN/events.jsonl             starts, saves, lost ranks, ends, written by rank 0: mpitrain.monitor.run_files
RUN/ranks/rank-00003.jsonl   time, memory and traffic of each rank: mpitrain.monitor.run_files
RUN/logs/rank-00003.log      log of each rank: mpitrain.monitor.logs
RUN/timeline/steps-5-8/      timeline of the steps named by monitor.timeline: mpitrain.monitor.timeline
RUN/checkpoints/             checkpoints: mpitrain.checkpoint
RUN/tensorboard/, wandb/, mlflow/   trackers: mpitrain.monitor.trackers
RUN/lock                     lock of the job that works in the folder: mpitrain.storage.locks
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
    """Return the path of a rank's file in a folder that has one file per rank.

    Args:
        folder: RUN/ranks, RUN/logs, or a folder of a timeline.
        rank: Rank number.
        ending: File extension: "jsonl", "log" or "json".
    """
    return folder / f"rank-{rank:05d}.{ending}"


def rank_paths(folder: Path, ending: str) -> list[Path]:
    """Return the paths of all ranks' files in a folder, in order of rank. Raises OSError.

    Args:
        folder: RUN/ranks, RUN/logs, or a folder of a timeline.
        ending: File extension: "jsonl", "log" or "json".
    """
    return sorted(folder.glob(f"rank-[0-9]*.{ending}"))


def report_unwritable(what: str) -> AbstractContextManager[None]:
    """Return a context that turns an OSError into an InputError for a file of a run folder.

    Args:
        what: Name of the file in the message.
    """
    return reporting(f"{what} cannot be written", "make room, or choose another run.dir")
