"""RUN/events.jsonl as trainers write it: every start, save, evaluation and end, in each mode of training."""

from __future__ import annotations

import pytest

import mpitrain as mt
from mpitrain.errors import InputError
from mpitrain.monitor import EventLog, read_events, read_metrics

SMALL = {
    "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 16},
    "train": {"steps": 4, "batch": 6, "evaluate_samples": 8, "evaluate_every": 2},
    "checkpoint": {"every": 2},
}


def kinds(events):
    return [(event["event"], event["step"]) for event in events]


class StopOrFail(mt.Callback):
    def __init__(self, at=0, error=None):
        self.at, self.error = at, error

    def on_update(self, trainer, step):
        if step.number == self.at and trainer.world.rank == trainer.world.size - 1:
            trainer.request_stop("seen enough")

    def on_fit_start(self, trainer):
        if self.error is not None:
            raise self.error


def fit(world, folder, text, parallel=None, **how):
    settings = SMALL | {"run": {"dir": str(folder)}, "data": {"path": text}, "parallel": parallel or {}}
    trainer = mt.Trainer(settings, [StopOrFail(**how)], world=world)
    with trainer.working():
        return trainer.train()


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, marks=pytest.mark.ranks(3)),
        pytest.param({"mode": "local", "local_steps": 2}, marks=pytest.mark.ranks(2)),
        pytest.param({"mode": "server"}, marks=pytest.mark.ranks(3)),
    ],
    ids=str,
)
def test_events_of_stopped_failed_and_finished_starts(world, folder, text, parallel):
    run = folder / "r"
    assert fit(world, run, text, parallel, at=2) == 75
    with pytest.raises(InputError):
        fit(world, run, text, parallel, error=InputError("optim.lr is odd", agreed=True))
    assert fit(world, run, text, parallel) == 0
    world.barrier()
    events = read_events(run)
    first = [("start", 0), ("evaluate", 2), ("stop", 2), ("save", 2), ("end", 2)]
    assert kinds(events) == [*first, ("end", 2), ("start", 2), ("evaluate", 4), ("save", 4), ("end", 4)]
    start, stop, failed, again, done = (events[i] for i in (0, 2, 5, 6, 9))
    assert start["resumed_step"] is None and again["resumed_step"] == 2 and start["ranks"] == world.size
    assert len(start["hosts"]) == start["nodes"] == 1 and start["steps"] == 4 and start["parameters"] > 0
    assert start["config"]["train"]["batch"] == 6 and all(start[k] for k in ("mpi", "torch", "python", "cpu", "cores"))
    assert stop["reason"] in ("seen enough", "another rank requested it")
    assert events[3]["folder"] == "step-00000002" and 0 < events[3]["seconds"] < 60
    assert [event.get("outcome") for event in (events[4], failed, done)] == ["stopped", "failed", "done"]
    assert failed["message"] == "optim.lr is odd" and done["message"] == "" and done["peak_memory_bytes"] > 10**6
    lines = read_metrics(run)
    times = [line["time"] for line in lines]
    assert times == sorted(times) and start["time"] < times[0] and times[-1] < done["time"]
    assert events[7]["loss"] == lines[3]["held_out_loss"]


@pytest.mark.ranks(2)
def test_unwritable_events_are_logged_once_and_training_continues(world, folder, text, monkeypatch):
    def fail(log, *_, **__):
        raise InputError("events cannot be written (the disk is full); make room")

    monkeypatch.setattr(EventLog, "write", fail)
    assert fit(world, folder / "r", text) == 0
    world.barrier()
    assert read_events(folder / "r") == [] and len(read_metrics(folder / "r")) == 4
    logs = [(folder / f"r/logs/rank-{rank:05d}.log").read_text() for rank in range(world.size)]
    assert [log.count("WARNING events cannot be written (the disk is full)") for log in logs] == [1, 0]
