"""Comparison of the ranks of a node with one rank that has all their threads, measured in the first steps of a run.

With few samples per rank, reducing the gradients of a large model can take longer than the ranks save by computing side
by side. One rank with more threads is then faster. The comparison says so; it never changes the run or its results:

    steps 1 to 8      the ranks' own seconds per step, which the clock of the engine measures anyway; the fastest counts
    after step 8      rank 0 computes its node's share of the batch with the threads of all ranks of its node, forward
                      and backward, several times; the other ranks sleep; the median counts

So a machine whose speed varies does not lead to a hint. The one rank is assumed to need as long for the update as the
ranks, and between several nodes for communication. It needs no longer, so the comparison does not favour it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpitrain.comm.memory.device import is_accelerator
from mpitrain.monitor.parts import StepClock
from mpitrain.speeds.cores import all_cores
from mpitrain.storage.text import counted
from mpitrain.trainer.data import with_microbatch
from mpitrain.trainer.engine import Engine, Microbatch
from mpitrain.trainer.folder import AGAIN
from mpitrain.trainer.run import Callback, Run, Step
from mpitrain.trainer.settings import run_on_root_alone

_STEPS = 8  # steps of the full batch before the measurement
_SHORT = 60.0  # a run with fewer seconds left is not measured
_SECONDS = 2.0  # longest measurement
_PASSES = 8  # largest number of repetitions
_MARGIN = 1.05  # the ranks must take this many times as long before the user hears of it


@dataclass(frozen=True)
class Comparison:
    """Measured seconds of a step with the ranks as they are, and with one rank on each node.

    Attributes:
        nodes: Number of nodes.
        ranks: Ranks of each node.
        threads: Threads of each rank.
        seconds: Seconds of a step.
        all_threads: Threads of the one rank.
        one_rank: Seconds of a step with one rank on each node.
    """

    nodes: int
    ranks: int
    threads: int
    seconds: float
    all_threads: int
    one_rank: float

    def hint(self, environment: Mapping[str, str]) -> str:
        """Return a sentence that recommends one rank per node; empty if that is not clearly faster.

        Args:
            environment: Environment variables, which say how the job was started.
        """
        if self.seconds <= _MARGIN * self.one_rank:
            return ""
        where, threads = "" if self.nodes == 1 else " on each node", self.all_threads
        if "SLURM_JOB_ID" in environment:
            start = f"give each node 1 rank with --cpus-per-task={threads}"
        elif "local.sh" in environment.get(AGAIN, ""):
            start = f"start with N=1 OMP_NUM_THREADS={threads}"
        else:
            placement = "" if self.nodes == 1 else "--map-by ppr:1:node "
            start = f"start with OMP_NUM_THREADS={threads} mpirun -n {self.nodes} {placement}--bind-to none"
        return (
            f"hint: 1 rank with {counted(threads, 'thread')}{where} takes {1e3 * self.one_rank:,.1f} ms per step, and "
            f"{counted(self.ranks, 'rank')} with {counted(self.threads, 'thread')} each take "
            f"{1e3 * self.seconds:,.1f} ms (measured with this batch); to use 1 rank, {start}"
        )


class CompareThreads(Callback):
    """Measures the comparison after the first steps of a run, and shows its hint.

    A run is not measured if it is short or resumed, computes on accelerators or in several groups, divides or shards
    the model beyond the optimizer's states, or may not change its number of ranks or threads.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []  # of each step the seconds, and those that one rank needs as well
        self._totals: dict[str, float] = {}  # of the engine's clock at the end of the last step
        self._waits = False  # true until the measurement, or until it is known that there is none

    def on_fit_start(self, trainer: Run) -> None:
        self._steps, self._waits = [], trainer.start is None and trainer.step == 0 and _suits(trainer)

    def on_update(self, trainer: Run, step: Step) -> None:
        if not self._waits:
            return
        before, self._totals = self._totals, trainer.engine.clock.totals()
        if not before or trainer.batch_sizes.size(step.number - 1) != trainer.config.train.batch:
            return
        took = {name: seconds - before[name] for name, seconds in self._totals.items()}
        common = took["optimizer"] + (took["communication"] if trainer.world.num_nodes > 1 else 0.0)
        self._steps.append((took["forward"] + took["backward"] + took["communication"] + took["optimizer"], common))

    def on_step_done(self, trainer: Run, step: Step) -> None:
        if not self._waits or len(self._steps) < _STEPS:
            return
        self._waits, world = False, trainer.world
        slowest = torch.tensor(min(self._steps), dtype=torch.float64)
        world.all_reduce(slowest, "max")
        seconds, common = slowest.tolist()
        if seconds * (trainer.config.train.steps - trainer.step) < _SHORT or 2.0 * seconds > _SECONDS:
            return
        ranks, threads = world.size // world.num_nodes, torch.get_num_threads()
        cores = world.process.cores
        more = max(1, int(ranks * min(threads, cores.cores / cores.ranks)))
        passes = run_on_root_alone(world, lambda: _time_node_batch(trainer, step, more))
        trainer.engine.clock.skip()
        comparison = Comparison(world.num_nodes, ranks, threads, seconds, more, passes + common)
        if world.rank == 0 and (hint := comparison.hint(os.environ)):
            trainer.say(hint)


