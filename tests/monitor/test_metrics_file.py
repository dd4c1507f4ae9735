import json
import math
import os
import subprocess
import sys
import textwrap

import pytest
from pseudo_terminal import ROOT

from mpitrain.errors import InputError
from mpitrain.monitor.run_files import METRICS, MetricsWriter, read_metrics

KEYS = ["step", "loss", "lr", "grad_norm", "samples", "tokens", "step_s", "tokens_per_s", "memory_bytes", "world_size"]


def write_steps(writer, steps, loss=1.0, **extras):
    for step in steps:
        writer.write(
            step=step,
            loss=loss + step,
            lr=1e-3,
            grad_norm=0.5,
            samples=8,
            tokens=1024,
            step_s=0.25,
            tokens_per_s=4096.0,
            memory_bytes=10**9,
            world_size=4,
            **extras,
        )


def run_to(folder, steps, resume_step=None, **options):
    writer = MetricsWriter(folder, resume_step)
    write_steps(writer, steps, **options)
    writer.close()


def test_each_step_is_one_json_line_with_all_keys(tmp_path):
    run_to(tmp_path, [1, 2], ids=[3, 5])
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [[*KEYS, "ids"]] * 2
    assert [line["loss"] for line in read_metrics(tmp_path)] == [2.0, 3.0]
    assert read_metrics(tmp_path / METRICS)[1]["ids"] == [3, 5]


def test_floats_are_read_back_bit_for_bit(tmp_path):
    run_to(tmp_path, [1], loss=1 / 3)
    assert read_metrics(tmp_path)[0]["loss"] == 1 / 3 + 1


def test_non_finite_figures_are_null(tmp_path):
    run_to(tmp_path, [1], loss=math.nan, held_out_loss=-math.inf, mine={"each": [1.0, math.nan]})
    line = read_metrics(tmp_path)[0]
    assert line["mine"] == {"each": [1.0, None]}
    assert line["loss"] is None and line["held_out_loss"] is None


def test_a_written_line_survives_a_kill(tmp_path):
    script = f"""
        import os, signal
        from mpitrain.monitor.run_files import MetricsWriter
        writer = MetricsWriter({str(tmp_path)!r})
        writer.write(step=1, loss=1.0, lr=1.0, grad_norm=None, samples=1, tokens=1, step_s=1.0, tokens_per_s=1.0,
                     memory_bytes=1, world_size=1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60, cwd=ROOT).returncode == -9
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_each_step_has_one_line_after_a_resume(tmp_path):
    run_to(tmp_path, range(1, 11))
    run_to(tmp_path, range(7, 13), resume_step=6, loss=100.0)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[5]["loss"] == 7.0 and lines[6]["loss"] == 107.0
    assert os.listdir(tmp_path) == [METRICS]


def test_an_incomplete_last_line_is_ignored_and_removed_on_resume(tmp_path):
    path = tmp_path / METRICS
    run_to(tmp_path, [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-5])
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    # torn so that it is a whole JSON value, but no whole line
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    run_to(tmp_path, [4], resume_step=3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 4]


def test_a_resume_repairs_a_file_with_damage_and_repeats(tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(b'{"step": 1}\n\0\0\0\0\n[1]\n{"step": 2}\n{"step": 2}\n{"step": 1}\n{"step": 3}\n')
    with pytest.raises(InputError, match="line 2 is damaged"):
        read_metrics(path)
    MetricsWriter(tmp_path, resume_step=2).close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_resume_without_a_file_starts_one(tmp_path):
    run_to(tmp_path, [6], resume_step=5)
    assert [line["step"] for line in read_metrics(tmp_path)] == [6]


def test_a_fresh_start_renames_the_earlier_file(tmp_path):
    for loss in (10.0, 20.0, 30.0):
        run_to(tmp_path, [1], loss=loss)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [31.0]
    assert read_metrics(tmp_path / "metrics.jsonl.1")[0]["loss"] == 11.0
    assert read_metrics(tmp_path / "metrics.jsonl.2")[0]["loss"] == 21.0


def test_a_step_cannot_be_written_twice(tmp_path):
    writer = MetricsWriter(tmp_path)
    write_steps(writer, [3])
    with pytest.raises(ValueError, match="step 3 cannot follow those of step 3"):
        write_steps(writer, [3])
    writer.close()
    run_to(tmp_path, [4], resume_step=3)
    resumed = MetricsWriter(tmp_path, resume_step=4)
    with pytest.raises(ValueError, match="step 4"):
        write_steps(resumed, [4])
    resumed.close()


def test_an_unwritable_run_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"missing/metrics\.jsonl cannot be written \(No such file"):
        MetricsWriter(tmp_path / "missing")
    with pytest.raises(InputError, match="do not exist"):
        read_metrics(tmp_path)
    os.mkfifo(tmp_path / METRICS)  # whose opening would wait for the other end
    for resume_step in (None, 3):
        with pytest.raises(InputError, match="cannot be written"):
            MetricsWriter(tmp_path, resume_step)


def test_a_disk_that_fills_up_within_a_line_is_reported(tmp_path):
    script = f"""
        import resource
        from mpitrain.errors import InputError
        from mpitrain.monitor.run_files import MetricsWriter
        line = dict(loss=1.0, lr=1.0, grad_norm=None, samples=1, tokens=1, step_s=1.0, tokens_per_s=1.0, memory_bytes=1)
        writer = MetricsWriter({str(tmp_path)!r})
        writer.write(step=1, world_size=1, **line)
        room = writer.path.stat().st_size + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))  # Python ignores the signal: the write ends short
        for step in (2, 3):
            try:
                writer.write(step=step, world_size=1, **line)
            except InputError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    short, full = done.stdout.splitlines()
    assert "only a part of the line was written" in short and "make room" in short
    assert "File too large" in full and "make room" in full
    assert (tmp_path / METRICS).read_bytes().count(b"\n") == 1 and (tmp_path / METRICS).read_bytes()[-1:] == b"\n"
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
