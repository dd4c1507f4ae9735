"""Speed of one core while all cores of the node do the same work (matrix products, copies, AdamW), and of a device.

The first rank of those that share a set of cores starts one process, which forks a worker for each core and binds it to
the core; the ranks sleep meanwhile. The workers follow the clock, so that all do the same task in the same interval.
The result of a task is the median over its repetitions in the interval, and then the median over the cores, in
processor seconds, which exclude other work on a core. For the task of several threads it is the least wall-clock time.

    python -m mpitrain.speeds.cores 0,1,2,3 full      command that a rank starts; it prints a line of JSON
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
_LEAD = 0.3  # seconds between announcing the begin and the begin
_REST = 0.05  # seconds between two intervals
_STRETCH = 1e-3  # least seconds of calls that are timed together
_LONGEST = 2.0  # a product that would take more intervals is left out

Effort = Literal["quick", "short", "full"]  # for tests; at the start of a job; for a profile
Task = tuple[str, Callable[[], Callable[[], object]]]  # name of a task, and a function that prepares it


class _Plan:
    """Amount of work to measure.

    interval: seconds of a task. sizes: sizes of matrices. copied: bytes. updated: elements. threaded: size of the
    matrices that several threads multiply.
    """

    def __init__(self, effort: Effort) -> None:
        self.interval = {"quick": 0.06, "short": 0.2, "full": 0.5}[effort]
        self.sizes = {"quick": (64, 256), "short": (64, 256, 512), "full": (64, 128, 256, 512, 1024, 2048)}[effort]
        self.copied, self.updated = (4 << 20, 1 << 19) if effort == "quick" else (32 << 20, 16 << 20)
        self.threaded = {"quick": 256, "short": 512, "full": 1024}[effort]

    @property
    def seconds(self) -> float:
        """Seconds of all tasks together, after the begin."""
        return (self.interval + _REST) * (4 + len(PRECISIONS) * len(self.sizes))


# -- on a rank


def measure(world: Communicator, effort: Effort) -> dict[str, Any]:
    """Return the speeds of a core of these nodes. Collective.

    Args:
        world: All ranks.
        effort: Amount of work to measure.

    Returns:
        Dictionary with "cores", the number of cores of a node; "seconds", by task, the median over the cores; "copied",
        "updated" and "threaded", the amount of work of one repetition; "threads", the threads of the task of that name.

    Raises:
        CommunicationError: The processes that measure have failed.
    """
    from mpitrain.comm.job.topology import (
        groups_sharing_cores,
        siblings,
    )  # imported here because it loads MPI, which the started processes must not

    core_of, one_of = siblings(), dict[int, int]()  # one hardware thread of each core
    with all_cores():
        threads = sorted(os.sched_getaffinity(0))
    for thread in threads:
        one_of.setdefault(core_of.get(thread, thread), thread)
    allowed = world.all_gather_object(list(one_of.values()))
    beside = [rank for rank in range(world.size) if world.nodes[rank] == world.node]
    shares = groups_sharing_cores([allowed[rank] for rank in beside])
    groups = [(beside[ranks[0]], sorted(cores)) for ranks, cores in shares]
    plan, output = _Plan(effort), ""
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
            output, _ = job.communicate(f"{time.time() + _LEAD}\n", timeout=10 * (10 + plan.seconds))
        output = output if job.poll() == 0 else ""
        job.kill()
    if job is not None and not output:
        raise CommunicationError("the processes that measure this node's cores have failed; see their output above")
    parts = [part for part in world.all_gather_object(json.loads(output) if output else {}) if part]
    names = dict.fromkeys(name for part in parts for name in part)
    seconds = {name: float(np.median([s for part in parts for s in part.get(name, [])])) for name in names}
    sizes = {"copied": plan.copied, "updated": plan.updated, "threaded": plan.threaded}
    return {"cores": sum(len(cores) for _, cores in groups), "seconds": seconds, "threads": len(groups[0][1]), **sizes}


@contextmanager
def all_cores() -> Iterator[None]:
    """Give this process all cores that the system allows, regardless of its launcher's binding, inside the context."""
    bound = os.sched_getaffinity(0)
    with suppress(OSError):  # not permitted
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


