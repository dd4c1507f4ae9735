"""Measurement of training steps for the benchmarks `plan` and `strategies`: seconds, and bytes of each rank.

Training runs take turns in the same processes, for several rounds. A step is timed together with the loading of its
batch. A first round, without timing, measures the bytes that are sent, and the peak memory of a rank above that before
the model was created. In this round the C library takes each large block from the system and returns it when it is
freed. Only pages in use are then counted, without the holes that the allocator would otherwise keep (the planner's
category `allocator`).

A rank has its own pages, and a part of the pages that the ranks of its node share: a page that k ranks have touched
counts 1/k on each, so that the sum over the ranks of a node is the memory that the node provides. While a model is
created, the peak is that of both together. In training it is the peak of the rank's own pages, plus its part of the
shared pages at the end.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.runner.jobs import maxima, quiet
from benchmarks.runner.peers import MakePeer
from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.data.on_device import on_device
from mpitrain.models import build_model
from mpitrain.monitor.energy import CPU, EnergyMeter
from mpitrain.parallel.activations import unpack
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.storage import proc
from mpitrain.trainer.data import batches, open_data
from mpitrain.trainer.memory import ActivationMeter, KeptTensor, KeptTensors
from mpitrain.trainer.optimizing import make_optimizer
from mpitrain.trainer.recording.step_memory import StepMemory
from mpitrain.trainer.recording.timeline import ModuleHooks, levels_of
from mpitrain.trainer.trainer import Trainer

_TIERS = ("inside", "between")
KINDS = ("parameters", "gradients", "states", "activations", "buffers")
_LOOPBACK = "/sys/class/net/lo/statistics/tx_bytes"  # bytes sent, in this network namespace
PIECE, LARGE = 128 << 10, 32 << 20  # bytes from which glibc takes a block from the system: its default, and the maximum
_MMAP_THRESHOLD = -3  # number of this setting in mallopt(3)
_EVERY = 0.005  # seconds between two samples of the memory
WARM = 2  # warm-up steps, which do not count
_WATCHED = 3  # steps whose memory and bytes sent are measured

Curve = list[tuple[float, dict[str, float]]]  # seconds since the begin of a step, and bytes by category
Values = Mapping[str, Mapping[str, Any]]  # a configuration by section and key
# what all training runs have in common
UNENDING: Values = {"run": {"device": "cpu", "dir": "unused"}, "train": {"steps": 1000, "evaluate_every": 0}}


class TrainingRun(Protocol):
    """The training of a model by mpitrain or by a peer. All methods are collective."""

    def prepare(self) -> None:
        """Create the model and its optimizer, without drawing a batch."""

    def step(self) -> float:
        """Take the next step, with its batch, and return the mean loss over the global batch."""

    def account(self) -> dict[str, float]:
        """Return the bytes on this rank by category, the names in `KINDS`."""

    def curve(self) -> Curve:
        """Take the next step, and return this rank's memory within it; empty if it cannot be counted."""

    def close(self) -> None:
        """Free all memory and communicators."""


class TrainerRun:
    """A `TrainingRun` by `Trainer`.

    Args:
        world: Communicator of all ranks.
        config: Values of the configuration, by section and key.
    """

    def __init__(self, world: Communicator, config: Mapping[str, Any]) -> None:
        self._trainer = Trainer(config, world=world)
        self._batches = ExitStack()

    def prepare(self) -> None:
        """Create the model and its optimizer, without drawing a batch. Collective."""
        trainer = self._trainer
        trainer.prepare()
        share = trainer.places.workers.share
        loader = self._batches.enter_context(batches(trainer.config, share, trainer.data, 0, trainer.device))
        self._coming = on_device(loader, trainer.device)

    def step(self) -> float:
        """Take the next step, with its batch, and return the mean loss over the global batch. Collective."""
        peak = self._trainer.train_step(next(self._coming))
        self._trainer.step = peak.number
        return peak.loss

    def account(self) -> dict[str, float]:
        """Return the bytes on this rank by category, the names in `KINDS`. Collective."""
        account = self._trainer.engine.memory()
        return {kind: float(getattr(account, kind)) for kind in KINDS}

    def curve(self) -> Curve:
        """Take the next step, and return this rank's memory within it, as `monitor.timeline` records it. Collective."""
        memory = StepMemory(self._trainer)
        with watched_modules(self._trainer.engine.module, memory.sample):
            memory.start()
            began = time.perf_counter()
            self.step()
            memory.stop()
        return [(at - began, dict(nbytes)) for at, nbytes in memory.rows()]

    def close(self) -> None:
        """Free all memory and communicators. Collective."""
        self._batches.close()
        self._trainer.engine.close()
        self._trainer.places.mesh.free()
        self._trainer.let_go()


