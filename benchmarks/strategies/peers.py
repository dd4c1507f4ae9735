"""The peers of the benchmark `strategies`: torch DDP, FSDP2 and DeepSpeed, on our data and our model.

Each rank has an equal share of every global batch, in one microbatch, as ours has; the optimizer is made by the same
function, and nothing is clipped.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.runner.peers import fully_sharded, imported_deepspeed
from benchmarks.runner.training_runs import TrainingRun, Values
from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.models import build_model
from mpitrain.models.task import Task
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.data import batches, open_data
from mpitrain.trainer.memory import ActivationMeter
from mpitrain.trainer.optimizing.optimizer import make_optimizer

MakeRun = Callable[[Communicator, Values], TrainingRun]


def peers() -> tuple[dict[str, MakeRun], dict[str, str]]:
    """By name, what makes a peer's run; and why others cannot run here. torch.distributed's default group is theirs."""
    made: dict[str, MakeRun] = {
        "torch DDP": partial(PeerRun, wrap=_ddp),
        "FSDP2": partial(PeerRun, wrap=lambda model: fully_sharded(model, torch.distributed.group.WORLD)),
    }
    names = {f"DeepSpeed ZeRO-{stage}": stage for stage in (1, 2, 3)}
    if importlib.util.find_spec("deepspeed") is None:
        return made, dict.fromkeys(names, "not installed")
    return made | {name: partial(DeepSpeedRun, stage=stage) for name, stage in names.items()}, {}


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


class PeerRun:
    """Training by plain torch: the model wrapped by `wrap`, and a loop."""

    def __init__(self, world: Communicator, config: Values, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.world, self.config, self._wrap = world, Config.from_dict(config), wrap
        self._batches = contextlib.ExitStack()
        self._activations = 0

    def prepare(self) -> None:
        """See `TrainingRun`."""
        config, world = self.config, self.world
        data, _ = open_data(config, world)
        torch.manual_seed(config.run.seed)
        self.task: Task = build_model(config.model, data.description)
        share = VirtualWorkers.of(world, False, config.run.workers).share
        self._coming = iter(self._batches.enter_context(batches(config, share, data, 0)))
        self.make()

    def make(self) -> None:
        """Wrap the model, and make its optimizer. Collective."""
        self.model: Any = self._wrap(self.task.module)
        self.optimizer = make_optimizer(self.config.optim, self.model.named_parameters())

    def step(self) -> float:
        """See `TrainingRun`."""
        batch = next(self._coming)
        with self._metered():
            loss = self.task.loss(self.model(batch.x), batch.y)
        self.update(loss)
        told = loss.detach().double().reshape(1)
        torch.distributed.all_reduce(told)
        return float(told) / self.world.size

    @contextlib.contextmanager
    def _metered(self) -> Iterator[None]:
        """Count what autograd keeps, once; not under FSDP2, which keeps whole parameters that come and go."""
        if self._activations or any(hasattr(p, "to_local") for p in self.model.parameters()):
            yield
            return
        meter = ActivationMeter(self.task.module)
        with saved_tensors_hooks(meter.add, lambda kept: kept):
            yield
        self._activations = meter.nbytes

    def update(self, loss: torch.Tensor) -> None:
        """Backward of a loss, and the optimizer's step. Collective."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def account(self) -> dict[str, float]:
        """See `TrainingRun`. What the peer keeps to itself is not counted; 0: not known."""
        parameters = list(self.model.parameters())
        states = [value for of in self.optimizer.state.values() for value in of.values()]
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes(p.grad for p in parameters),
            "states": _bytes(states),
            "activations": float(self._activations),
            "buffers": 0.0,
        }

    def release(self) -> None:
        """End what is to be ended before the memory goes."""

    def close(self) -> None:
        """See `TrainingRun`."""
        self._batches.close()
        self.release()
        self.__dict__.clear()
        gc.collect()  # wrappers and hooks refer to each other


class DeepSpeedRun(PeerRun):
    """Training by DeepSpeed, on the gloo group there is."""

    def __init__(self, world: Communicator, config: Values, stage: int) -> None:
        super().__init__(world, config, lambda model: model)
        self._stage = stage

    def make(self) -> None:
        """See `PeerRun`."""
        deepspeed = imported_deepspeed(self.world)
        settings: Mapping[str, Any] = {
            "train_micro_batch_size_per_gpu": self.config.train.batch // self.world.size,
            "zero_optimization": {"stage": self._stage},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 40,
        }
        module = self.task.module
        self.optimizer = make_optimizer(self.config.optim, module.named_parameters())
        self.model, _, _, _ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=settings, dist_init_required=False
        )
        for state in self.optimizer.state.values():
            state["step"].zero_()  # it made a step without gradients, to allocate the states; bias correction counts it

    def update(self, loss: torch.Tensor) -> None:
        """See `PeerRun`."""
        self.model.backward(loss)
        self.model.step()

    def account(self) -> dict[str, float]:
        """See `TrainingRun`. DeepSpeed's parameters and gradients lie in buffers that it keeps to itself."""
        return {**dict.fromkeys(super().account(), 0.0), "activations": float(self._activations)}

    def release(self) -> None:
        """See `PeerRun`."""
        self.model.destroy()


def _bytes(tensors: Iterable[Any]) -> float:
    """Bytes that this rank has of tensors, or of its shares of distributed ones; scalars do not count."""
    found = 0
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.numel() > 1:
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found += own.numel() * own.element_size()
    return float(found)
