"""parallel.mode server with staleness: recorded runs with random delays of workers and servers.

A run records which steps each server had applied when it sent the parameters for a part, and the order in which each
server applied the parts. The bound is that of Ho et al. 2013: a part of step t has been computed with all updates of
the steps up to t - 1 - s.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from test_bulk_synchronous import GPT
from train.jobs import run

import mpitrain as mt
from mpitrain import report
from mpitrain.comm.memory import arena
from mpitrain.data import SampleOrder
from mpitrain.loose.clock import Applied
from mpitrain.loose.server import ServedWorker, Server
from mpitrain.loose.sharding import ShareUpdate
from mpitrain.monitor import read_metrics

STEPS = 6


@dataclass
class Recording:
    """Events on one rank."""

    computed: list[tuple[int, int, list[tuple[int, int]]]] = field(default_factory=list)
    """Step and number of each part, and (server, its completed steps) for every bucket received for it."""
    applied: list[tuple[int, int, int]] = field(default_factory=list)
    """Parts applied by this rank's server, in order: step, number, and the steps completed before."""
    ids: list[int] = field(default_factory=list)
    """Numbers of the samples that the rank trained on."""
    received_buckets: list[tuple[int, int]] = field(default_factory=list)
    """Buckets received for the current part, as in `computed`; also a run's last parameters."""


@pytest.fixture
def recording(monkeypatch):
    """Record this rank's worker and server from now on, and delay both at random, drawn from `.chance`."""
    notes = Recording()
    received_buckets = notes.received_buckets
    notes.chance = random.Random(0)
    receive, commit, add, apply = ServedWorker._receive, ServedWorker.commit, Applied.add, Server._apply_commits

    def received(worker, letter):
        receive(worker, letter)
        received_buckets.append((int(letter.words[2]), int(letter.words[3])))

    def committed(worker, words, unused):
        notes.computed.append((worker.portion.step, worker.portion.part, list(received_buckets)))
        received_buckets.clear()
        commit(worker, words, unused)

    def added(applied, portion):
        assert portion not in applied
        notes.applied.append((portion.step, portion.part, applied.completed))
        return add(applied, portion)

    def apply_commits(server):
        if notes.chance.random() < 0.2:
            time.sleep(notes.chance.random() * 0.01)
        apply(server)

    monkeypatch.setattr(ServedWorker, "_receive", received)
    monkeypatch.setattr(ServedWorker, "commit", committed)
    monkeypatch.setattr(Applied, "add", added)
    monkeypatch.setattr(Server, "_apply_commits", apply_commits)
    return notes


class Uneven(mt.Trainer):
    """A trainer with random delays in each part."""

    notes: Recording

    def train_step(self, batch):
        self.notes.ids += batch.ids.tolist()
        self._pause()
        step = super().train_step(batch)
        self._pause()
        return step

    def _pause(self):
        if self.notes.chance.random() < 0.4:
            time.sleep(self.notes.chance.random() * 0.03)


def sections(text, folder, staleness, servers, **more):
    defaults = {
        "run": {"dir": str(folder)},
        "data": {"path": text, "record_ids": True},
        "model": {**GPT, "layers": 1, "width": 16},
        "train": {"steps": STEPS, "batch": 13, "clip": 0.5, "evaluate_every": 4, "evaluate_samples": 8},
        "optim": {"warmup": 0},
        "parallel": {"mode": "server", "servers": servers, "staleness": staleness},
        "checkpoint": {"every": 0},
        "comm": {"bucket_mb": 0.01},
    }
    return {name: defaults.get(name, {}) | more.get(name, {}) for name in defaults | more}


def train_and_record(world, notes, settings, seed=0, kind=Uneven):
    """Train while recording to `notes`; return the trainer, its metrics and the recordings of all ranks."""
    notes.chance = random.Random(1000 * seed + world.rank)
    for record in (notes.computed, notes.applied, notes.ids, notes.received_buckets):
        record.clear()
    world.barrier()
    trainer = kind(settings, world=world)
    trainer.notes = notes
    with trainer.working():
        assert trainer.train() == 0
    all_notes = world.all_gather_object([notes.computed, notes.applied, notes.ids])
    return trainer, read_metrics(trainer.folder.path), [Recording(*each) for each in all_notes]


def assert_within_bound(trainer, lines, recorded, workers, servers, staleness):
    """Check that every part was computed and applied once, with parameters no older than the bound allows."""
    parts = {(step, part) for step in range(1, STEPS + 1) for part in range(workers)}
    computed = [each for notes in recorded for each in notes.computed]
    assert len(computed) == len(parts) and {(step, part) for step, part, _ in computed} == parts
    serving = [notes.applied for notes in recorded if notes.applied]
    assert len(serving) == servers
    for applied in serving:
        assert len(applied) == len(parts) and {(step, part) for step, part, _ in applied} == parts
    ids = Counter(number for notes in recorded for number in notes.ids)
    assert ids == Counter(number for m in lines for number in m["ids"]) and len(lines) == STEPS
    order = SampleOrder(len(trainer.data), trainer.config.run.seed)
    assert [number for m in lines for number in m["ids"]] == order.ids(0, 13 * STEPS).tolist()
    assert all(torch.isfinite(torch.tensor([m["loss"], m["grad_norm"]])).all() for m in lines)
    if staleness == "none":
        return
    for step, _, received_buckets in computed:
        assert {server for server, _ in received_buckets} == set(range(servers))
        assert all(completed >= step - 1 - staleness for _, completed in received_buckets)
    for applied in serving:
        assert all(completed >= step - 1 - staleness for step, _, completed in applied)
    if staleness:
        assert max(m["ahead_max"] for m in lines) <= staleness
        assert max(m["staleness_max"] for m in lines) <= 2 * staleness + 1
        assert all(0 <= m["staleness_mean"] <= m["staleness_max"] + 1e-9 for m in lines)


