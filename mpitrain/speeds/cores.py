"""What one core does while all cores of the node do the same: matrix products, copies, AdamW; what a device does.

The first of the ranks that share a set of cores starts one process, which forks as many as there are cores, each bound
to one of them; the ranks sleep meanwhile. All go by the clock: in the same interval all do the same. What is told of a
task is the median of its repetitions in the interval, and over the cores the median again, in processor seconds: what
else takes its turn on a core meanwhile does not count (but for several threads: the least wall-clock seconds).

    python -m mpitrain.speeds.cores 0,1,2,3 full      what a rank starts; a line of JSON comes back
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import numpy as np
import torch

from mpitrain.comm.memory import device as hardware
from mpitrain.errors import CommunicationError
from mpitrain.planner.measured import unlaunched_environment

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COPY, COPY_ALONE, UPDATE, THREADS = "copy", "copy alone", "update", "threads"
_LEAD = 0.3  # seconds from telling when to begin until then
_REST = 0.05  # seconds between two intervals
_STRETCH = 1e-3  # seconds that calls are timed together for
_LONGEST = 2.0  # intervals that one product may take, or it is left out

Effort = Literal["quick", "short", "full"]  # to try whether it works; at the start of a job; for a profile
Task = tuple[str, Callable[[], Callable[[], object]]]  # its name, and what prepares it


class _Plan:
    """How much is measured.

    interval: seconds of a task. sizes: of matrices. copied: bytes. updated: elements. threaded: size of the matrices
    that several threads multiply.
    """

    def __init__(self, effort: Effort) -> None:
        self.interval = {"quick": 0.06, "short": 0.2, "full": 0.5}[effort]
        self.sizes = {"quick": (64, 256), "short": (64, 256, 512), "full": (64, 128, 256, 512, 1024, 2048)}[effort]
        self.copied, self.updated = (4 << 20, 1 << 19) if effort == "quick" else (32 << 20, 16 << 20)
        self.threaded = {"quick": 256, "short": 512, "full": 1024}[effort]

    @property
    def seconds(self) -> float:
        """Of all tasks together, from the start on."""
        return (self.interval + _REST) * (4 + len(PRECISIONS) * len(self.sizes))


# -- on a rank


def measure(world: Communicator, effort: Effort) -> dict[str, Any]:
    """Speeds of a core of these nodes. Collective.

    Returns:
        cores: of a node. seconds: by task, the median over the cores. copied, updated, threaded: what a task did once.
        threads: how many did "threads".

    Raises:
        CommunicationError: The processes that measure have failed.
    """
    from mpitrain.comm.job.topology import sharing, siblings  # not in the processes that are started: it loads MPI

    core_of, one_of = siblings(), dict[int, int]()  # hardware thread of each core
    with all_cores():
        threads = sorted(os.sched_getaffinity(0))
    for thread in threads:
        one_of.setdefault(core_of.get(thread, thread), thread)
    allowed = world.all_gather_object(list(one_of.values()))
    beside = [rank for rank in range(world.size) if world.nodes[rank] == world.node]
    groups = [(beside[ranks[0]], sorted(cores)) for ranks, cores in sharing([allowed[rank] for rank in beside])]
    plan, told = _Plan(effort), ""
    job = None
    for leader, cores in groups:
        if leader == world.rank:
            job = subprocess.Popen(
                [sys.executable, "-m", "mpitrain.speeds.cores", ",".join(map(str, cores)), effort],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=unlaunched_environment() | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
    ready = job is not None and job.stdout is not None and job.stdout.readline() == "ready\n"
    world.barrier()
    if job is None:
        time.sleep(_LEAD + plan.seconds)
    elif ready:
        with suppress(subprocess.TimeoutExpired):
            told, _ = job.communicate(f"{time.time() + _LEAD}\n", timeout=10 * (10 + plan.seconds))
        told = told if job.poll() == 0 else ""
        job.kill()
    if job is not None and not told:
        raise CommunicationError("the processes that measure this node's cores have failed; see what they said above")
    found = [part for part in world.all_gather_object(json.loads(told) if told else {}) if part]
    names = dict.fromkeys(name for part in found for name in part)
    seconds = {name: float(np.median([s for part in found for s in part.get(name, [])])) for name in names}
    sizes = {"copied": plan.copied, "updated": plan.updated, "threaded": plan.threaded}
    return {"cores": sum(len(cores) for _, cores in groups), "seconds": seconds, "threads": len(groups[0][1]), **sizes}


@contextmanager
def all_cores() -> Iterator[None]:
    """Let this process have all cores that the system gives it, whichever its launcher has bound it to."""
    bound = os.sched_getaffinity(0)
    with suppress(OSError):  # it may not
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


# -- in the process that a rank starts, and in those that it forks


def _lead(cores: list[int], plan: _Plan) -> int:
    """Fork a process for each core, tell them when to begin, and print what they found. Returns the exit code."""
    torch.set_num_threads(1)
    _update(1)()  # what the first optimizer imports takes seconds
    workers: list[tuple[TextIO, TextIO]] = []
    for number, core in enumerate(cores):
        (hear, say), (listen, tell) = os.pipe(), os.pipe()
        if not os.fork():
            code = 1
            try:
                for file in (*(file for pair in workers for file in pair), os.fdopen(hear), os.fdopen(tell, "w")):
                    file.close()  # so that each worker's pipe ends with the one that holds its other end
                os.sched_setaffinity(0, [core])
                with os.fdopen(listen) as told, os.fdopen(say, "w") as answer:
                    _work(number == 0, cores, plan, told, answer)
                code = 0
            finally:
                os._exit(code)
        os.close(say)
        os.close(listen)
        workers.append((os.fdopen(hear), os.fdopen(tell, "w")))
    if any(answers.readline() != "ready\n" for answers, _ in workers):
        return 1
    print("ready", flush=True)
    begin = sys.stdin.readline()
    for _, orders in workers:
        orders.write(begin)
        orders.flush()
    found: dict[str, list[float]] = {}
    for answers, _ in workers:
        for name, seconds in json.loads(answers.readline() or "{}").items():
            found.setdefault(name, []).append(seconds)
    print(json.dumps(found), flush=True)
    return max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in workers)


def _work(first: bool, cores: list[int], plan: _Plan, orders: TextIO, answers: TextIO) -> None:
    """What one core does. first: whether it also does what is done alone."""
    source, dest = (np.ones(plan.copied // 8) for _ in range(2))  # memory that is touched before the clock runs
    print("ready", file=answers, flush=True)
    begin, found = float(orders.readline()), dict[str, float]()
    for turn, (name, prepare) in enumerate(_tasks(plan, partial(np.copyto, dest, source), cores)):
        time.sleep(max(0.0, begin + turn * (plan.interval + _REST) - time.time()))
        if name in (COPY_ALONE, THREADS) and not first:
            continue
        precision, _, size = name.partition(" ")
        smaller = [n for n in plan.sizes if size.isdigit() and n < int(size)]
        before = found.get(f"{precision} {smaller[-1]}", math.inf) * (int(size) / smaller[-1]) ** 3 if smaller else 0.0
        if before <= _LONGEST * plan.interval:  # it will be done in time, going by the product of the size before
            taken = _seconds(prepare(), plan.interval, time.perf_counter if name == THREADS else time.process_time)
            found[name] = min(taken) if name == THREADS else float(np.median(taken))
    print(json.dumps(found), file=answers, flush=True)


def _tasks(plan: _Plan, copy: Callable[[], object], cores: list[int]) -> Iterator[Task]:
    yield COPY_ALONE, lambda: copy
    yield COPY, lambda: copy
    yield UPDATE, partial(_update, plan.updated)
    for precision in PRECISIONS:
        for size in plan.sizes:
            yield f"{precision} {size}", partial(product, precision, size)

    def threaded() -> Callable[[], object]:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        return product("fp32", plan.threaded)

    yield THREADS, threaded


def _seconds(call: Callable[[], object], interval: float, clock: Callable[[], float]) -> list[float]:
    """Seconds of a call, by the given clock, repeated for about so many, in each of some stretches of calls."""
    call()
    taken, count, end = list[float](), 1, time.perf_counter() + interval
    while not taken or time.perf_counter() < end:
        began = clock()
        for _ in range(count):
            call()
        lasted = clock() - began
        if lasted < _STRETCH and len(taken) < 2:  # at first: how many calls are long enough to be measured
            count *= 2
            continue
        taken.append(lasted / count)
    return taken


def product(precision: str, size: int, device: torch.device | str = "cpu") -> Callable[[], object]:
    """Return what multiplies two matrices of a size."""
    a, b, c = (torch.full((size, size), 0.5, dtype=PRECISIONS[precision], device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def _update(numel: int) -> Callable[[], object]:
    parameter = torch.nn.Parameter(torch.full((numel,), 0.5))
    parameter.grad = torch.full((numel,), 0.1)
    return torch.optim.AdamW([parameter], lr=1e-4, fused=True).step


# -- accelerators: matrix products, copies in its memory, to it and between two of a node

_SIZES, _QUICK_SIZES = (256, 512, 1024, 2048, 4096, 8192), (64, 256)


def measure_device(world: Communicator, kind: str, quick: bool) -> dict[str, Any] | None:
    """Speeds of rank 0's device while all devices do the same; None where there are none. Collective.

    Ranks that share a device leave it to the first of them.

    Args:
        world: The ranks.
        kind: As for run.device.
        quick: Whether little is measured.

    Raises:
        InputError: There is no such device.
    """
    device = hardware.of_rank(kind, world.local_rank)
    if not hardware.is_accelerator(device):
        return None
    hardware.use(device)
    place = hardware.identity(device)
    if place == str(device) and hardware.count(device.type) == 1:  # it has no name, and is a rank's only one
        place = f"rank {world.rank}"
    places = world.all_gather_object([world.node, place])
    found = None
    if places.index(places[world.rank]) == world.rank:
        found = _device_speeds(device, quick)
    world.barrier()
    seen = hardware.count(device.type)
    of_node = len({tuple(place) for place in places if place[0] == world.nodes[0]})
    return world.all_gather_object(None if found is None else found | {"count": max(seen, of_node)})[0]


def _device_speeds(device: torch.device, quick: bool) -> dict[str, Any]:
    sizes, numel = (_QUICK_SIZES, 1 << 18) if quick else (_SIZES, 64 << 20)
    seconds = 0.02 if quick else 0.2
    found: dict[str, Any] = {"kind": device.type, "name": hardware.name(device)}
    found["memory"] = hardware.total_memory_bytes(device)
    source, dest = (torch.ones(numel, device=device) for _ in range(2))
    found["memory_bandwidth"] = 2 * 4 * numel / _each(device, lambda: dest.copy_(source), seconds)
    host = hardware.pinned([numel], torch.float32, device)
    found["host_bandwidth"] = 4 * numel / _each(device, lambda: dest.copy_(host, non_blocking=True), seconds)
    found["matrix"] = {
        precision: {n: 2.0 * n**3 / _each(device, product(precision, n, device), seconds) for n in sizes}
        for precision in PRECISIONS
    }
    others = [n for n in range(hardware.count(device.type)) if n != device.index]
    if others:
        there = torch.ones(numel, device=torch.device(device.type, others[0]))
        tiny, few = there[:2], source[:2]
        found["link_bandwidth"] = 4 * numel / _each(device, lambda: dest.copy_(there), seconds)
        found["link_latency"] = _each(device, lambda: few.copy_(tiny), seconds)
    return found


def _each(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call among many that the device works off one after the other, for about so many seconds."""

    def took(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        hardware.synchronize(device)
        return time.perf_counter() - began

    count = 1
    while (lasted := took(count)) < seconds / 4:
        count *= 4
    count = max(1, round(seconds * count / lasted))
    return took(count) / count


if __name__ == "__main__":
    sys.exit(_lead([int(core) for core in sys.argv[1].split(",")], _Plan(cast(Effort, sys.argv[2]))))
