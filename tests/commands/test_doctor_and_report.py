"""The commands a person runs beside the job."""

from __future__ import annotations

import pytest

from mpitrain import doctor, report
from mpitrain.monitor.metrics import MetricsWriter


@pytest.mark.ranks(1, 2, 3)
def test_the_doctor_gives_a_verdict_on_every_line(world, capsys):
    code = doctor.main()
    out = capsys.readouterr().out
    assert code == 0
    if world.rank:
        assert not out
        return
    lines = out.splitlines()
    assert all(line[:4] in ("ok  ", "warn", "BAD ") for line in lines[:-1])
    for subject in ("MPI", "thread level", "mpi4py", "CUDA", "ranks", "cores", "threads", "/dev/shm", "bandwidth"):
        assert any(line[6:].startswith(subject) for line in lines), subject
    if world.size > 1:
        assert "GB/s inside a node" in out


def test_report_sums_up_a_run(tmp_path, capsys):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 5):
        held = {"held_out_loss": 2.0} if step == 4 else {}
        writer.write(
            step=step, loss=5.0 - step, lr=0.1, grad_norm=1.0, samples=8, tokens=80, step_s=0.5, tokens_per_s=160.0,
            memory_bytes=1, world_size=2, **held,
        )  # fmt: skip
    writer.close()
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "4.0000 -> 1.0000" in out and "2.0000 (step 4)" in out and "16 samples/s (160 tokens/s)" in out
    assert "step-00000004" in out


def test_report_of_nothing_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "metrics" in capsys.readouterr().err
