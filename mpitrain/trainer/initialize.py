"""`mpitrain.initialize`: an engine for a training loop of one's own, as users of DeepSpeed know it.

engine = mt.initialize(model=model, optimizer=optimizer, config="train.toml")
for x, y in batches:                    # this rank's microbatches
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()                       # updates at the end of an accumulation, else only counts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import Store
from mpitrain.comm import Communicator, carry_device_memory, init, set_timeout
from mpitrain.comm.memory.device import fetched
from mpitrain.config.deepspeed import looks_like_deepspeed, read_deepspeed, read_json
from mpitrain.config.settings import Config
from mpitrain.config.toml_file import read_toml
from mpitrain.config.training import OptimSection
from mpitrain.errors import CheckpointError, InputError, refusal
from mpitrain.shard.units import blocks_of
from mpitrain.trainer.compiling import compile_blocks
from mpitrain.trainer.device import full_told, moved, place
from mpitrain.trainer.engine import Engine, Loss
from mpitrain.trainer.memory import MemoryAccount
from mpitrain.trainer.optimizer import make_optimizer
from mpitrain.trainer.options import Settings, from_config, from_deepspeed
from mpitrain.trainer.recompute import recompute_blocks

ALL = 1 << 30  # checkpoints kept: the caller removes them


class TrainingEngine:
    """A model that trains over the ranks of a communicator. Made by `initialize`.

    module: the model. Gradients are averaged over ranks and microbatches. steps: updates made so far, and skipped
    ones. norm: of the last step's gradients, before clipping.
    """

    def __init__(self, engine: Engine, settings: Settings, loss: Loss | None, scheduler: Any) -> None:
        self._engine, self.settings, self._loss, self._scheduler = engine, settings, loss, scheduler
        self.steps, self._passes, self.norm, self.skipped = 0, 0, 0.0, 0
        self._store = Store(Path(), engine.comm, ALL)  # one for all folders: it keeps communicators

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._engine.optimizer

    @property
    def device(self) -> torch.device:
        """Where the model is, and batches are moved."""
        return self._engine.device

    def _full_told(self) -> AbstractContextManager[None]:
        return full_told(self.device)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def at_boundary(self) -> bool:
        """Whether the next `backward` is the last before an update."""
        return self._passes == self.settings.accumulate - 1

    def train(self, mode: bool = True) -> TrainingEngine:
        self.module.train(mode)
        return self

    def eval(self) -> TrainingEngine:
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; with a loss function and two arguments (x, y), the loss.

        Arguments that are on the host are moved to the model's device.
        """
        with self._full_told():
            args, kwargs = moved((args, kwargs), self.device)
            if self._loss is not None and len(args) == 2 and not kwargs:
                loss, (x, y) = self._loss, args
                return self._engine.compute(lambda x: loss(self.module(x), y), x)
            return self._engine.compute(self.module, *args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a microbatch's mean loss; the last pass before an update also reduces them."""
        if self._passes >= self.settings.accumulate:
            raise InputError(f"backward was called {self._passes + 1} times without a step; call step() after each")
        if self._passes == 0:
            self._engine.sharding.gradients.zero()
        share = 1.0 / (self.settings.accumulate * self._engine.comm.size)
        with self._full_told():
            self._engine.backward(loss * share, reduce=self.at_boundary)

    def step(self) -> bool:
        """Update the parameters, if this microbatch was the last of the step; returns whether it was. Collective.

        A step whose gradients are not finite on some rank is skipped on all of them.
        """
        self._passes += 1
        if self._passes < self.settings.accumulate:
            return False
        self._passes = 0
        schedule = self.settings.schedule
        with self._full_told():
            result = self._engine.step(schedule.rate(self.steps) if schedule is not None else None)
        if self._scheduler is not None and not result.skipped:
            self._scheduler.step()
        self.steps, self.norm = self.steps + 1, result.norm
        self.skipped += result.skipped
        return True

    def train_batch(self, batches: Iterator[tuple[Any, Any]]) -> float:
        """A whole step on the next microbatches (x, y) of an iterator, as many as it accumulates. Collective.

        Returns:
            The mean loss over microbatches and ranks.

        Raises:
            InputError: There is no loss function, or a step has been begun.
        """
        if self._loss is None or self._passes:
            why = "a step has been begun; end it" if self._passes else "it needs a loss; give mt.initialize one"
            raise refusal(f"train_batch: {why}")
        mean = torch.zeros(1, dtype=torch.float64, device=self.device)
        for _ in range(self.settings.accumulate):
            x, y = next(batches)
            loss = self(x, y)
            self.backward(loss)
            mean += loss.detach() / self.settings.accumulate
            if self.at_boundary:
                self._engine.comm.all_reduce(mean, "avg")
                told = fetched(mean)
            self.step()
        return float(told())

    # -- checkpoints

    def save(self, path: str | Path, values: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint into the folder `path`, as path/step-N; returns that. Collective.

        values: JSON to be given back by `load`, rank 0's. The folder then belongs to this job until it ends: another
        job's `save` into it is refused. Nothing is removed or replaced there but what is known to be a checkpoint's.
        """
        parts, rest = self._engine.parts()
        rates = [float(settings["lr"]) for settings in self.optimizer.param_groups]
        mine = {"steps": self.steps, "skipped": self.skipped, "rates": rates, "values": dict(values or {})}
        if self._scheduler is not None:
            mine["scheduler"] = _plain(self._scheduler.state_dict())
        self._store.move_to(Path(path))
        self._store.prepare(set_aside=False, lock=True)
        folder = self._store.save(self.steps, parts, rest | {"engine": mine})
        self._store.finish()
        return folder

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from the newest whole checkpoint in `path`, or from that at `path`; returns its values. Collective.

        It may be of another stage and another number of ranks. Raises CheckpointError when none can be used.
        """
        self._store.move_to(Path(path))
        reasons = []
        for folder in self._store.at(Path(path)):
            try:
                manifest = self._store.load(folder, self._engine.parts_to_load)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            self._engine.finish_load(manifest)
            mine = manifest.values.get("engine", {"steps": manifest.step, "skipped": 0, "values": {}})
            self.steps, self.skipped, self._passes = mine["steps"], mine["skipped"], 0
            for settings, rate in zip(self.optimizer.param_groups, mine.get("rates", ()), strict=False):
                settings["lr"] = rate
            if self._scheduler is not None and "scheduler" in mine:
                self._scheduler.load_state_dict(mine["scheduler"])
            return mine["values"]
        raise CheckpointError(f"{path} holds no checkpoint that can be used: {(reasons or ['it is empty'])[0]}")

    # -- for people

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the model's whole state, on every rank. Collective."""
        return self._engine.state_dict()

    def memory(self) -> MemoryAccount:
        """Bytes by category on this rank, measured, and by formula."""
        return self._engine.memory()

    def close(self) -> None:
        """Give the model's parameters memory of their own again, and release the rest. Collective."""
        self._store.close()
        self._engine.close()


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    loss: Loss | None = None,
    scheduler: Any = None,
    comm: Communicator | None = None,
) -> TrainingEngine:
    """Make an engine that trains a model over the ranks of a communicator. Collective.

    Args:
        model: The module to train, on the device that this rank computes on; one on the CPU is moved to a device of the
            kind that the key run.device names, if it names one.
        optimizer: Made for model.parameters(); without one, the configuration's.
        config: A TOML file or nested values of `mpitrain.config.settings`, also the config.toml of a finished run; or a
            DeepSpeed JSON file or its values.
        loss: loss(model(x), y), a mean over samples; by default the model's own `loss`, if it has one.
        scheduler: Stepped after every update; without it and without an optimizer of one's own, the configuration's.
        comm: The ranks to train over; by default all.

    Raises:
        InputError: A key is not supported; the message names it.
    """
    comm = comm if comm is not None else init()
    settings, section = _read(config, comm.size, own_optimizer=optimizer is not None)
    both = (("an optimizer", optimizer, settings.optimizer), ("a scheduler", scheduler, settings.schedule))
    for what, given, named in both:
        if given is not None and named is not None:
            raise refusal(f"{what} was given, and {_origin(config)} names another; leave one out")
    if settings.timeout is not None:
        set_timeout(settings.timeout)
    if settings.carry is not None:
        carry_device_memory(settings.carry)
    place(model, settings.device, comm)
    if settings.without_effect and comm.rank == 0:
        print(f"without effect here: {', '.join(settings.without_effect)}", flush=True)
    if optimizer is None:
        decay_all = section is None  # as DeepSpeed does
        optimizer = make_optimizer(section or _section(settings), model.named_parameters(), decay_all=decay_all)
    if settings.any_optimizer:
        optimizer.elementwise = True  # type: ignore[attr-defined]
    if settings.recompute:
        recompute_blocks(model)
    models = getattr(model, "loss", None)
    chosen = loss if loss is not None else models if callable(models) else None
    engine = Engine(
        model,
        chosen or (lambda output, y: output),
        optimizer,
        comm,
        settings.options,
        clip=settings.clip,
        precision=settings.precision,
        scale=settings.scale,
    )
    if settings.compile:
        compile_blocks(blocks_of(model), engine, comm)
    return TrainingEngine(engine, settings, chosen, scheduler)


def _read(
    config: str | Path | Mapping[str, Any] | Config | None, ranks: int, *, own_optimizer: bool
) -> tuple[Settings, OptimSection | None]:
    """The settings, and the section that describes the optimizer; None for a DeepSpeed configuration."""
    if isinstance(config, (str, Path)) and str(config).endswith(".json"):
        return from_deepspeed(read_deepspeed(read_json(Path(config)), ranks, str(config))), None
    if isinstance(config, Mapping) and looks_like_deepspeed(config):
        return from_deepspeed(read_deepspeed(config, ranks)), None
    ours = config if isinstance(config, Config) else Config.from_dict(_values(config), _origin(config))
    return from_config(ours, ranks, own_optimizer=own_optimizer, origin=_origin(config)), ours.optim


def _values(config: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    return config if isinstance(config, Mapping) else read_toml(str(config))


def _origin(config: str | Path | Mapping[str, Any] | Config | None) -> str:
    return str(config) if isinstance(config, (str, Path)) else "config"


def _section(settings: Settings) -> OptimSection:
    """The optimizer section that a DeepSpeed configuration describes."""
    if settings.optimizer is None:
        raise refusal("no optimizer was given, and the configuration has none; give one")
    kind, params = settings.optimizer
    options = dict(params)
    rate, decay = options.pop("lr", 1e-3), options.pop("weight_decay", 0.0)
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    return OptimSection(name=kind, lr=rate, weight_decay=decay, options=options)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a scheduler's state that JSON can hold; the rest is functions."""
    kinds = (bool, int, float, str, list, type(None))
    return {key: value for key, value in state.items() if isinstance(value, kinds)}
