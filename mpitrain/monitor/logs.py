"""One log file per rank: RUN/logs/rank-00003.log.

    2026-01-31T23:59:59.123 rank 3 INFO checkpoint of step 100 written

Log files are opened for appending, so a resumed run continues them, and each line is written at once. Python warnings
of rank 0 stay on stderr, where the user sees them; those of the other ranks go to their log files.
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
    """Return the path of a rank's log file.

    Args:
        run_dir: Path of the run folder.
        rank: Number of the rank.
    """
    return rank_path(Path(run_dir) / LOGS, rank, "log")


class _LogFile(logging.FileHandler):
    """File handler that flushes after each record and silently drops a record that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def buffer_rank_log(rank: int) -> logging.Logger:
    """Return the logger `mpitrain`, which buffers its records until `open_rank_log` opens the log file."""
    close_rank_log()
    return _log_to(MemoryHandler(sys.maxsize, flushLevel=sys.maxsize, flushOnClose=False), rank, logging.INFO)


def open_rank_log(run_dir: str | Path, rank: int, level: int = logging.INFO) -> logging.Logger:
    """Return the logger `mpitrain`, writing to this rank's file; `logging.getLogger("mpitrain")` is the same logger.

    A second call closes the earlier file and continues in the new one.

    Args:
        run_dir: Path of the run folder.
        rank: Number of this rank.
        level: Lowest level of records that are written.

    Raises:
        InputError: The file cannot be opened.
    """
    path = log_path(run_dir, rank)
    with reporting(f"log {path} cannot be written", "free some space, or choose a run.dir that you may write to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:  # reports a full disk once, here, rather than at each record
            size = file.tell()
            file.write(b"\n")
            file.truncate(size)
        handler = _LogFile(path, mode="a", encoding="utf-8")
    form = f"%(asctime)s.%(msecs)03d rank {rank} %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(form, "%Y-%m-%dT%H:%M:%S"))
    for earlier_handler in logging.getLogger(NAME).handlers:
        if isinstance(earlier_handler, MemoryHandler):
            earlier_handler.setTarget(handler)
            earlier_handler.flush()
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
    """Close the log file, or drop the records buffered for it; do nothing if there is neither."""
    logger = logging.getLogger(NAME)
    for handler in [h for h in logger.handlers if isinstance(h, (logging.FileHandler, MemoryHandler))]:
        logger.removeHandler(handler)
        logging.getLogger(WARNINGS).removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)
