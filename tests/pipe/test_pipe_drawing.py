"""Pictures of schedules, and the command that makes them."""

from __future__ import annotations

import json
import sys

import pytest
from support import one_line

from mpitrain import report
from mpitrain.pipe.draw import text
from mpitrain.pipe.record import from_json, to_json
from mpitrain.pipe.schedules import one_f_one_b, zb_v
from mpitrain.pipe.simulate import simulate


def test_text_shows_who_computes_what_when():
    assert text(simulate(one_f_one_b(2, 2)), 80).splitlines() == [
        "rank 0  F0-F1-......B0----...B1----",
        "rank 1  ...F0-B0----F1-B1----......",
    ]


def test_the_command_draws_in_text(capsys):
    assert report.main(["schedule", "--schedule", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b: 2 ranks, 2 stages, 3 microbatches; 12 units, idle 25.0%, at most 2 microbatches held"
    assert lines[1:] == ["rank 0  F0-F1-......B0----F2-B1----...B2----", "rank 1  ...F0-B0----F1-B1----F2-B2----......"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "terapipe"])
def test_the_command_draws_every_schedule_as_a_picture(schedule, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="a picture needs matplotlib")
    out = tmp_path / "schedule.png"
    arguments = ["schedule", "--schedule", schedule, "--stages", "3", "--microbatches", "4", "--out", str(out)]
    assert report.main(arguments) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_command_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.main(["schedule", "--out", str(tmp_path / "a.png")]) == 2
    assert "pip install mpitrain[monitor]" in capsys.readouterr().err


def test_a_recording_is_drawn_as_it_ran(tmp_path, capsys):
    simulated = simulate(zb_v(2, 3))
    rows = [
        [[type(r.step).__name__, r.step.stage, r.step.microbatch, r.begin, r.end] for r in runs]
        for runs in simulated.runs
    ]
    recording = to_json(simulated.schedule, rows)
    read = from_json(json.loads(json.dumps(recording)))
    assert read.runs == simulated.runs and read.peaks == simulated.peaks
    path = tmp_path / "run.json"
    path.write_text(json.dumps(recording))
    assert report.main(["schedule", "--recording", str(path)]) == 0
    assert "zero-bubble: 2 ranks, 4 stages, 3 microbatches" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{}", "[1]", "not json", '{"schedule": "1f1b", "ranks": 2}'])
def test_a_file_that_is_no_recording_is_refused(content, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert report.main(["schedule", "--recording", str(path)]) == 2
    assert "no recording" in capsys.readouterr().err


def test_bad_numbers_end_with_one_line(capsys):
    one_line((report.main(["schedule", "--stages", "0"]), capsys.readouterr().err))
