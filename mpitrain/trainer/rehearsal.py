"""Rehearsal of a job: its assembly and a few steps on made-up samples, without a run folder or any other file.

It shows the memory and the time that the job will take, on its ranks or on one rank of a world that is not there (see
`mpitrain.comm.rehearsal`), and raises an error if the memory does not suffice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from mpitrain.comm import Communicator, carry_device_memory, set_timeout
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.config.settings import Config
from mpitrain.data import Dataset, Description
from mpitrain.data.folders import agree_on_errors
from mpitrain.errors import EXIT_DONE, refusal
from mpitrain.layers.precision import convert
from mpitrain.monitor.memory import memory_bytes
from mpitrain.planner.out_of_memory import ADVICE
from mpitrain.planner.subject import description_of
from mpitrain.storage.text import bytes_text, counted, duration_text
from mpitrain.trainer.device import explain_out_of_memory, memory_limit, set_threads
from mpitrain.trainer.trainer import Trainer

_STEPS = 3  # steps taken, of which the first one warms up
_CATEGORIES = ("process", "parameters", "gradients", "states", "activations", "buffers")


class MadeUpSamples(Dataset):
    """Random samples that have the shapes, dtypes and number of a data set's.

    Args:
        description: Description of the data set.
    """

    def __init__(self, description: Description) -> None:
        self.description = description

    def read(self, ids: Any) -> tuple[Any, Any]:
        """Return samples that depend on the ids alone; see `Dataset.read`."""
        about, draw = self.description, np.random.default_rng(ids.tolist())
        tokens = about.vocabulary or 1
        x, y = (
            draw.integers(0, highest, (len(ids), *shape), dtype)
            if np.issubdtype(dtype, np.integer)
            else draw.standard_normal((len(ids), *shape), np.float32).astype(dtype)
            for shape, dtype, highest in (
                (about.x_shape, about.x_dtype, tokens),
                (about.y_shape, about.y_dtype, len(about.classes or ()) or tokens),
            )
        )
        return x, y

    def close(self) -> None:
        """Do nothing."""


class Rehearsal(Trainer):
    """Trainer that takes a few steps and reports memory and time; nothing is read but the data set's description.

    Args:
        config: Settings of the job.
        world: Ranks of the job.
        memory: Bytes that a rank may use; None for its share of this node's memory, or of its device's.
    """

    def __init__(self, config: Config, world: Communicator, memory: float | None = None) -> None:
        if config.parallel.mode != "sync" or (config.parallel.auto and not config.parallel.machine):
            raise refusal(
                "a rehearsal needs parallel.mode sync, and a layout: instead of parallel.auto, set the layout that "
                "python -m mpitrain.plan finds, or parallel.machine"
            )
        parallel = config.parallel
        if world.played and parallel.sequence and config.model.sequence % parallel.tensor:
            raise refusal(
                f"--as-rank needs equal parts of a sequence, and model.sequence {config.model.sequence} is no multiple "
                f"of parallel.tensor {parallel.tensor}; change one of them, or use --dry-run on real ranks"
            )
        super().__init__(config, world=world)
        self._limit = memory if memory is not None else memory_limit(self.device, self.world)

    def open_data(self) -> tuple[Dataset, Dataset | None]:
        """Return made-up samples; a built-in data set that does not exist yet is made once per node. Collective."""
        first = self.world.local_rank == 0
        agree_on_errors(self.world, lambda: description_of(self.config) if first else None)
        return MadeUpSamples(agree_on_errors(self.world, lambda: description_of(self.config))), None

    def fit(self) -> int:
        """Rehearse the job and print what it takes. Collective.

        Returns:
            Exit code 0.

        Raises:
            InputError: On all ranks, if a setting is invalid, or a rank needs more memory than it may use.
        """
        set_timeout(self.config.comm.timeout)
        carry_device_memory(self.config.comm.device)
        set_threads(self.world, self.config.run.reproducible)
        before, seconds = 0 if is_accelerator(self.device) else memory_bytes(), list[float]()
        with explain_out_of_memory(self.device):
            self.prepare()
            if self.engine.pipeline is not None and self.engine.pipeline.foreseen is not None:
                convert(self.engine.pipeline.foreseen.blocks, self.config.train.precision)
            with closing(self.strategy.steps(self)) as steps:  # type: ignore[type-var]
                for _ in range(min(_STEPS, self.config.train.steps)):
                    began = time.perf_counter()
                    self.step = next(steps).number
                    seconds.append(time.perf_counter() - began)
        account = {"process": before, **asdict(self.engine.memory()), "limit": self._limit}
        accounts = self.world.all_gather_object(account)
        needs = [sum(each[kind] for kind in _CATEGORIES) - each["host"] * bool(not before) for each in accounts]
        worst = max(range(len(needs)), key=lambda rank: needs[rank] / accounts[rank]["limit"])
        worst = self.world.rank if self.world.played else worst
        if self.world.rank == 0 or self.world.played:
            self.print("\n".join(self._report(worst, accounts[worst], needs, min(seconds[1:] or seconds))))
        if needs[worst] > accounts[worst]["limit"]:
            raise refusal(
                f"rank {worst} needs {bytes_text(needs[worst])} of memory, and may use "
                f"{bytes_text(accounts[worst]['limit'])}; {ADVICE}"
            )
        return EXIT_DONE

    def _report(self, rank: int, account: dict[str, Any], needs: Sequence[float], seconds: float) -> list[str]:
        """Return the lines of the report.

        Args:
            rank: Rank that comes closest to its limit.
            account: Its bytes by category.
            needs: Bytes that each rank needs.
            seconds: Duration of a step.
        """
        world, steps = self.world, self.config.train.steps
        axes = " x ".join(f"{name} {ranks}" for name, ranks in self.mesh.shape.items())
        places = f"{counted(world.size, 'rank')} on {counted(world.num_nodes, 'node')}"
        lines = [f"rehearsal: {places}, {axes}; {self.parameters:,} parameters"]
        others = "" if world.played else f", the largest of {bytes_text(min(needs))} to {bytes_text(max(needs))}"
        lines.append(f"{f'bytes of rank {rank}':20} {'measured':>18} {'formula':>18}")
        for kind in _CATEGORIES:
            formula = f"{account['expected'][kind]:,}" if kind in account["expected"] else ""
            lines.append(f"  {kind:18} {account[kind]:18,} {formula:>18}".rstrip())
        lines.append(f"  of these, padding {account['padding']:,} and in host memory {account['host']:,}")
        lines.append(f"memory: {bytes_text(needs[rank])} of {bytes_text(account['limit'])}{others}")
        end = datetime.now() + timedelta(seconds=steps * seconds)
        alone = ", without the other ranks" if world.played else ""
        lines.append(f"step: {duration_text(seconds)}{alone}; {steps:,} steps end {end:%Y-%m-%d %H:%M} if begun now")
        return lines
