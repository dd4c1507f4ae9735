"""What a server is told once, and what it keeps of letters until it can do what they ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mpitrain.loose.letters import Commit


@dataclass(frozen=True)
class Rules:
    """What servers are told once.

    Attributes:
        staleness: How many steps a worker may be ahead of the slowest; None: there is no bound.
        corrected: Divide the learning rate of an update by its staleness (Zhang et al. 2016).
        clip: The largest norm of gradients; 0: as they are.
    """

    staleness: int | None
    corrected: bool
    clip: float


@dataclass
class Pull:
    """A worker that waits for parameters with all updates of the steps up to `least`."""

    worker: int
    least: int
    final: bool


@dataclass
class Summing:
    """A bulk-synchronous step, as far as its gradients have come."""

    added: list[int]  # of each bucket, how many parts; they are added in order
    waiting: list[dict[int, torch.Tensor]]  # of each bucket, gradients of later parts
    commits: dict[int, Commit] = field(default_factory=dict)  # by part
    told: bool = False  # whether the other servers know this one's squares
