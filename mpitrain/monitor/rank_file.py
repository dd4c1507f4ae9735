"""RUN/ranks/rank-00003.jsonl: what one rank did with its time and its memory. Every rank writes its own file.

    {"start": t, "rank": 3, "world_size": 8, "role": "worker", "host": "n0", "node": 0, "device": "cpu",
     "coordinates": [3, 0, 0], "expected_memory": {...}, "expected_bytes": {...}, "step": 100}      a start of the job
    {"step": 105, "steps": 5, "time": t, "seconds": {"data": s, ...}, "sent": [[...], ...], "memory": {...}}

A rank that takes no steps itself has the role server: readers do not compare it with others. A line of steps stands
for `steps` steps, the last of which is `step`. Times are unix seconds, all else is in seconds and bytes.
Where a start went back to an earlier step, what the file says of later ones is replaced by what follows.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.monitor.json_lines import LineWriter
from mpitrain.storage.run_folder import RANKS, rank_path, writing

SERVER = "server"  # the role of a rank that takes no steps itself
_FLUSH = 5.0  # seconds that a line is kept in memory at most, and ...
_YOUNG = 0.5  # ... of the time since the start: a job that is killed early leaves its first lines, too
_LEAST = 0.5  # seconds between two lines
_PART = 1e-3  # of the time since the start: the same for long runs, whose files would grow


def rank_name(rank: int, role: object) -> str:
    """What readers call a rank: "rank 3", or "rank 3 (server)"."""
    return f"rank {rank} ({SERVER})" if role == SERVER else f"rank {rank}"


def axis_of(label: str) -> str:
    """The axis that a communicator belongs to, by its label: "data" of "data/shard", "pipeline" of its tied ranks."""
    return label.partition("/")[0].partition(" tied ")[0]


class RankWriter(LineWriter):
    """Appends to the file of one rank.

    Args:
        folder: The run folder.
        rank: The rank's number.
        started: When the job started, in unix seconds.
        header: What is to be known of this start, as JSON can hold it.

    Raises:
        InputError: The file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, started: float, header: dict[str, Any]) -> None:
        path = rank_path(folder / RANKS, rank, "jsonl")
        self._began = self._written = self._flushed = time.monotonic()
        with writing(f"rank file {path}"):
            path.parent.mkdir(exist_ok=True)
        super().__init__(path, "rank file")
        self._lines: list[dict[str, Any]] = [{"start": started, "rank": rank} | header]
        self.flush()

    def due(self) -> bool:
        """Whether a step that ends now is to be followed by a line."""
        now = time.monotonic()
        return self._written == self._began or now - self._written >= max(_LEAST, _PART * (now - self._began))

    def write(self, step: int, steps: int, **told: Any) -> None:
        """Append a line.

        Args:
            step: The last step that it stands for.
            steps: How many it stands for.
            told: What else it says.
        """
        self._lines.append({"step": step, "steps": steps, "time": time.time()} | told)
        first, self._written = self._written == self._began, time.monotonic()
        if first or self._written - self._flushed >= min(_FLUSH, _YOUNG * (self._written - self._began)):
            self.flush()

    def flush(self) -> None:
        """Write what is kept in memory. Raises InputError where that fails."""
        self._flushed = time.monotonic()
        lines, self._lines = self._lines, []
        self.append(*lines)

    def close(self) -> None:
        """Write what is kept in memory, and close the file. Nothing is raised: the run is over."""
        with suppress(InputError):
            self.flush()
        super().close()
