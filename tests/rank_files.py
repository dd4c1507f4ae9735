"""Reader of RUN/ranks/rank-00003.jsonl, independent of the report's reader."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class RankRecord:
    """Records of a rank. starts: the header of each start of the job. lines: the steps' lines, in order, once each."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, step: int) -> None:
        """Drop the lines of later steps, which the run repeated."""
        self.lines = [line for line in self.lines if line["step"] <= step]


def read_rank_files(folder: Path) -> dict[int, RankRecord]:
    """Return the records of all ranks. A rank that a later start lacks keeps its lines from before that start."""
    records: dict[int, RankRecord] = {}
    for path in sorted((folder / "ranks").glob("rank-*.jsonl")):
        record = records[int(path.stem.split("-")[1])] = RankRecord()
        for line in path.read_text().splitlines():
            try:
                value = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            if "start" in value:
                record.starts.append(value)
                record.keep(value["step"])
            else:
                record.keep(value["step"] - value["steps"])
                record.lines.append(value)
    everything = [start for record in records.values() for start in record.starts]
    for rank, record in records.items():
        last = max(start["start"] for start in record.starts)
        for start in everything:
            if start["world_size"] <= rank and start["start"] > last:
                record.keep(start["step"])
    return records
