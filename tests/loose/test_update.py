"""The update that a server computes from the gradients of workers, with made-up numbers."""

from __future__ import annotations

import math

import pytest
import torch
from support import config_of
from torch import nn

from mpitrain.loose.clock import Clock, Commit, History, LetterKind, StepRecord
from mpitrain.loose.server import Server
from mpitrain.loose.sharding import Roles, ServedSharding

LR, WEIGHTS = 0.5, (0.5, 0.25, 0.25)


class Flats:
    """Gradients of three workers in memory that the server can access."""

    def __init__(self, buckets, gradients):
        self.buckets, self._gradients = buckets, gradients

    def can_access(self, rank):
        return True

    def gradient_share(self, worker, bucket, share):
        return self._gradients[worker][bucket]


class Box:
    """A mailbox that keeps the posted messages."""

    rank, size = 0, 1

    def __init__(self):
        self.posted = []

    def post(self, dest, words, payload=None):
        self.posted.append(words)


@pytest.fixture
def served(world):
    """Yield a maker of servers, their mailbox, the gradients [worker][bucket], and a function for the parameters."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    sharding = ServedSharding(module, optimizer, world, config_of(bucket_mb=1e-5), world, Roles.of(1, 0))
    count = len(sharding.flats.buckets)
    assert count > 1
    gradients = [[torch.randn_like(sharding.published.bucket(b)) for b in range(count)] for _ in range(3)]
    flats, roles, boxes = Flats(sharding.flats.buckets, gradients), Roles((0, 1, 2), (0,)), (Box(), Box())

    def make(staleness, **settings):
        before, config = History(3, 4), config_of(mode="server", staleness=staleness, **settings)
        clock = Clock(before.applied(), [0, 1, 2], None if staleness == "none" else staleness)
        return Server(0, roles, flats, sharding.update, boxes, before, clock, config, 4, {0: 8, 1: 0, 2: 2}, {})

    yield make, boxes[1], gradients, lambda: [sharding.published.bucket(b).clone() for b in range(count)]
    sharding.close()


def commit(part, progress, factor=1.0, norm=1.0, loss=1.0):
    return Commit(5, part, LR, WEIGHTS[part], factor, loss, norm, progress, part)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("corrected", [False, True])
def test_staleness_lr_divides_each_update_by_its_staleness(served, corrected):
    make, box, gradients, values = served
    server = make("none", staleness_lr=corrected)
    server.progress = 9.5
    server._ready = [(0, commit(0, 9.5)), (1, commit(1, 9.0, factor=0.1)), (2, commit(2, 5.5))]  # 0, 0.5 and 4 late
    before = values()
    server._apply_commits()
    factors = (1.0, 0.1, 0.25 if corrected else 1.0)  # Zhang et al. 2016: 1 / staleness, and never more than 1
    for b, (old, new) in enumerate(zip(before, values(), strict=True)):
        gradient = sum(factor * buckets[b] for factor, buckets in zip(factors, gradients, strict=True))
        assert torch.allclose(new, old - LR * gradient, rtol=1e-5, atol=1e-6)
    assert server.progress == 10.5 and server.applied.completed == 5
    (words,) = box.posted
    record = StepRecord(*words[1:])
    assert words[0] == LetterKind.RECORD and record.step == 5 and record.loss == 3.0 and not record.skipped
    assert (record.staleness_mean, record.staleness_max, record.ahead_max) == (1.5, 4.0, 2)
    assert record.between_nodes == 10 and record.norm == 1.0


@pytest.mark.ranks(1)
def test_non_finite_gradients_are_skipped_and_the_step_is_marked(served):
    make, box, gradients, values = served
    server, before = make(2), values()
    for bucket in gradients[1]:
        bucket.fill_(math.inf)
    server._ready = [(1, commit(1, 4.0, factor=0.0, norm=math.nan, loss=math.inf)), (0, commit(0, 4.0))]
    server._apply_commits()
    for b, (old, new) in enumerate(zip(before, values(), strict=True)):
        assert torch.allclose(new, old - LR * gradients[0][b], rtol=1e-5, atol=1e-6)
    between = values()
    server._ready = [(2, commit(2, 4.0, factor=0.0, norm=math.nan, loss=-math.inf))]
    server._apply_commits()  # nothing of it can be used
    assert all(torch.equal(old, new) for old, new in zip(between, values(), strict=True))
    record = StepRecord(*box.posted[0][1:])
    assert record.skipped == 1 and math.isnan(record.norm) and not math.isfinite(record.loss)
