"""Callback that records the energy of a run's machines.

The first rank of each machine reads the counters of its processors and of the devices of its ranks, at the same step
on all machines. The sum goes into the line of that step in metrics.jsonl, with the steps and samples since the line
before that has one:

    step      1      2     ...     40    41    ...    80
    energy  before  first               39 steps            of 25 ms: a reading a second

Every reading has a cost: some 10 us for each package, more for a device. The next one follows after a second, or after
a thousand times the cost if that is longer, so that readings take less than 0.1 % of the time. Longer steps have one
reading each. Evaluations and checkpoints between two readings are included.

If a machine has no readable counter of a kind, its sum would be of other machines only, so this kind has no figure.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from mpitrain.comm.job.topology import machine_id
from mpitrain.comm.memory.device import identity, is_accelerator
from mpitrain.monitor.energy import CPU, DEVICE, POWERCAP, EnergyMeter
from mpitrain.trainer.run import Callback, Run, Step

_EVERY = 1.0  # least seconds between two readings, and ...
_COST = 1000  # ... the same in multiples of a reading's duration


class EnergyRecords(Callback):
    """Adds the joules of all machines, per step and per sample, to lines of metrics.jsonl.

    Args:
        powercap: Folder of Linux's power capping.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._powercap = powercap
        self._meter: EnergyMeter | None = None  # None on ranks that read nothing
        self._sources: tuple[str, ...] = ()  # kinds of counters that are readable on all machines
        self._step = self._next = 0  # steps of the last and of the next reading
        self._at = 0.0  # time.monotonic() of the last reading

    def on_fit_start(self, trainer: Run) -> None:
        world, device = trainer.world, trainer.device
        machine = machine_id(world.node)
        ranks = world.all_gather_object((machine, identity(device) if is_accelerator(device) else ""))
        near = [rank for rank in range(world.size) if ranks[rank][0] == machine]
        devices = {ranks[rank][1] for rank in near} - {""}
        self._meter = EnergyMeter(devices, self._powercap) if world.rank == near[0] else None
        self._sources = (CPU, DEVICE) if any(device for _, device in ranks) else (CPU,)
        self._step, self._at = trainer.step, time.monotonic()
        self._read(trainer, steps=1)
        self._next = trainer.step + 1
        if not self._sources and world.rank == 0:
            trainer.folder.log.info("energy is not recorded: no readable counters in %s", self._powercap)

    def on_step_end(self, trainer: Run, step: Step) -> None:
        due = step.together and (step.number >= self._next or trainer.last_step)
        if not due or not self._sources:
            return
        steps, sizes = step.number - self._step, trainer.batch_sizes
        samples = sizes.before(step.number) - sizes.before(self._step)
        self._step = step.number
        if joules := self._read(trainer, steps):
            step.extras["energy"] = joules | {"steps": steps, "samples": samples}
            total = sum(joules.values())
            step.extras |= {"j_per_step": total / steps, "j_per_sample": total / samples}

    def _read(self, trainer: Run, steps: int) -> dict[str, float]:
        """Return the joules of all machines since the last reading, and choose the step of the next one. Collective.

        Args:
            trainer: Trainer of the run.
            steps: Number of steps since the last reading.
        """
        figures = torch.zeros(len(self._sources) + 1, dtype=torch.float64)
        began = time.monotonic()
        if self._meter is not None:
            joules = self._meter.read()
            for index, source in enumerate(self._sources):
                figures[index] = joules.get(source, math.nan)
        if trainer.world.rank == 0:
            now = time.monotonic()
            figures[-1] = steps_until_next(began - self._at, steps, now - began)
            self._at = now
        trainer.world.all_reduce(figures)
        *sums, until_next = figures.tolist()
        known = {source: value for source, value in zip(self._sources, sums, strict=True) if not math.isnan(value)}
        self._sources, self._next = tuple(known), self._step + int(until_next)
        return known


def steps_until_next(seconds: float, steps: int, cost: float) -> int:
    """Return the number of steps until the next reading.

    Args:
        seconds: Time since the last reading.
        steps: Steps in that time.
        cost: Duration of a reading in seconds.
    """
    return max(1, math.ceil(max(_EVERY, _COST * cost) * steps / max(seconds, 1e-9)))
