"""Runs that earlier versions started: the current version resumes them and gets the same losses.

`earlier.tar.xz` has a run folder for each layout, as commit e84fd78 of November 2026 wrote it: two ranks, a GPT of two
blocks on the text that `_TEXT` is, a checkpoint after step 4, and the metrics of all 8 steps.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import warm
from support import train_command

from mpitrain.data.prepare import prepare

_RUNS = Path(__file__).parent / "earlier.tar.xz"
_TEXT = "".join(f"{i} times {i + 1} is {i * (i + 1)}.\n" for i in range(400))
_SETTINGS = """
    --model.layers 2 --model.width 8 --model.heads 2 --model.sequence 16 --train.batch 4 --train.steps 8
    --checkpoint.every 4 --checkpoint.keep 5 --run.seed 3 --optim.warmup 2
"""
_LAYOUTS = {
    "ddp": "--parallel.zero 0",
    "zero-1": "--parallel.zero 1",
    "zero-2": "--parallel.zero 2 --train.precision bf16",
    "zero-3": "--parallel.zero 3",
    "pipeline": "--parallel.pipeline 2",
    "tensor": "--parallel.tensor 2",
    "server": "--parallel.mode server --parallel.servers 1 --parallel.staleness 0",
    "local": "--parallel.mode local --parallel.local_steps 2",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    (folder / "source").mkdir()
    (folder / "source" / "a.txt").write_text(_TEXT)
    prepare([str(folder / "source")], folder / "data")
    return folder / "data"


def _losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_run_of_an_earlier_version_resumes_with_the_same_losses(layout, data, tmp_path):
    with tarfile.open(_RUNS) as archive:
        members = [member for member in archive if member.name.split("/")[0] == layout]
        archive.extractall(tmp_path, members)
    run = tmp_path / layout
    before = _losses(run)
    settings = f"{_SETTINGS} {_LAYOUTS[layout]}".split()
    done = warm.job(2, train_command("--run.dir", run, "--data.path", data, *settings))
    assert done.returncode == 0, done.stderr
    assert f"resumed from {run}/checkpoints/step-00000004" in done.stdout
    after = _losses(run)
    assert sorted(before) == sorted(after) == list(range(1, 9))
    # the same bits on the machine that wrote them; other processors may add in another order
    tolerance = 1e-2 if layout == "zero-2" else 1e-4
    assert after == pytest.approx(before, rel=tolerance)
    assert len({round(loss, 4) for loss in after.values()}) == 8
