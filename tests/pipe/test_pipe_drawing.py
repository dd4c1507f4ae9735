"""Pictures of schedules, and the command that draws them."""

from __future__ import annotations

import sys

import pytest
from support import one_line

from mpitrain import report
from mpitrain.pipe.draw import text
from mpitrain.pipe.schedule import one_f_one_b
from mpitrain.pipe.simulate import simulate


def test_text_shows_the_steps_of_every_rank():
    assert text(simulate(one_f_one_b(2, 2)), 80).splitlines() == [
        "rank 0  F0-F1-......B0----...B1----",
        "rank 1  ...F0-B0----F1-B1----......",
    ]


def test_the_command_prints_a_schedule(capsys):
    assert report.main(["schedule", "--schedule", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b: 2 ranks, 2 stages, 3 microbatches; 12 units, idle 25.0%, at most 2 microbatches in flight"
    assert lines[1:] == ["rank 0  F0-F1-......B0----F2-B1----...B2----", "rank 1  ...F0-B0----F1-B1----F2-B2----......"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "terapipe"])
def test_the_command_draws_every_schedule_as_a_picture(schedule, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="a picture needs matplotlib")
    out = tmp_path / "schedule.png"
    arguments = ["schedule", "--schedule", schedule, "--stages", "3", "--microbatches", "4", "--out", str(out)]
    assert report.main(arguments) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_error_suggests_the_fix(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.main(["schedule", "--out", str(tmp_path / "a.png")]) == 2
    assert "pip install mpitrain[monitor]" in capsys.readouterr().err


def test_invalid_numbers_are_refused_in_one_line(capsys):
    one_line((report.main(["schedule", "--stages", "0"]), capsys.readouterr().err))
