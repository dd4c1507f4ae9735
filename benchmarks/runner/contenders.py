"""The contenders of the step benchmark: one model, one optimizer, trained by ours, torch and DeepSpeed.

Every contender begins with the same weights and gets the same batches: a rank's stream of random tokens, which is
seeded by the rank and begins anew for each contender. All update with torch's fused AdamW and clip nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.runner.peers import MakePeer, of_torch, peers, require_alike
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


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(shape: Shape, samples: int, rank: int) -> Iterator[Batch]:
    """A rank's tokens and the token after each, [samples, tokens]; each is new, so that none is known by heart."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        drawn = torch.randint(shape.vocabulary, (samples, shape.tokens + 1), generator=generator)
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@dataclass
class Trainee:
    """A model in training; it begins with the first batch.

    Attributes:
        batches: This rank's.
        forward_backward: Gives the gradients of x and y, and returns the rank's part of the mean loss of all ranks.
        update: Applies them.
        release: Ends what is to be ended before the memory goes.
        account: Gives bytes by category, where the contender counts them.
        loss: Of the last step, once there was one.
    """

    batches: Iterator[Batch]
    forward_backward: Callable[[torch.Tensor, torch.Tensor], Any]
    update: Callable[[], object]
    release: Callable[[], object] = lambda: None
    account: Callable[[], dict[str, int]] | None = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.prepare()

    def prepare(self) -> None:
        """Draw the next batch."""
        self._batch = next(self.batches)

    def step(self) -> None:
        """Gradients of the batch, and the update. Collective, but for one process alone."""
        self.loss = self.forward_backward(*self._batch)
        self.update()

    def close(self) -> None:
        """Give the memory back. Collective."""
        self.release()
        self.__dict__.clear()
        gc.collect()  # wrappers and hooks refer to each other


# the last is the device on which to train in bf16: ours by itself, plain torch by autocast; None: on the CPU in fp32
Build = Callable[[Communicator, Shape, Iterator[Batch], int, torch.device | None], Trainee]
_OURS = {
    "DDP": Options(zero=0),
    **{f"ZeRO-{stage}": Options(zero=stage) for stage in (1, 2, 3)},
    "ZeRO-3 gathered": Options(zero=3, share_node=False),
}


def contenders() -> dict[str, Build | str]:
    """By name: how to make it, or why it cannot run here."""
    found: dict[str, Build | str] = {ALONE: partial(_theirs, make=of_torch)}
    found |= {name: partial(_ours, options=options) for name, options in _OURS.items()}
    return found | {name: m if isinstance(m, str) else partial(_theirs, make=m) for name, m in peers().items()}


def contender(
    name: str,
    world: Communicator,
    shape: Shape,
    samples: int,
    of: Iterator[Batch] | None = None,
    device: torch.device | None = None,
) -> Trainee:
    """One that can run here. Collective.

    Args:
        name: Its name.
        world: The ranks.
        shape: What is trained.
        samples: Of a rank's batch.
        of: The rank's batches, instead of new ones from the first on.
        device: Where to train in bf16; None: on the CPU, in fp32.
    """
    build = contenders()[name]
    assert not isinstance(build, str)
    return build(world, shape, of or batches(shape, samples, world.rank), samples, device)


def mean_losses(world: Communicator, trainees: Mapping[str, Trainee], tolerance: float) -> dict[str, float]:
    """The last loss of each, over all ranks. Collective.

    Raises:
        CommunicationError: Two of them disagree; one process alone is none of them.
    """
    losses = np.array([float(trainee.loss) for trainee in trainees.values()])
    world.all_reduce(losses)
    found = dict(zip(trainees, losses.tolist(), strict=True))
    require_alike({name: [loss] for name, loss in found.items() if name != ALONE}, tolerance)
    return found


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _theirs(
    world: Communicator, shape: Shape, of: Iterator[Batch], samples: int, device: torch.device | None, make: MakePeer
) -> Trainee:
    model, keywords = shape.build().to(device), dict[str, Any]()
    if device is not None:
        keywords["precision"] = partial(torch.autocast, device.type, torch.bfloat16)
    peer = make(model, model.loss, _optimizer, world, samples, **keywords)
    return Trainee(of, lambda x, y: peer.gradients(x, y) / world.size, peer.update, peer.release)


def _ours(
    world: Communicator, shape: Shape, of: Iterator[Batch], samples: int, device: torch.device | None, options: Options
) -> Trainee:
    model = shape.build().to(device)
    engine = Engine(
        model, model.loss, _optimizer(model), world, options, precision="fp32" if device is None else "bf16"
    )

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return engine.forward_backward([[(x, y)]], len(x) * world.size)[0]

    def account() -> dict[str, int]:
        values = asdict(engine.memory())
        return {name: nbytes for name, nbytes in values.items() if name != "expected"}

    return Trainee(of, forward_backward, engine.step, engine.close, account)