class PeerRun:
    """A `TrainingRun` of a peer, with our data, model and optimizer; gradients are not clipped.

    Each rank trains on an equal share of every global batch, in one microbatch, as in our own runs.

    Args:
        world: Communicator of all ranks.
        config: Values of the configuration, by section and key.
        make: Function that creates the training by the peer.
    """

    def __init__(self, world: Communicator, config: Values, make: MakePeer) -> None:
        self.world, self.config, self._make = world, Config.from_dict(config), make
        self._batches = ExitStack()
        self._activations = 0

    def prepare(self) -> None:
        """Create the model and its optimizer. Collective."""
        config, world = self.config, self.world
        data, _ = open_data(config, world)
        torch.manual_seed(config.run.seed)
        task = build_model(config.model, data.description)
        share = VirtualWorkers(world.rank, world.size, world.size).share
        self._coming = iter(self._batches.enter_context(batches(config, share, data, 0)))
        self._module = task.module

        def optimizer(module: nn.Module) -> torch.optim.Optimizer:
            return make_optimizer(config.optim, module.named_parameters())

        self._peer = self._make(task.module, task.loss, optimizer)

    def step(self) -> float:
        """Take the next step, with its batch, and return the mean loss over the global batch. Collective."""
        batch, meter = next(self._coming), None
        # equal in each step; not counted under FSDP2, where autograd also saves gathered parameters
        if not self._activations and not any(hasattr(p, "to_local") for p in self._peer.model.parameters()):
            meter = ActivationMeter(self._module)
        with saved_tensors_hooks(meter.add, lambda saved: saved) if meter else nullcontext():
            loss = self._peer.gradients(batch.x, batch.y)
        if meter:
            self._activations = meter.nbytes
        self._peer.update()
        mean_loss = loss.double().reshape(1)
        torch.distributed.all_reduce(mean_loss)
        return float(mean_loss) / self.world.size

    def account(self) -> dict[str, float]:
        """Return the bytes on this rank by category, without buffers, and without what DeepSpeed hides."""
        parameters = list(self._peer.model.parameters())
        states = (value for of in self._peer.optimizer.state.values() for value in of.values())
        tensors_of: dict[str, Iterable[Any]] = {"parameters": parameters, "states": states}
        tensors_of["gradients"] = (p.grad for p in parameters)
        counted = {kind: _bytes(tensors) for kind, tensors in tensors_of.items()}
        return dict.fromkeys(KINDS, 0.0) | counted | {"activations": float(self._activations)}

    def curve(self) -> Curve:
        """Take the next step, and return this rank's memory within it; empty for DeepSpeed. Collective.

        FSDP2's gathered parameters are added to its shares. torch's DDP has gradients in buckets, which stay.
        """
        model, tensors, rows = self._peer.model, KeptTensors(), Curve()
        if type(model).__module__.startswith("deepspeed"):
            return rows
        before = self.account()
        shares = _bytes(p for p in model.parameters() if hasattr(p, "to_local"))
        stay = before["gradients"] if hasattr(model, "reducer") else 0.0

        def sample(at: float) -> None:
            parameters = list(model.parameters())
            nbytes = {"parameters": shares + _bytes(p for p in parameters if not hasattr(p, "to_local"))}
            nbytes |= {"gradients": stay or _bytes(p.grad for p in parameters), "states": before["states"]}
            rows.append((at, nbytes | {"activations": float(tensors.nbytes), "buffers": 0.0}))

        def keep(tensor: torch.Tensor) -> torch.Tensor | KeptTensor:
            origin = tensor._base if tensor._base is not None else tensor
            return tensor if origin.is_leaf and origin.requires_grad else tensors.keep(tensor)  # not parameters

        tensors.at_peak = lambda: sample(time.perf_counter())
        with watched_modules(self._module, sample), saved_tensors_hooks(keep, unpack):
            sample(began := time.perf_counter())
            self.step()
            sample(time.perf_counter())
        return [(at - began, nbytes) for at, nbytes in rows]

    def close(self) -> None:
        """Free the model, the optimizer and the data. Collective."""
        self._batches.close()
        self.__dict__.clear()
        gc.collect()  # wrappers and hooks refer to each other


def _bytes(tensors: Iterable[Any]) -> float:
    """Return the bytes of tensors on this rank: for distributed tensors, its share. Scalars do not count."""
    nbytes = 0
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.numel() > 1:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            nbytes += local.numel() * local.element_size()
    return float(nbytes)


