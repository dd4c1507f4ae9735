"""The banner and the last lines that a run prints, tested with stand-ins for the trainer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.config.settings import Config
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.storage.text import counted, duration, short
from mpitrain.trainer.recording import console
from mpitrain.trainer.stopping import NonFiniteSteps


def run(
    *,
    step: int = 0,
    tokens: int = 128,
    held_out: bool = True,
    warm_up: str = "",
    stop: str = "",
    speeds: tuple[float, ...] = (),
) -> Any:
    """Return a stand-in for a trainer, with the attributes that its banner and last lines use."""
    config = Config.from_dict({"train": {"batch": 32, "microbatch": 4, "steps": 300}, "data": {"path": "data/mine"}})
    return SimpleNamespace(
        config=config,
        world=SimpleNamespace(size=8, rank=0, num_nodes=2, library="Open MPI 5.0.11"),
        places=SimpleNamespace(workers=VirtualWorkers(0, 8, 8, speeds=speeds)),
        devices="CPU",
        parameters=429_568,
        data=range(183_421),
        held_out=range(2_048) if held_out else None,
        tokens=tokens,
        step=step,
        done=step == 300 or bool(stop),
        stop_reason=stop,
        batch_sizes=SimpleNamespace(before=lambda step: 32 * step, describe=lambda: warm_up),
        strategy=SimpleNamespace(describe=lambda: ""),
        engine=SimpleNamespace(sharding=SimpleNamespace(zero=1)),
        goodput=None,
        folder=SimpleNamespace(
            path=Path("runs/first"),
            log=SimpleNamespace(info=print),
            resume_command=lambda: "mpirun ... --run.resume true",
        ),
    )


@pytest.fixture
def last_lines(monkeypatch, capsys):
    """Return a function that returns the last lines of a run, given its first step, its loss and its seconds."""
    monkeypatch.setattr(console, "peak_of_ranks", lambda trainer: 512_000_000)
    monkeypatch.setattr(console.time, "monotonic", lambda: 1000.0)

    def lines(trainer, *, start=0, loss=2.41234, seconds=80.0, skipped=0, series=NonFiniteSteps()) -> list[str]:
        callback = console.Console(SimpleNamespace(series=series))
        trainer.began, trainer.start, trainer.skipped = 900.0, start, skipped
        callback._loss, callback._step_seconds = loss, seconds
        if trainer.held_out is not None:
            callback._held_out = {"loss": "2.4400", "accuracy": "0.91"}
        capsys.readouterr()
        callback.on_fit_end(trainer)
        return capsys.readouterr().out.splitlines()[1:]  # the first one is of the log

    return lines


def test_banner_of_a_new_run(monkeypatch):
    monkeypatch.setattr(console.torch, "get_num_threads", lambda: 1)
    lines = console.banner(run()).splitlines()
    assert lines == [
        f"mpitrain {console.__version__}",
        "  ranks        8 on 2 nodes, 1 thread each, CPU",
        "  MPI          Open MPI 5.0.11",
        "  model        gpt, 429,568 parameters",
        "  data         data/mine",
        "  samples      183,421 for training, 2,048 held out, 128 tokens each",
        "  batch        32 samples, at most 4 per rank and forward pass",
        "  steps        300 (0.0523 epochs)",
        "  precision    fp32",
        "  run folder   runs/first",
        "  parallel     zero 1 (auto)",
    ]


def test_banner_of_a_resumed_run():
    text = console.banner(run(step=100, tokens=0, held_out=False, warm_up="8 up to step 3"))
    assert "\n  samples      183,421 for training\n" in text
    assert "300, resumed after step 100 (" in text
    assert "\n  warm-up      8 up to step 3\n" in text


def test_banner_shows_shares_in_proportion_to_speeds():
    text = console.banner(run(speeds=(1.0,) * 6 + (3.0, 1.0)))
    assert text.endswith("zero 1 (auto), shares of 3 to 11 samples")
    assert "at most 4 per rank and forward pass" in text


def test_closing_lines_show_results_and_next_commands(last_lines):
    assert last_lines(run(step=300), start=100) == [
        "done at step 300 of 300 (200 since the resume)",
        "  loss                2.4123",
        "  held-out loss       2.4400",
        "  held-out accuracy   0.91",
        "  throughput          80 samples/s (10.2k tokens/s) in steps",
        "  time                0:01:40, of which 0:01:20 in 200 steps",
        "  peak memory         at most 512MB per rank",
        "  run folder          runs/first",
        "  continue            mpirun ... --run.resume true",
        "  inspect             python -m mpitrain.report runs/first",
    ]


def test_closing_lines_of_a_stopped_run_and_without_steps(last_lines):
    stopped = "\n".join(last_lines(run(step=150, held_out=False, tokens=0)))
    assert stopped.startswith("stopped at step 150 of 300\n") and "  resume " in stopped
    assert "held-out" not in stopped and "tokens" not in stopped
    idle = "\n".join(last_lines(run(step=300), start=300, loss=math.nan, seconds=0.0))
    assert "none, because no step was taken" in idle and "throughput          none" in idle
    assert "  loss                nan" in last_lines(run(step=300), loss=math.nan)


def test_closing_lines_give_the_reason_for_an_early_end(last_lines):
    early = last_lines(run(step=150, stop="no better since step 100"), skipped=1)
    assert early[0] == "done at step 150 of 300, no better since step 100"
    assert early[-2].endswith("--run.resume true --train.patience 0")
    assert "  skipped             1 step, because gradients were not finite" in early
    bad = last_lines(run(step=300), series=NonFiniteSteps(since=200))
    assert bad[0] == "ended at step 300 of 300, nothing learned since step 200" and "continue" not in "".join(bad)


def test_numbers_are_formatted_for_people():
    assert [short(number) for number in (0, 7.5, 999, 999.6, 1000, 12_345, 999_499, 999_501)] == [
        "0", "7.5", "999", "1k", "1k", "12.3k", "999k", "1M",
    ]  # fmt: skip
    assert [short(number) for number in (4.07e6, 1.21e9, 3.1e15)] == ["4.07M", "1.21G", "3100T"]
    assert [duration(s) for s in (0, 59.6, 252, 421_203, math.nan, math.inf, -1)] == [
        "0:00:00", "0:01:00", "0:04:12", "117:00:03", "-:--:--", "-:--:--", "-:--:--",
    ]  # fmt: skip
    assert counted(1, "rank") == "1 rank" and counted(1234, "rank") == "1,234 ranks"
