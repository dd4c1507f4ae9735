"""The contenders of the step benchmark: one model, one optimizer, trained by ours, torch and DeepSpeed.

Every contender begins with the same weights and gets the same batches: a rank's stream of random tokens, which is
seeded by the rank and begins anew for each contender. All update with torch's fused AdamW and clip nothing.
"""

from __future__ import annotations

import gc
import importlib.util
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.runner.peers import fully_sharded, imported_deepspeed
from mpitrain.comm import Communicator
from mpitrain.models.gpt import GPT
from mpitrain.shard.sharding import Options
from mpitrain.trainer.engine import Engine

RATE = 1e-4
ALONE = "one process"


@dataclass(frozen=True)
class Shape:
    """What is trained: a GPT, with heads of 64 features.

    Attributes:
        vocabulary: How many tokens there are.
        layers: Its blocks.
        width: Its features.
        tokens: Those of a sample.
    """

    vocabulary: int
    layers: int
    width: int
    tokens: int

    def build(self) -> GPT:
        """The same weights at each call."""
        torch.manual_seed(1)
        return GPT(self.vocabulary, self.layers, self.width, max(1, self.width // 64))

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return self.layers * (12 * self.width**2 + 13 * self.width) + (self.vocabulary + 2) * self.width


class Batches:
    """This rank's batches in turn; each is new, so that no contender ever trains on what it knows by heart."""

    def __init__(self, shape: Shape, samples: int, rank: int) -> None:
        self._shape, self._samples = shape, samples
        self._generator = torch.Generator().manual_seed(rank)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and the token after each; both [samples, tokens]."""
        size = (self._samples, self._shape.tokens + 1)
        drawn = torch.randint(self._shape.vocabulary, size, generator=self._generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@dataclass
class Trainee:
    """A model in training; it begins with the first batch.

    Attributes:
        batches: This rank's.
        forward_backward: Gives the gradients of x and y, and returns the loss.
        update: Applies them.
        release: Ends what is to be ended before the memory goes.
        account: Gives bytes by category, where the contender counts them.
        loss: This rank's part of the mean loss of all ranks, in the last step.
    """

    batches: Batches
    forward_backward: Callable[[torch.Tensor, torch.Tensor], float]
    update: Callable[[], object]
    release: Callable[[], None] | None = None
    account: Callable[[], dict[str, int]] | None = None
    loss: float = math.nan

    def __post_init__(self) -> None:
        self.prepare()

    def prepare(self) -> None:
        """Draw the next batch."""
        self._batch = self.batches.next()

    def step(self) -> None:
        """Gradients of the batch, and the update. Collective, but for one process alone."""
        self.loss = self.forward_backward(*self._batch)
        self.update()

    def close(self) -> None:
        """Give the memory back. Collective."""
        if self.release is not None:
            self.release()
        self.__dict__.clear()
        gc.collect()  # wrappers and hooks refer to each other


Build = Callable[["Communicator", Shape, Batches], Trainee]


def contenders() -> dict[str, Build | str]:
    """By name: how to make it, or why it cannot run here."""
    found: dict[str, Build | str] = {
        ALONE: partial(_of_torch, wrap=lambda model: model),
        "DDP": partial(_ours, options=Options(zero=0)),
        **{f"ZeRO-{stage}": partial(_ours, options=Options(zero=stage)) for stage in (1, 2, 3)},
        "ZeRO-3 gathered": partial(_ours, options=Options(zero=3, share_node=False)),
        "torch DDP": partial(_of_torch, wrap=_torch_ddp),
        "FSDP2": partial(_of_torch, wrap=lambda model: fully_sharded(model, torch.distributed.group.WORLD)),
    }
    missing = importlib.util.find_spec("deepspeed") is None
    for stage in (1, 2, 3):
        found[f"DeepSpeed ZeRO-{stage}"] = "not installed" if missing else partial(_deepspeed, stage=stage)
    return found


def contender(name: str, world: Communicator, shape: Shape, samples: int) -> Trainee:
    """One that can run here, with batches of its own. Collective."""
    build = contenders()[name]
    assert not isinstance(build, str)
    return build(world, shape, Batches(shape, samples, world.rank))


def bytes_needed(name: str, numel: int, ranks: int) -> float:
    """About what a contender takes on each rank: fp32 parameters, gradients, two moments, and some room."""
    whole = 16.0 * numel
    if name == ALONE or "DDP" in name:
        return whole + 4.0 * numel  # torch's buckets, or gradients on their way
    return whole / ranks + 12.0 * numel  # parameters, gradients and buckets that a stage keeps whole


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def _of_torch(world: Communicator, shape: Shape, batches: Batches, wrap: Callable[[GPT], nn.Module]) -> Trainee:
    """wrap: makes of the model what is trained."""
    model = shape.build()
    wrapped = wrap(model)
    optimizer = _optimizer(wrapped.parameters())

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        found = model.loss(wrapped(x), y)
        found.backward()
        return float(found.detach()) / world.size

    return Trainee(batches, forward_backward, optimizer.step)


def _torch_ddp(model: GPT) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _ours(world: Communicator, shape: Shape, batches: Batches, options: Options) -> Trainee:
    model = shape.build()
    engine = Engine(model, model.loss, _optimizer(model.parameters()), world, options)

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> float:
        return float(engine.forward_backward([[(x, y)]], len(x) * world.size))

    def account() -> dict[str, int]:
        values = asdict(engine.memory())
        return {name: nbytes for name, nbytes in values.items() if name != "expected"}

    return Trainee(batches, forward_backward, engine.step, engine.close, account)


def _deepspeed(world: Communicator, shape: Shape, batches: Batches, stage: int) -> Trainee:
    """On the gloo group there is. DeepSpeed sets the gradients to zero in its step."""
    deepspeed = imported_deepspeed(world)
    model = shape.build()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # its default is 1, and nobody else clips
        "zero_allow_untested_optimizer": True,  # it knows its own AdamW only
        "steps_per_print": 1 << 40,
    }
    optimizer = _optimizer(model.parameters())
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for state in optimizer.state.values():
        state["step"].zero_()  # it made a step without gradients, to allocate the states; bias correction counts it

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> float:
        found = model.loss(engine(x), y)
        engine.backward(found)
        return float(found.detach()) / world.size

    return Trainee(batches, forward_backward, engine.step, engine.destroy)
