"""Reports of real runs: eight ranks with a kill and a restart, and DDP beside ZeRO-3."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from monitor_browser import browser, count_marks, require_browser
from support import PATIENCE, clean_environment, train_command
from warm import shared

from mpitrain import report
from mpitrain.monitor.report.findings import findings
from mpitrain.monitor.report.reading import read_run

RANKS, STEPS = 8, 60
ARGUMENTS = (
    "--model.layers", 2, "--model.width", 128, "--model.sequence", 64, "--train.batch", 16, "--train.steps", STEPS,
    "--train.evaluate_every", 20, "--checkpoint.every", 10, "--parallel.share_node", "false",
)  # fmt: skip


def start(folder: Path, zero: int) -> subprocess.Popen[bytes]:
    command = shared().launched(RANKS, train_command("--run.dir", folder, "--parallel.zero", zero, *ARGUMENTS))
    log = open(f"{folder}.log", "ab")  # noqa: SIM115 - of the job
    return subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)


def kill_a_rank_after(folder: Path, job: subprocess.Popen[bytes], step: int) -> None:
    """Kill rank 3 by its process id, once a step is done and a checkpoint exists."""
    metrics, until = folder / "metrics.jsonl", time.monotonic() + 120 * PATIENCE
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
        assert job.poll() is None and time.monotonic() < until, Path(f"{folder}.log").read_text()
        time.sleep(0.02)
    words = (folder / "logs/rank-00003.log").read_text().splitlines()[0]
    os.kill(int(words.rpartition("process ")[2]), signal.SIGKILL)
    assert job.wait(60) != 0


def chart_rows(page: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows that a chart of a page draws."""
    (text,) = re.findall(r'<script type="application/json" id="specs">(.*?)</script>', page.read_text())
    return [row for rows in json.loads(text)[name]["datasets"].values() for row in rows]


@pytest.mark.campaign
@pytest.mark.serial
@pytest.mark.timeout(400)
def test_a_killed_run_and_a_zero_3_run_are_drawn_without_warnings(tmp_path):
    ddp, zero3, one, both = (tmp_path / name for name in ("ddp", "zero3", "one.html", "both.html"))
    job = start(ddp, 0)
    try:
        kill_a_rank_after(ddp, job, 25)
        for folder, zero in ((ddp, 0), (zero3, 3)):
            job = start(folder, zero)
            assert job.wait(150) == 0, Path(f"{folder}.log").read_text()
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
    run = read_run(ddp)
    assert [(each.outcome, each.ranks) for each in run.starts] == [("killed", RANKS), ("done", RANKS)]
    assert run.starts[1].first_step in (20, 30, 40) and len(run.columns.step) == STEPS
    assert len(run.ranks) == RANKS and any("kill" in sentence for sentence in findings(run))

    assert report.main([str(ddp), "--out", str(one)]) == 0
    assert report.main([str(ddp), str(zero3), "--out", str(both), "--png", str(tmp_path / "png")]) == 0
    sums: dict[tuple[str, str], float] = {}
    for row in chart_rows(both, "memory_formula"):
        key = row["bar"], row["what"]
        sums[key] = sums.get(key, 0.0) + row["value"]
    measured, formula = (sums["ddp", what] - sums["zero3", what] for what in ("measured", "formula"))
    assert measured == pytest.approx(formula, rel=0.05) and sums["zero3", "measured"] < 0.2 * sums["ddp", "measured"]
    with browser(require_browser(), tmp_path / "profile") as page:
        for path in (one, both):
            for scheme in ("light", "dark"):
                page.open(path, scheme)
                marks = count_marks(page)
                assert len(marks) >= 13 and min(marks.values()) >= 2, marks
                page.picture(tmp_path / f"{path.stem}-{scheme}.png")
        assert not page.complaints and all(url.startswith(("file://", "data:")) for url in page.requests)