def _suits(trainer: Run) -> bool:
    """Return whether a run could be started with fewer ranks and more threads, and a rank can compute alone."""
    config, world, engine = trainer.config, trainer.world, trainer.engine
    return (
        config.parallel.mode == "sync"
        and config.parallel.ranks_per_data == 1
        and config.elastic.mode == "off"
        and not (config.run.reproducible or config.model.compile or config.parallel.offload)
        and not (is_accelerator(trainer.device) or engine.synchronous)
        and not (engine.sharding.parameters.gathers or engine.sharding.gradients.reduces_each_pass)
        and world.size > world.num_nodes
        and len({world.nodes.count(node) for node in world.nodes}) == 1
    )


def _time_node_batch(trainer: Run, step: Step, threads: int) -> float:
    """Return the seconds that this rank needs for forward and backward of a whole node's share of a batch.

    The result is infinite if this rank has no samples, or the model fails with the larger batch.

    Args:
        trainer: Trainer of the run.
        step: Step whose samples are used, repeated as often as necessary.
        threads: Threads to compute with.
    """
    nodes = trainer.world.num_nodes
    samples, here = -(-trainer.samples // nodes), len(step.batch.x)
    if not here:
        return math.inf
    x, y = (torch.cat([part] * -(-samples // here))[:samples] for part in (step.batch.x, step.batch.y))
    size = with_microbatch(trainer.config, nodes).train.microbatch
    before = torch.get_num_threads()
    with all_cores():
        torch.set_num_threads(threads)
        try:
            batch = list(zip(x.split(size or samples), y.split(size or samples), strict=True))
            return time_passes(trainer.engine, batch, _SECONDS)
        except Exception as error:  # the user's model may raise anything
            trainer.folder.log.info("one rank could not compute the batch of its node: %s", error)
            return math.inf
        finally:
            torch.set_num_threads(before)


def time_passes(engine: Engine, batch: Sequence[Microbatch], limit: float) -> float:
    """Return the seconds of the forward and backward passes of some microbatches, without a trace in the engine.

    Buffers, gradients, random numbers and the engine's clock are afterwards as if there had been no pass.
    Call it between two steps.

    Args:
        engine: Engine whose gradients can be accumulated without communication.
        batch: Microbatches (x, y).
        limit: Seconds after which no further repetition starts.

    Returns:
        The median seconds of the repetitions.
    """
    owned = [
        (m._buffers, name, b, b.clone())
        for m in engine.module.modules()
        for name, b in m._buffers.items()
        if b is not None
    ]
    clock, metering, taken, end = engine.clock, engine.metering, list[float](), time.perf_counter() + limit
    engine.clock, engine.metering = StepClock(), False
    try:
        with torch.random.fork_rng(devices=[]):
            while not taken or (len(taken) < _PASSES and time.perf_counter() + taken[-1] < end):
                engine.sharding.gradients.zero()
                began = time.perf_counter()
                for x, y in batch:
                    engine.backward(engine.forward(x, y), reduce=False)
                taken.append(time.perf_counter() - began)
    finally:
        engine.clock, engine.metering = clock, metering
        engine.sharding.gradients.zero()
        engine.sharding.reducer.forget_accumulated()
        for buffers, name, buffer, value in owned:
            buffers[name] = buffer.copy_(value)
    return statistics.median(taken)
