"""The steps at which a run is saved: at a fixed interval or at the cheapest one, in every mode and on all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import mpitrain as mt
from mpitrain.config.settings import Config
from mpitrain.storage.text import duration_text
from mpitrain.trainer import saving
from mpitrain.trainer.run import Step
from mpitrain.trainer.saving import SaveSchedule, daly, saves_after

HOUR = 3600.0


class Pretend:
    """A stand-in for a trainer with a simulated clock."""

    def __init__(self, monkeypatch, nodes=4, **checkpoint):
        self.config = Config.from_dict({"train": {"steps": 10**6}, "checkpoint": {"every": "auto"} | checkpoint})
        self.world = SimpleNamespace(on_root=lambda function: function(), num_nodes=nodes)
        self.store = SimpleNamespace(waited_seconds=0.0, write_seconds=0.0)
        self.step, self.last_step, self.clock, self.said, self.say = (
            0,
            False,
            0.0,
            [],
            lambda text: self.said.append(text),
        )
        monkeypatch.setattr(saving.time, "perf_counter", lambda: self.clock)
        self.schedule = SaveSchedule(self.config)
        self.schedule.on_fit_start(self)

    def until_saved(self, step_seconds, save_seconds):
        """Take steps until one is saved and return its number."""
        while True:
            self.step += 1
            self.clock += step_seconds
            self.schedule.on_step_end(self, Step(self.step, None, 0.0, 0.0, 0.0, False))
            if self.schedule.due(self.step - 1, self.step):
                self.clock += save_seconds
                self.schedule.on_save(self, None)
                return self.step


def test_the_interval_is_dalys_of_what_saves_and_steps_take_and_one_line_says_so(monkeypatch):
    trainer = Pretend(monkeypatch, node_mtbf=4320.0)
    assert trainer.until_saved(0.5, 2.1) == 20  # as long as nothing is known
    interval = round(daly(2.1, 1080 * HOUR) / 0.5)
    why = "a save takes 2.1 s, and one of 4 nodes fails every 45 days (Daly 2006)"
    assert trainer.said == [f"checkpoints every {interval:,} steps: {why}"]
    assert trainer.schedule.next_after(20) == 20 + interval and trainer.schedule.next_after(10**9) == 10**9 + 1
    assert trainer.until_saved(0.5, 2.1) == 20 + interval and len(trainer.said) == 1
    assert trainer.until_saved(0.25, 2.1) == 20 + 2 * interval  # steps are faster from now on
    assert trainer.until_saved(0.25, 2.1) == 20 + 4 * interval and len(trainer.said) == 2
    trainer.step = 7  # ranks were lost, and it goes on from an earlier step
    trainer.schedule.on_fit_start(trainer)
    assert trainer.until_saved(0.25, 2.1) == 7 + 2 * interval


def test_the_first_save_counts_only_as_long_as_it_is_all_there_is(monkeypatch):
    trainer = Pretend(monkeypatch, nodes=1, node_mtbf=1.0)
    steps = [trainer.until_saved(1.0, seconds) for seconds in (2.0, 0.5, 0.5)]
    assert steps == [20, 20 + round(daly(2.0, HOUR)), 20 + round(daly(2.0, HOUR)) + round(daly(0.5, HOUR))]


def test_in_the_background_the_time_held_up_counts_and_the_writing_is_waited_for(monkeypatch):
    trainer = Pretend(monkeypatch, nodes=1, node_mtbf=1.0, background=True)
    trainer.until_saved(1.0, 0.02)
    assert trainer.schedule.next_after(20) == 20 + 12  # sqrt(2 * 0.02 s * 1 h) = 12 s
    trainer.store.waited_seconds, trainer.store.write_seconds = 3.0, 14.5
    trainer.until_saved(1.0, 3.02)
    assert trainer.schedule.next_after(32) == 32 + 15
    trainer.store.write_seconds = 89.5
    trainer.until_saved(1.0, 3.02)
    why = "and this node fails every 60 minutes (Daly 2006)"
    assert trainer.said == [
        f"checkpoints every 12 steps: a save delays training by 0.02 s, {why}",
        f"checkpoints every 90 steps: a save delays training by 0.02 s and is written in 90 s, {why}",
    ]


def test_room_is_asked_for_as_if_every_step_were_saved():
    auto = Config.from_dict({"train": {"steps": 50}, "checkpoint": {"every": "auto"}})
    assert [saves_after(step, auto) for step in (0, 49, 50)] == [50, 1, 0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (0.0451, "0.045 s"), (2.1, "2.1 s"), (119, "119 s"), (720, "12 minutes"), (4e6, "46 days")],
)
def test_times_as_people_say_them(seconds, text):
    assert duration_text(seconds) == text


class Notes(mt.Callback):
    def __init__(self):
        self.saved = []

    def on_fit_start(self, trainer):
        self.saved.append(trainer.step)

    def on_save(self, trainer, folder):
        self.saved.append(trainer.step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parallel", "first"),
    [({}, 20), ({"background": True}, 20), ({"mode": "local", "local_steps": 8}, 24), ({"mode": "server"}, 20)],
    ids=["sync", "background", "local", "server"],
)
def test_all_ranks_save_together_and_a_resumed_run_goes_on(world, folder, text, parallel, first):
    parallel = dict(parallel)
    sections = {
        "run": {"dir": str(folder / "r")},
        "data": {"path": text},
        "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 16},
        "train": {"batch": 4, "evaluate_every": 15, "evaluate_samples": 4},
        "checkpoint": {"every": "auto", "node_mtbf": 1e-6, "background": parallel.pop("background", False)},
        "parallel": parallel,
    }
    saved_steps = []
    for steps in (70, 100):
        notes = Notes()
        sections["train"]["steps"] = steps
        trainer = mt.Trainer(sections, [notes], world=world)
        with trainer.working():
            assert trainer.train() == 0
        saved_steps.append(notes.saved)
    assert world.all_gather_object(saved_steps) == [saved_steps] * 2
    (start, second, *more), (again, after, *_) = saved_steps
    assert (start, second, more[-1], again) == (0, first, 70, 70)
    assert len(more) >= 2 or sections["checkpoint"]["background"]  # a slow disk may write one for that long
    assert after == (96 if first == 24 else 90)  # nothing is known at a new start