def check_bound(world, text, folder, recording, servers, seeds):
    workers = world.size - servers
    for staleness in (0, 1, 3, "none"):
        for seed in seeds:
            settings = sections(text, folder / f"{staleness}-{servers}-{seed}", staleness, servers)
            trainer, lines, recorded = train_and_record(world, recording, settings, seed)
            assert_within_bound(trainer, lines, recorded, workers, servers or world.size, staleness)


@pytest.mark.ranks(2, 4)
def test_no_part_uses_parameters_older_than_the_bound(world, text, folder, recording):
    check_bound(world, text, folder, recording, {2: 0, 4: 1}[world.size], [1])


@pytest.mark.campaign
@pytest.mark.ranks(1, 2, 3, 4, 6)
def test_no_part_uses_parameters_older_than_the_bound_at_one_to_six_workers(world, text, folder, recording):
    for servers in {1: [0], 2: [0, 1], 3: [0], 4: [0], 6: [0, 1]}[world.size]:  # 1, 2 and 1, 3, 4, 6 and 5 workers
        check_bound(world, text, folder, recording, servers, [2, 3])


@pytest.mark.campaign
@pytest.mark.ranks(3)
def test_the_bound_holds_without_shared_memory(world, text, folder, recording, monkeypatch):
    monkeypatch.setattr(arena, "_shared_window", lambda *_: None)
    for servers in (0, 1):
        check_bound(world, text, folder, recording, servers, [4])


class Sleepy(mt.Trainer):
    """A trainer whose second worker sleeps in its first part; workers record parameters and gradients of parts."""

    notes: Recording

    def train_step(self, batch):
        if self.world.rank == 1 and not self.notes.ids:
            time.sleep(1.0)
        self.notes.ids += batch.ids.tolist()
        step = super().train_step(batch)
        flats = self.engine.sharding.flats
        weight = len(batch.ids) / self.config.train.batch
        state = [torch.cat([arena.tensor for arena in arenas]) for arenas in (flats.parameters, flats.gradients)]
        self.seen = [*getattr(self, "seen", []), (state[0], state[1] / weight, step.lr, weight)]
        return step


@pytest.fixture
def rates(monkeypatch):
    """Record for each update of this rank's server its learning rate, and (lr, weight, staleness) of each part."""
    rates, apply_commits, apply = [], Server._apply_commits, ShareUpdate.apply

    def record_rates(server):
        late = [(c.lr, c.weight, max(0.0, server.progress - c.progress)) for _, c in server._ready]
        if late:
            rates.append(late)
        apply_commits(server)

    def applied(update, buckets, lr, *rest):
        rates[-1] = (lr, rates[-1])
        apply(update, buckets, lr, *rest)

    monkeypatch.setattr(Server, "_apply_commits", record_rates)
    monkeypatch.setattr(ShareUpdate, "apply", applied)
    return rates


@pytest.mark.ranks(3)
def test_staleness_lr_divides_the_learning_rate_of_late_updates(world, text, folder, recording, rates, capsys):
    plain = {"optim": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0}, "train": {"clip": 0.0}}
    settings = sections(text, folder / "r", "none", 1, **plain)
    settings["parallel"]["staleness_lr"] = True
    trainer, lines, recorded = train_and_record(world, recording, settings, kind=Sleepy)
    counts = [len(notes.computed) for notes in recorded]
    # the slow worker gets fewer parts
    assert counts[2] == 0 and counts[0] + counts[1] == 2 * STEPS and counts[0] > counts[1] >= 1
    if world.rank == 0:
        first, second, third = trainer.seen[:3]  # while the other sleeps
        for (x, gradient, lr, weight), (after, *_) in ((first, second), (second, third)):
            assert torch.allclose(after, x - lr * weight * gradient, rtol=0, atol=1e-6)
            assert not torch.equal(after, x)
    assert max(m["staleness_max"] for m in lines) > 1.0  # of the part that slept
    if world.rank == 2:  # the server; Zhang et al. 2016
        assert all(rate == pytest.approx(sum(lr * w / max(1, late) for lr, w, late in parts)) for rate, parts in rates)
        assert sum(late > 1.0 for _, parts in rates for *_, late in parts) > 0
    if world.rank == 0:
        capsys.readouterr()
        assert report.main([str(folder / "r")]) == 0
        output = capsys.readouterr().out
        assert f"{lines[-1]['loss']:.4f}" in output and "steps ahead of the slowest" in output


@pytest.mark.ranks(2)
def test_a_run_with_staleness_can_be_stopped_and_resumed(world, text, folder):
    class StopAt(mt.Callback):
        def on_update(self, trainer, step):
            if step.number >= 2 and trainer.world.rank == 1:
                trainer.request_stop("seen enough")

    settings = sections(text, folder / "r", 1, 0, train={"steps": 12})
    trainer = mt.Trainer(settings, [StopAt()], world=world)
    with trainer.working():
        assert trainer.train() == mt.errors.EXIT_REQUEUE
    assert 2 <= trainer.step < 12
    lines = run(world, folder / "r", **{name: keys for name, keys in settings.items() if name != "run"})
    assert [m["step"] for m in lines] == list(range(1, 13))
    order = SampleOrder(len(trainer.data), trainer.config.run.seed)
    assert [n for m in lines for n in m["ids"]] == order.ids(0, 12 * 13).tolist()