# -- in the process that a rank starts, and in those that it forks


def _run_lead(cores: list[int], plan: _Plan) -> int:
    """Fork a process for each core, send the time to begin, and print the results. Returns the exit code."""
    torch.set_num_threads(1)
    _make_update(1)()  # the imports of the first optimizer take seconds
    workers: list[tuple[TextIO, TextIO]] = []
    for number, core in enumerate(cores):
        (hear, say), (listen, tell) = os.pipe(), os.pipe()
        if not os.fork():
            code = 1
            try:
                for file in (*(file for pair in workers for file in pair), os.fdopen(hear), os.fdopen(tell, "w")):
                    file.close()  # so that a worker's pipe closes when the process at its other end ends
                os.sched_setaffinity(0, [core])
                with os.fdopen(listen) as inbox, os.fdopen(say, "w") as answer:
                    _run_worker(number == 0, cores, plan, inbox, answer)
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
    seconds_of: dict[str, list[float]] = {}
    for answers, _ in workers:
        for name, seconds in json.loads(answers.readline() or "{}").items():
            seconds_of.setdefault(name, []).append(seconds)
    print(json.dumps(seconds_of), flush=True)
    return max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in workers)


def _run_worker(first: bool, cores: list[int], plan: _Plan, orders: TextIO, answers: TextIO) -> None:
    """Run the tasks on one core. first: also run the tasks that only one core runs."""
    source, dest = (np.ones(plan.copied // 8) for _ in range(2))  # touch the memory before timing
    print("ready", file=answers, flush=True)
    begin, seconds_of = float(orders.readline()), dict[str, float]()
    for turn, (name, prepare) in enumerate(_tasks(plan, partial(np.copyto, dest, source), cores)):
        time.sleep(max(0.0, begin + turn * (plan.interval + _REST) - time.time()))
        if name in (COPY_ALONE, THREADS) and not first:
            continue
        precision, _, size = name.partition(" ")
        smaller = [n for n in plan.sizes if size.isdigit() and n < int(size)]
        before = (
            seconds_of.get(f"{precision} {smaller[-1]}", math.inf) * (int(size) / smaller[-1]) ** 3 if smaller else 0.0
        )
        if before <= _LONGEST * plan.interval:  # fast enough, as estimated from the product of the previous size
            taken = _seconds(prepare(), plan.interval, time.perf_counter if name == THREADS else time.process_time)
            seconds_of[name] = min(taken) if name == THREADS else float(np.median(taken))
    print(json.dumps(seconds_of), file=answers, flush=True)


def _tasks(plan: _Plan, copy: Callable[[], object], cores: list[int]) -> Iterator[Task]:
    yield COPY_ALONE, lambda: copy
    yield COPY, lambda: copy
    yield UPDATE, partial(_make_update, plan.updated)
    for precision in PRECISIONS:
        for size in plan.sizes:
            yield f"{precision} {size}", partial(make_product, precision, size)

    def threaded() -> Callable[[], object]:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        return make_product("fp32", plan.threaded)

    yield THREADS, threaded


def _seconds(call: Callable[[], object], interval: float, clock: Callable[[], float]) -> list[float]:
    """Return seconds per call by the given clock, one value per group of calls, for about `interval` seconds."""
    call()
    taken, count, end = list[float](), 1, time.perf_counter() + interval
    while not taken or time.perf_counter() < end:
        began = clock()
        for _ in range(count):
            call()
        lasted = clock() - began
        if lasted < _STRETCH and len(taken) < 2:  # first find a number of calls long enough to measure
            count *= 2
            continue
        taken.append(lasted / count)
    return taken


def make_product(precision: str, size: int, device: torch.device | str = "cpu") -> Callable[[], object]:
    """Return a function that multiplies two square matrices.

    Args:
        precision: Key of `PRECISIONS`.
        size: Number of rows and columns.
        device: Device of the matrices.
    """
    a, b, c = (torch.full((size, size), 0.5, dtype=PRECISIONS[precision], device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def _make_update(numel: int) -> Callable[[], object]:
    parameter = torch.nn.Parameter(torch.full((numel,), 0.5))
    parameter.grad = torch.full((numel,), 0.1)
    return torch.optim.AdamW([parameter], lr=1e-4, fused=True).step


# -- accelerators: matrix products, and copies in their memory, from the host and between two of a node

_SIZES, _QUICK_SIZES = (256, 512, 1024, 2048, 4096, 8192), (64, 256)


def measure_device(world: Communicator, kind: str, quick: bool) -> dict[str, Any] | None:
    """Return the speeds of rank 0's device while all devices do the same work; None without a device. Collective.

    If ranks share a device, the first of them measures it.

    Args:
        world: All ranks.
        kind: Kind of device, as in run.device.
        quick: If true, measure only a little.

    Raises:
        InputError: There is no such device.
    """
    device = hardware.of_rank(kind, world.local_rank)
    if not hardware.is_accelerator(device):
        return None
    hardware.use(device)
    place = hardware.identity(device)
    if (
        place == str(device) and hardware.count(device.type) == 1
    ):  # the device has no unique name, and this rank sees no other
        place = f"rank {world.rank}"
    places = world.all_gather_object([world.node, place])
    speeds = None
    if places.index(places[world.rank]) == world.rank:
        speeds = _device_speeds(device, quick)
    world.barrier()
    seen = hardware.count(device.type)
    of_node = len({tuple(place) for place in places if place[0] == world.nodes[0]})
    return world.all_gather_object(None if speeds is None else speeds | {"count": max(seen, of_node)})[0]


def _device_speeds(device: torch.device, quick: bool) -> dict[str, Any]:
    sizes, numel = (_QUICK_SIZES, 1 << 18) if quick else (_SIZES, 64 << 20)
    seconds = 0.02 if quick else 0.2
    speeds: dict[str, Any] = {"kind": device.type, "name": hardware.name(device)}
    speeds["memory"] = hardware.total_memory_bytes(device)
    source, dest = (torch.ones(numel, device=device) for _ in range(2))
    speeds["memory_bandwidth"] = 2 * 4 * numel / _seconds_each(device, lambda: dest.copy_(source), seconds)
    host = hardware.empty_pinned([numel], torch.float32, device)
    speeds["host_bandwidth"] = 4 * numel / _seconds_each(device, lambda: dest.copy_(host, non_blocking=True), seconds)
    speeds["matrix"] = {
        precision: {n: 2.0 * n**3 / _seconds_each(device, make_product(precision, n, device), seconds) for n in sizes}
        for precision in PRECISIONS
    }
    others = [n for n in range(hardware.count(device.type)) if n != device.index]
    if others:
        there = torch.ones(numel, device=torch.device(device.type, others[0]))
        tiny, few = there[:2], source[:2]
        speeds["link_bandwidth"] = 4 * numel / _seconds_each(device, lambda: dest.copy_(there), seconds)
        speeds["link_latency"] = _seconds_each(device, lambda: few.copy_(tiny), seconds)
    return speeds


def _seconds_each(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Return seconds per call among many that the device executes one after the other, for about `seconds` in total."""

    def seconds_of(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        hardware.synchronize(device)
        return time.perf_counter() - began

    count = 1
    while (lasted := seconds_of(count)) < seconds / 4:
        count *= 4
    count = max(1, round(seconds * count / lasted))
    return seconds_of(count) / count


if __name__ == "__main__":
    sys.exit(_run_lead([int(core) for core in sys.argv[1].split(",")], _Plan(cast(Effort, sys.argv[2]))))
