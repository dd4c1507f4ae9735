"""Explanation of a rank that ran out of memory: what filled it, the limit, and the settings that would help most.

A failed allocation is explained by the rank itself. A rank that the kernel killed, because the machine or the cgroup of
a batch job had no memory left, cannot: the events of its run have the kernel's counters at the start, and its file in
RUN/ranks the bytes by category. Whoever is left compares: the next start, a job that continues without the rank, or

    python -m mpitrain.doctor --killed RUN        as in the scripts of jobs/, on a node of the job
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from errno import ENOMEM, ENOSPC
from pathlib import Path
from typing import Any

import torch

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import EXIT_DONE, InputError
from mpitrain.monitor.json_lines import RankStart, rank_line, read_lines
from mpitrain.monitor.memory import node_memory_bytes, out_of_memory_kills
from mpitrain.monitor.run_files import read_events
from mpitrain.parallel.costs import ModelProfile
from mpitrain.parallel.layouts import SECTION_OF, ParallelLayout, layout_of
from mpitrain.parallel.rules import rules_of
from mpitrain.planner.candidates import microbatches
from mpitrain.planner.machine import Device, MachineProfile
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.subject import description_of
from mpitrain.storage.disk import ENLARGE, SHARED_MEMORY
from mpitrain.storage.run_folder import RANKS, rank_paths
from mpitrain.storage.text import bytes_text

ADVICE = (
    "use a smaller train.microbatch, set train.recompute, parallel.zero or parallel.offload host, or use more ranks"
)
_FAILED = re.compile(r"can't allocate memory|bad_alloc|unable to mmap|annot allocate memory|allocate shared memory")
_REQUESTED = re.compile(r"(?:tried to|unable to) (?:allocate|mmap) ([\d.]+) (\w+)", re.IGNORECASE)
_MARGIN = 0.9  # share of a rank's memory that a proposed setting may fill by formula, whose error is up to 10 %
_SETTINGS = 3  # number of settings in an explanation


def failed_allocation(error: BaseException) -> str:
    """Return a text with the bytes that could not be allocated; empty if the error has another cause.

    Args:
        error: Error of torch's allocators, of C++ (`std::bad_alloc`), NumPy, Python or the operating system.
    """
    text = str(error)
    in_shared_memory = "allocate shared memory" in text
    if isinstance(error, OSError):
        in_shared_memory = str(error.filename).startswith(SHARED_MEMORY)
        known = error.errno == ENOMEM or (error.errno == ENOSPC and in_shared_memory)
    else:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(_FAILED.search(text))
    if not known:
        return ""
    if in_shared_memory and os.strerror(ENOSPC) in text:
        return f"an allocation failed because {SHARED_MEMORY} is full ({ENLARGE})"
    match = _REQUESTED.search(text)
    if match is None:
        return "an allocation failed"
    size = bytes_text(int(match[1])) if match[2] == "bytes" else f"{match[1]} {match[2]}"
    return f"the allocation of {size} failed"


def categories_text(memory: Mapping[str, float]) -> str:
    """Return bytes by category as text, without the totals of host and device and without empty categories."""
    shown = [f"{name} {bytes_text(n)}" for name, n in memory.items() if n >= 1024 and name not in ("host", "device")]
    return ", ".join(shown)


class MemoryAdvice:
    """Bytes of a rank of a configuration by the planner's formulas, and settings that would make them fewer.

    Args:
        config: The configuration.
        description: Description of its data.
        nodes: Number of nodes.
        ranks: Number of ranks.
        limit: Bytes of a node's memory, or of a device's.
        device: Type of the devices on which the ranks compute.
        devices: Number of devices of a node, if the ranks compute on devices.

    Attributes:
        memory: Bytes of the rank that needs most, by category.

    Raises:
        InputError: The planner does not know such configurations.
    """

    def __init__(
        self,
        config: Config,
        description: Description,
        nodes: int,
        ranks: int,
        limit: int,
        device: str = "cpu",
        devices: int = 1,
    ) -> None:
        if ranks % nodes:
            nodes = 1
        speeds: dict[str, Any] = dict.fromkeys(("memory_rate", "host_rate", "link_rate", "link_latency"), 1.0)
        on = None if device == "cpu" else Device(device, devices, limit, {}, **speeds)
        machine = MachineProfile("here", "assumed", 1, limit, device=on)
        self._model: ModelProfile = profile_of(config, description, machine, measure=False)
        self._predictor = Predictor(self._model, machine, nodes, ranks // nodes, bucket_mb=config.comm.bucket_mb)
        self._rules = rules_of(config)
        self._layout = layout_of(config, ranks, self._model.blocks(1))
        self._divisible = config.parallel.data == "auto"
        self.memory = self._predictor.memory(self._layout)

    def text(self) -> str:
        """Return the settings that would help most, and the bytes that each of them would save on a rank.

        A setting with several values has the mildest one that fits. Settings that fit come first, then those that save
        most.
        """
        needed = sum(self.memory.values())
        room, savings = min(needed, self._predictor.room()) * _MARGIN, list[tuple[bool, float, dict[str, Any]]]()
        for changes in self._changes():
            tried = [(change, needed - self._bytes_with(change)) for change in changes if self._is_allowed(change)]
            fits = [each for each in tried if needed - each[1] <= room]
            best = fits[:1] or sorted(tried, key=lambda each: each[1])[-1:]
            savings += [(bool(fits), saved, change) for change, saved in best if saved >= 1024]
        savings.sort(key=lambda each: each[:2], reverse=True)
        shown = [f"{_setting(change)} would save {bytes_text(saved)}" for _, saved, change in savings[:_SETTINGS]]
        return f"{', '.join(shown)} per rank, by formula" if shown else ADVICE

    def _changes(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the further values of each setting, the mildest one first, as changes of the layout."""
        layout = self._layout
        if not layout.recompute and (self._model.has_units or layout.pipeline > 1):
            yield [{"recompute": True}]
        sizes = microbatches(self._model.batch, layout.readers)
        yield [{"microbatch": size} for size in reversed(sizes) if size < layout.microbatch]
        if layout.replicas > 1:
            yield [{"zero": zero} for zero in range(layout.zero + 1, 4)]
        if self._predictor.at.on_device and not layout.offload:
            yield [{"offload": "host"}]
        for axis in ("pipeline", "tensor") if self._divisible else ():
            size, data = getattr(layout, axis), layout.data
            factors = [n for n in range(2, data + 1) if data % n == 0]
            yield [{axis: size * n, "data": data // n, "cut": ()} for n in factors]

    def _is_allowed(self, change: dict[str, Any]) -> bool:
        with suppress(InputError):
            layout = self._with(change)
            allowed = self._rules.allow(layout, self._model, self._predictor.at) and self._model.takes(layout.divided)
            return allowed and self._bytes_with(change) > 0
        return False

    def _with(self, change: dict[str, Any]) -> ParallelLayout:
        layout = replace(self._layout, **change)
        return layout if layout.replicas > 1 else replace(layout, zero=0)

    def _bytes_with(self, change: dict[str, Any]) -> float:
        return sum(self._predictor.memory(self._with(change)).values())


def _setting(change: Mapping[str, Any]) -> str:
    key, value = next(iter(change.items()))
    return f"{SECTION_OF[key]}.{key} {str(value).lower()}"


def explain_killed(folder: Path, kills: Mapping[str, Mapping[str, int]], lost: Sequence[int] = ()) -> str:
    """Return why the last job of a run was killed, in one line; empty if it was not, or not for want of memory.

    Args:
        folder: The run folder.
        kills: Counters of the kernel now (`out_of_memory_kills`), by host.
        lost: Ranks that died, if the job continues without them; numbers in its first world.
    """
    events = read_events(folder)
    begins = [n for n, event in enumerate(events) if event["event"] == "start"]
    if not begins or any(event["event"] == "end" for event in events[begins[-1] :]):
        return ""
    start, before = events[begins[-1]], dict[str, dict[str, int]]()
    for event in events[begins[-1] :]:
        before |= event.get("oom_kills") or {}
    risen = {
        host: [place for place, count in now.items() if count > before.get(host, {}).get(place, count)]
        for host, now in kills.items()
    }
    if not any(risen.values()):
        return ""
    host = max(risen, key=lambda host: len(risen[host]))
    where = "this job's cgroup" if any(place != "node" for place in risen[host]) else "that host during this run"
    limit, (rank, memory) = node_memory_bytes(), _largest_rank(folder, host, start["time"], lost)
    advice = ADVICE
    with suppress(Exception):  # the data may be gone, or the model's code may raise anything without values
        if start["device"] == "CPU":
            config = Config.from_dict(start["config"])
            advised = MemoryAdvice(config, description_of(config), start["nodes"], start["ranks"], limit)
            advice, memory = advised.text(), memory or dict(advised.memory)
    content = "in its first step, which by formula needs"
    if rank is not None:
        content = f"most likely rank {rank}, which had"
    elif lost:
        content = f"most likely rank {' or '.join(map(str, lost))}, which by formula needs"
    if memory:
        where += f", {content} {categories_text(memory)}"
    return (
        f"host {host} is out of memory: the kernel killed a process of {where}; "
        f"the limit is {bytes_text(limit)}; {advice}"
    )


def _largest_rank(folder: Path, host: str, since: float, lost: Sequence[int]) -> tuple[int | None, dict[str, float]]:
    """Return the rank of a host that had the most host memory when it last measured it, and its bytes by category.

    Args:
        folder: The run folder.
        host: Name of the host.
        since: Start of the job in unix seconds.
        lost: Ranks that come into question; empty for all.
    """
    rank, largest = None, dict[str, float]()
    for path in rank_paths(folder / RANKS, "jsonl"):
        memory: dict[str, float] = {}
        header: RankStart | None = None
        for line in read_lines(path, "rank file", rank_line, lambda line: isinstance(line, RankStart)):
            if isinstance(line, RankStart):
                if lost and header is not None and header.start >= since - 5:
                    break  # of a smaller world, whose ranks have other numbers
                header, memory = line, {}
            else:
                memory = line.memory or memory
        if header is None or header.host != host or header.start < since - 5:
            continue  # of another start
        if lost and header.rank not in lost:
            continue
        if memory.get("host", 0) > largest.get("host", 0):
            rank, largest = header.rank, memory
    return rank, largest


def main(run: Path) -> int:
    """Print why the last job of a run was killed, if memory was full, and return the exit code.

    Args:
        run: The run folder.
    """
    if line := explain_killed(run, {socket.gethostname(): out_of_memory_kills()}):
        print(f"mpitrain: {line}", file=sys.stderr)
    return EXIT_DONE