@contextmanager
def watched_modules(module: nn.Module, sample: Callable[[float], None]) -> Iterator[None]:
    """Call `sample` with the time whenever a module of the two outermost levels begins or ends, in the `with` block."""
    hooks = ModuleHooks([named for level in levels_of(module)[:2] for named in level], lambda *call: None, sample)
    try:
        yield
    finally:
        hooks.remove()


def measured_runs(
    world: Communicator, makes: Mapping[str, Callable[[], TrainingRun]], rounds: int, steps: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Measure the steps of several training runs. Collective.

    Each run is executed once before, because libraries allocate memory at their first use.

    Args:
        world: Communicator of all ranks.
        makes: Functions that create a run, by name.
        rounds: Number of measurements of each run, in turns.
        steps: Most steps per measurement.
        seconds: Approximate limit of one measurement; slow runs take fewer steps, but at least three.

    Returns:
        For each run, by name: "seconds": a list per round with the seconds of each step. "joules": joules of a step on
        all machines, per round, None where there is no counter. "curve": on rank 0, (seconds, bytes by category) within
        a step; empty if it cannot be counted. "memory": peak bytes of the
        rank with most. "account": bytes by category on rank 0. "largest": bytes by category, each the maximum over the
        ranks. "losses": losses of the first steps. "sent": see `SentBytes.stop`.
    """
    results: dict[str, dict[str, Any]] = {}
    names = list(makes)
    allocate(PIECE)
    for make in makes.values():
        _measure_run(world, make, 1, 1.0)
    for name, make in makes.items():
        results[name] = _measure_run(world, make, _WATCHED, 1.0, watching=True)[1] | {"seconds": [], "joules": []}
    allocate(LARGE)
    for turn in range(rounds):
        for number, name in list(enumerate(names, 1))[:: -1 if turn % 2 else 1]:
            times, others = _measure_run(world, makes[name], steps, seconds)
            results[name]["seconds"].append(times)
            results[name]["joules"].append(others["joules"])
            if world.rank == 0:
                which = f"{number} of {len(names)}" + (f", {name}" if name != str(number) else "")
                print(f"  {which}: {statistics.median(times):.4f} s", flush=True)
    return results


def step_seconds(of: Mapping[str, Any]) -> float:
    """Return the seconds of a step: the lowest of the rounds' medians, because other work can only slow a step down."""
    return float(min(map(statistics.median, of["seconds"])))


@quiet()
def _measure_run(
    world: Communicator, make: Callable[[], TrainingRun], steps: int, seconds: float, *, watching: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """Execute one run and return (seconds of its steps, the other values of `measured_runs`). Collective.

    Args:
        world: Communicator of all ranks.
        make: Function that creates the run.
        steps: Most steps after the warm-up.
        seconds: Approximate limit; slow runs take fewer steps.
        watching: If true, measure memory and bytes sent, take all `steps`, and record the memory within one more.
    """
    energy = EnergyMeter() if world.local_rank == 0 else None
    run, memory = make(), PeakMemory(world, watching)
    with memory.making():
        run.prepare()
    with memory.training():
        times, losses = list[float](), list[float]()
        count, meter = WARM + steps, SentBytes(world)
        while len(times) < count:
            if not watching:  # no other messages while the bytes of a step are counted
                world.barrier()
            began = time.perf_counter()
            losses.append(run.step())
            took = time.perf_counter() - began
            times.append(took if watching else maxima(world, [took])[0])
            if len(times) == WARM:
                joules_of(world, energy)
            if len(times) == WARM and watching:
                meter.start()
            elif len(times) == WARM:
                count = WARM + min(steps, max(3, int(seconds / times[-1])))
    sent = meter.stop(count - WARM) if watching else None
    joules, account = joules_of(world, energy), run.account()
    peak, *largest = maxima(world, [memory.peak, *account.values()])
    curve = run.curve() if watching else []
    run.close()
    values = {"memory": peak, "account": account, "largest": dict(zip(account, largest, strict=True)), "curve": curve}
    values["joules"] = None if joules is None else joules / (count - WARM)
    return times[WARM:], values | {"losses": losses[: WARM + 1], "sent": sent}


def joules_of(world: Communicator, meter: EnergyMeter | None) -> float | None:
    """Return the joules of all machines' processors since the last call; None if one has no counter. Collective.

    Args:
        world: Communicator of all ranks.
        meter: Meter of this machine, on one of its ranks; None on the others.
    """
    joules = np.array([meter.read().get(CPU, math.nan) if meter is not None else 0.0])
    world.all_reduce(joules)
    return None if math.isnan(joules[0]) else float(joules[0])


def merged(first: Values, second: Values) -> dict[str, dict[str, Any]]:
    """Return two configurations merged, by section and key.

    Args:
        first: First configuration.
        second: Second configuration; its values win.
    """
    return {section: {**first.get(section, {}), **second.get(section, {})} for section in {**first, **second}}


class SentBytes:
    """A counter of the bytes that ranks send between `start` and `stop`, which are both collective.

    The traffic counters count the bytes sent through mpitrain, by operation, axis and tier. Peers send through
    sockets, over gloo. On one node these use the loopback interface, which carries no other traffic of the job; its
    count is divided by the number of ranks, and includes the headers of TCP, some percent. On several nodes, the bytes
    of peers are not measured.

    Args:
        world: Communicator of all ranks.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._loopback = 0

    def start(self) -> None:
        """Start counting. Collective."""
        self._world.barrier()
        self._loopback = _loopback_bytes()
        self._world.barrier()
        self._world.journal.start()

    def stop(self, steps: int) -> Mapping[str, float | None]:
        """Stop counting and return the bytes per step of the rank that sends most, None if unknown. Collective.

        Args:
            steps: Number of steps since `start`.

        Returns:
            "inside" and "between": bytes per step to ranks of the same node and of other nodes.
        """
        world = self._world
        rows = world.journal.account()
        world.journal.stop()
        world.barrier()
        sent: list[float] = [sum(getattr(row, tier) for row in rows) for tier in _TIERS]
        if not rows:
            sent[0] = (_loopback_bytes() - self._loopback) / world.size
        known = rows or world.num_nodes == 1
        largest = zip(_TIERS, maxima(world, sent), strict=True)
        return {tier: nbytes / steps if known else None for tier, nbytes in largest}


def _loopback_bytes() -> int:
    """Return the bytes sent through the loopback interface so far; 0 if the system does not report them."""
    with suppress(OSError, ValueError), open(_LOOPBACK, encoding="ascii") as file:
        return int(file.read())
    return 0


# -- memory ------------------------------------------------------------------------------------------------


class PeakMemory:
    """The peak memory of this rank while a model is created and trained. The constructor is collective.

    Args:
        world: Communicator of all ranks.
        watching: If false, measure only at the start of each context, without a sampling thread that slows ranks down.

    Attributes:
        peak: Peak bytes so far, above those at construction.
    """

    def __init__(self, world: Communicator, watching: bool = True) -> None:
        self._watching = watching
        gc.collect()
        trim()
        world.barrier()
        self._private, self._shared = _own_bytes(), _part_of("Pss_Shmem")
        self.peak = 0  # peak bytes above those at construction

    @contextmanager
    def making(self) -> Iterator[None]:
        """Measure the memory while the model is created in the `with` block."""
        with self._peak(lambda: _own_bytes() + _part_of("Pss_Shmem")) as most:
            yield
        self._record(most[0])

    @contextmanager
    def training(self) -> Iterator[None]:
        """Measure the memory while the model is trained in the `with` block."""
        with self._peak(_own_bytes) as most:
            yield
            shared = _part_of("Pss_Shmem")
        self._record(most[0] + max(shared, self._shared))

    def _record(self, nbytes: int) -> None:
        self.peak = max(self.peak, nbytes - self._private - self._shared)

    @contextmanager
    def _peak(self, nbytes: Callable[[], int]) -> Iterator[list[int]]:
        """Yield a list with one entry, the maximum that `nbytes` has returned so far."""
        most, done = [nbytes()], threading.Event()
        if not self._watching:
            yield most
            return

        def watch() -> None:
            while not done.wait(_EVERY):
                most[0] = max(most[0], nbytes())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield most
        finally:
            done.set()
            thread.join()


def trim() -> None:
    """Make glibc return freed memory to the system, so that the next measurement does not count it."""
    _glibc("malloc_trim", 0)


def allocate(nbytes: int) -> None:
    """Make glibc take blocks of at least `nbytes` from the system, and return them when they are freed."""
    _glibc("mallopt", _MMAP_THRESHOLD, nbytes)


def _glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc; do nothing if the C library has no such function."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def _own_bytes() -> int:
    """Return the bytes of this process' own pages: allocated memory, without memory shared between ranks."""
    return proc.nbytes_of("self/status", "RssAnon") or 0


def _part_of(kind: str) -> int:
    """Return this process' part of shared memory, each page divided by the processes that touched it; see proc(5).

    Args:
        kind: Name of the entry in /proc/self/smaps_rollup.
    """
    return proc.nbytes_of("self/smaps_rollup", kind) or 0
