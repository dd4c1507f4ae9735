"""One log file per rank: RUN/logs/rank-00003.log.

    2026-01-31T23:59:59.123 rank 3 INFO checkpoint of step 100 written

Files are appended to, so a resumed run continues its logs, and each line reaches the file at once. Rank 0's Python
warnings stay on stderr for the person who looks; those of other ranks go to their log.
"""

from __future__ import annotations

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

from mpitrain.storage.disk import reporting
from mpitrain.storage.run_folder import LOGS, rank_path

NAME = "mpitrain"
WARNINGS = "py.warnings"  # where logging.captureWarnings sends them


def log_path(run_dir: str | Path, rank: int) -> Path:
    """The log file of a rank."""
    return rank_path(Path(run_dir) / LOGS, rank, "log")


class _LogFile(logging.FileHandler):
    """Flushes after each record. A record that cannot be written is missing, and nothing is said about it."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def keep_rank_log(rank: int) -> logging.Logger:
    """The logger `mpitrain`, keeping what it is given for the file that `open_rank_log` opens later."""
    close_rank_log()
    return _log_to(MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, flushOnClose=False), rank, logging.INFO)


def open_rank_log(run_dir: str | Path, rank: int, level: int = logging.INFO) -> logging.Logger:
    """The logger `mpitrain`, writing to this rank's file. `logging.getLogger("mpitrain")` is the same one.

    Opened again, it leaves the earlier file.

    Args:
        run_dir: The run folder.
        rank: This rank.
        level: What is below it is not written.

    Raises:
        InputError: The file cannot be opened.
    """
    path = log_path(run_dir, rank)
    with reporting(f"log {path} cannot be written", "make room, or choose a run.dir you may write to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:  # a full disk is told of here, and not by every record
            size = file.tell()
            file.write(b"\n")
            file.truncate(size)
        handler = _LogFile(path, mode="a", encoding="utf-8")
    form = f"%(asctime)s.%(msecs)03d rank {rank} %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(form, "%Y-%m-%dT%H:%M:%S"))
    for kept in logging.getLogger(NAME).handlers:
        if isinstance(kept, MemoryHandler):
            kept.setTarget(handler)
            kept.flush()
    close_rank_log()
    return _log_to(handler, rank, level)


def _log_to(handler: logging.Handler, rank: int, level: int) -> logging.Logger:
    logger = logging.getLogger(NAME)
    logger.setLevel(level)
    logger.propagate = False  # the root logger would write to stderr, on every rank
    logger.addHandler(handler)
    if rank:
        logging.captureWarnings(True)
        logging.getLogger(WARNINGS).addHandler(handler)
    return logger


def close_rank_log() -> None:
    """Close the file, or forget what is kept for one; without either there is nothing to be done."""
    logger = logging.getLogger(NAME)
    for handler in [h for h in logger.handlers if isinstance(h, (logging.FileHandler, MemoryHandler))]:
        logger.removeHandler(handler)
        logging.getLogger(WARNINGS).removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)
