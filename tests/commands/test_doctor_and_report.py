"""Commands that a person runs beside the job."""

from __future__ import annotations

import json
import os

import pytest
from support import one_line

from mpitrain import doctor, report
from mpitrain.monitor.run_files import MetricsWriter


@pytest.mark.ranks(1, 2, 3)
def test_the_doctor_gives_a_verdict_on_every_line(world, capsys):
    code = doctor.main([])
    out = capsys.readouterr().out
    assert code == 0
    if world.rank:
        assert not out
        return
    lines = out.splitlines()
    assert all(line[:4] in ("ok  ", "warn", "BAD ") for line in lines[:-1])
    for subject in ("MPI", "thread level", "mpi4py", "device", "ranks", "cores", "threads", "/dev/shm", "bandwidth"):
        assert any(line[6:].startswith(subject) for line in lines), subject
    if world.size > 1:
        assert "GB/s inside a node" in out


def test_report_summarizes_a_run(tmp_path, capsys):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 5):
        held_out = {"held_out_loss": 2.0, "held_out_token_accuracy": step / 8} if step in (2, 4) else {}
        writer.write(
            step=step, loss=5.0 - step, lr=0.1, grad_norm=1.0, samples=8, tokens=80, step_s=0.5, tokens_per_s=160.0,
            memory_bytes=1, world_size=2, **held_out,
        )  # fmt: skip
    writer.close()
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        "4.0000 -> 1.0000" in out
        and "2.0000 (step 4)" in out
        and "token accuracy   0.25 -> 0.5" in out
        and "16 samples/s (160 tokens/s)" in out
    )
    assert "step-00000004" in out and "token accuracy   0.25 -> 0.5" in out


def test_report_of_an_empty_folder_is_refused(tmp_path, capsys):
    one_line((report.main([str(tmp_path)]), capsys.readouterr().err), "has no finished step; use the folder of a run")


LINE = {"step": 1, "loss": 1.0, "step_s": 0.5, "samples": 8, "tokens": 0, "world_size": 2}
MEMORY = {"parameters": 1, "gradients": 1, "states": 1, "activations": 1, "buffers": 1, "padding": 0, "expected": {}}


@pytest.mark.parametrize("wrong", [[], {}, "1", True, -1, 0, None, 10**30])
def test_report_refuses_metrics_of_wrong_types_in_one_line(tmp_path, capsys, wrong):
    for field in (*LINE, "memory", "held_out_loss"):
        line = json.dumps(LINE | {"memory": MEMORY} | {field: wrong})
        (tmp_path / "metrics.jsonl").write_text(line + "\n")
        code = report.main([str(tmp_path)])
        errors = capsys.readouterr().err
        assert (code, errors.count("\n")) in ((0, 0), (2, 1)) and len(errors) < 1000
        if not isinstance(wrong, (int, type(None))) or isinstance(wrong, bool):
            assert code == 2, f"{field}: {wrong!r} was taken for a number"


def test_report_refuses_other_files_as_metrics_in_one_line(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    for make, undo in [
        (metrics.mkdir, metrics.rmdir),
        (lambda: os.mkfifo(metrics), metrics.unlink),
        (lambda: metrics.symlink_to(metrics), metrics.unlink),
        (lambda: metrics.symlink_to("/dev/zero"), metrics.unlink),
        (lambda: metrics.write_bytes(b"\xff\0\n" * 9), metrics.unlink),
        (lambda: metrics.write_text("[" * 200_000 + "\n"), metrics.unlink),
        (lambda: metrics.write_text('{"step": 1}\n'), metrics.unlink),
    ]:
        make()
        one_line((report.main([str(tmp_path)]), capsys.readouterr().err))
        undo()
