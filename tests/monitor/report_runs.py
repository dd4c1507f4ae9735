"""Run folders for the tests of the report, written without running a job."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGAN = 1_780_000_000.0  # unix seconds
PARAMETERS = 12_600_000
BYTES = 4 * PARAMETERS
PART_SECONDS = {"data": 0.004, "forward": 0.030, "backward": 0.055, "communication": 0.012, "optimizer": 0.009}


@dataclass(frozen=True)
class Story:
    """Parameters of a simulated run.

    Attributes:
        ranks: Number of ranks, half of them on each of two nodes.
        steps: Number of steps of the whole run.
        killed_at: Step at which the job is killed, to be resumed from the last save; 0: never.
        straggler: Rank whose backward takes 60 % longer; -1: none.
        zero: ZeRO stage, 0 (DDP) or 3.
        save_every: Steps between two saves.
        loss_unit: Unit of the loss in the start event.
    """

    ranks: int = 8
    steps: int = 400
    killed_at: int = 290
    straggler: int = 5
    zero: int = 0
    save_every: int = 100
    loss_unit: str = "nats"


def make_run(folder: Path, story: Story = Story()) -> Path:
    """Write all files of a run with these parameters."""
    dice = random.Random(story.zero * 1000 + story.ranks)
    (folder / "ranks").mkdir(parents=True)
    text = f'[run]\ndir = "{folder}"\n[train]\nsteps = {story.steps}\nbatch = 64\n[parallel]\nzero = {story.zero}\n'
    (folder / "config.toml").write_text(text)
    jobs = [(0, story.steps, BEGAN)]
    if story.killed_at:
        resumed = story.killed_at // story.save_every * story.save_every
        jobs = [(0, story.killed_at, BEGAN), (resumed, story.steps, BEGAN + 0.13 * story.killed_at + 40)]
    metrics: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    ranks: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(story.ranks)}
    for first, last, begin in jobs:
        times = _job(story, dice, first, last, begin, metrics, events)
        for rank, lines in ranks.items():
            lines += _rank_lines(story, dice, rank, first, last, begin, times)
    _write(folder / "metrics.jsonl", [metrics[step] for step in sorted(metrics)])
    _write(folder / "events.jsonl", events)
    for rank, lines in ranks.items():
        _write(folder / f"ranks/rank-{rank:05d}.jsonl", lines)
    return folder


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _job(
    story: Story,
    dice: random.Random,
    first: int,
    last: int,
    begin: float,
    metrics: dict[int, dict[str, Any]],
    events: list[dict[str, Any]],
) -> list[float]:
    """Add a job's metrics and events; returns when each of its steps ended."""
    host = "node"
    events.append({
        "time": begin, "event": "start", "step": first, "version": "0.1.0", "ranks": story.ranks, "nodes": 2,
        "hosts": [f"{host}0", f"{host}1"], "threads": 1, "device": "CPU", "mpi": "Open MPI v5.0.8", "torch": "2.9.0",
        "python": "3.11.2", "cpu": "AMD EPYC 7742", "cores": 64, "model": "gpt", "parameters": PARAMETERS,
        "loss_unit": story.loss_unit,
        "precision": "fp32", "parallel": f"data {story.ranks}, ZeRO {story.zero}", "steps": story.steps,
        "resumed_step": first or None, "config": {"train": {"steps": story.steps}},
    })  # fmt: skip
    time, times = begin + 2.5, []
    for step in range(first + 1, last + 1):
        seconds = 0.118 * (1 + 0.25 * (story.zero == 3)) * dice.lognormvariate(0, 0.05)
        saved = step % story.save_every == 0
        line = {
            "step": step, "loss": 1.6 + 3.9 * math.exp(-step / 110) + dice.gauss(0, 0.06),
            "lr": 3e-4 * min(1, step / 40) * (0.55 + 0.45 * math.cos(math.pi * step / story.steps)),
            "grad_norm": dice.lognormvariate(0.2, 0.3) * (1 + 6 * math.exp(-step / 30)), "samples": 64,
            "tokens": 64 * 256, "world_size": story.ranks,
        }  # fmt: skip
        if step % 50 == 0:
            line["held_out_loss"] = 1.7 + 3.9 * math.exp(-step / 110)
            seconds += 0.06
            measured = {
                "token_accuracy": 0.6 - 0.5 * math.exp(-step / 110),
                "perplexity": math.exp(line["held_out_loss"]),
            }
            evaluation = {"loss": line["held_out_loss"], "metrics": measured}
            events.append({"time": time + seconds, "event": "evaluate", "step": step} | evaluation)
        if saved:
            seconds += 0.2
            folder = f"step-{step:08d}"
            events.append({"time": time + seconds, "event": "save", "step": step, "folder": folder, "seconds": 0.2})
        time += seconds
        times.append(time)
        metrics[step] = line | {"step_s": seconds, "tokens_per_s": 64 * 256 / seconds, "time": time}
    if last == story.steps:
        events.append({
            "time": time + 0.2, "event": "end", "step": last, "outcome": "done", "message": f"done at step {last}",
            "seconds": time - begin, "peak_memory_bytes": 900_000_000,
        })  # fmt: skip
    return times


def _rank_lines(
    story: Story, dice: random.Random, rank: int, first: int, last: int, begin: float, times: list[float]
) -> list[dict[str, Any]]:
    """Return a rank's header and lines of one job; each line covers five steps."""
    share = story.ranks if story.zero == 3 else 1
    exact = {"parameters": BYTES // share, "gradients": BYTES // share, "states": 2 * BYTES // share}
    ring = (story.ranks - 1) / story.ranks * BYTES
    node = rank * 2 // story.ranks
    lines: list[dict[str, Any]] = [{
        "start": begin, "rank": rank, "world_size": story.ranks, "host": f"node{node}", "node": node, "device": "cpu",
        "coordinates": [rank, 0, 0], "expected_memory": exact, "step": first,
        "expected_bytes": {"data": (3 if story.zero == 3 else 2) * ring},
    }]  # fmt: skip
    for end in range(first + 5, last + 1, 5):
        seconds = {part: 5 * s * dice.lognormvariate(0, 0.04) for part, s in PART_SECONDS.items()}
        if rank == story.straggler:
            seconds["backward"] *= 1.6
        elif story.straggler >= 0:
            seconds["communication"] += 5 * 0.6 * PART_SECONDS["backward"]
        seconds |= {"evaluation": 0.06 * (end % 50 == 0), "checkpoint": 0.2 * (end % story.save_every == 0)}
        seconds["other"] = 0.01
        operations = ["reduce_scatter", "all_gather", "all_gather"] if story.zero == 3 else ["all_reduce"]
        sent: dict[str, float] = {}
        for name in operations:
            sent[name] = sent.get(name, 0.0) + 5 * ring * (1 if story.zero == 3 else 2)
        line: dict[str, Any] = {"step": end, "steps": 5, "time": times[end - first - 1], "seconds": seconds}
        line["sent"] = [[n, "data", "two_level", 25, int(b * 0.75), int(b * 0.25), 0.05] for n, b in sent.items()]
        if end % 10 == 0 or end == first + 5:
            slack = 1.01 + 0.002 * rank
            memory = {name: int(value * slack) for name, value in exact.items()}
            memory |= {"activations": int(84e6 * (1 + 0.05 * dice.random())), "buffers": 1_200_000, "other": 9_000_000}
            lines.append(line | {"memory": memory | {"host": sum(memory.values()) + 210_000_000, "device": 0}})
        else:
            lines.append(line)
    return lines
