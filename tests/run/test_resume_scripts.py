"""A script that was killed continues with --resume as if nothing had happened."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from warm import job as forked_job

from mpitrain.monitor.run_files import read_events, read_metrics, summary

SCRIPTS = Path(__file__).parent / "scripts"
NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?")

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]


def run(ranks: int, folder: Path, script: Path, *options: str):
    """Run a script with --resume in a folder; return the ended process."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "mpitrain.run", "--resume", *options, str(script)]
    return forked_job(ranks, words, cwd=folder, timeout=150)


def numbers(lines: list[str]) -> list[float]:
    return [float(text) for line in lines for text in NUMBER.findall(line)]


def weights(folder: Path) -> list[torch.Tensor]:
    saved = torch.load(folder / "out.pt").values()
    return [x for part in saved for x in part.values()]


def assert_continues(tmp_path: Path, script: Path, every: str, kill: str, others: list[int]) -> Path:
    """Kill a script on 2 ranks, continue it on 2 and on other numbers of ranks, and compare with a run on 2 ranks."""
    options = ("--checkpoint.every", every)
    whole = run(2, tmp_path / "whole", script, *options)
    assert whole.returncode == 0, whole.stderr[-3000:]
    expected = whole.stdout.splitlines()
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / kill).touch()
    first = run(2, killed, script, *options)
    assert first.returncode != 0 and first.stdout.splitlines() == expected[: len(first.stdout.splitlines())]
    assert 0 < len(first.stdout.splitlines()) < len(expected)
    (killed / kill).unlink()
    for ranks in (2, *others):
        folder = tmp_path / str(ranks)
        shutil.copytree(killed, folder)
        done = run(ranks, folder, script, *options)
        assert done.returncode == 0, done.stderr[-3000:]
        assert re.search(r"continues after step \d+ from", done.stderr)
        lines = done.stdout.splitlines()
        remaining = expected[len(expected) - len(lines) :]
        assert len(expected) - len(first.stdout.splitlines()) <= len(lines) < len(expected)
        if ranks == 2:
            assert lines == remaining
            assert all(torch.equal(a, b) for a, b in zip(weights(tmp_path / "whole"), weights(folder), strict=True))
        assert numbers(lines) == pytest.approx(numbers(remaining), rel=1e-12, abs=1e-12)
        for a, b in zip(weights(tmp_path / "whole"), weights(folder), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    return tmp_path / "2"


def test_a_script_killed_in_mid_epoch_continues_with_the_same_lines_weights_and_files(tmp_path):
    folder = assert_continues(tmp_path, SCRIPTS / "epochs.py", "7", "kill-2-6", [3])
    assert (folder / "log.txt").read_text() == (tmp_path / "whole/log.txt").read_text()
    appended = [(tmp_path / name / "epochs.txt").read_text().splitlines() for name in ("whole", "2", "3")]
    assert appended[0] == appended[1] and len(appended[2]) == 5
    record = folder / "runs/epochs"
    assert [line["step"] for line in read_metrics(record)] == list(range(1, 56))
    assert {line["world_size"] for line in read_metrics(record)} == {2} and read_metrics(record)[0]["samples"] == 8
    assert [e["step"] for e in read_events(record) if e["event"] == "start"] == [0, 28]
    assert "1 to 55 (55 recorded)" in summary(record)
    again = run(2, folder, SCRIPTS / "epochs.py", "--checkpoint.every", "7")
    assert again.returncode == 0 and not again.stdout and "has come to its end" in again.stderr


def test_variables_of_all_kinds_continue_in_the_middle_of_a_while_loop(tmp_path):
    assert_continues(tmp_path, SCRIPTS / "steps.py", "6", "kill-15", [1])


def test_a_loop_over_a_generator_function_after_another_training_loop_continues(tmp_path):
    assert_continues(tmp_path, SCRIPTS / "steps.py", "11", "kill-1-2", [])


LOOP = """
import itertools
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
def step(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("it = itertools.cycle(loader)\nfor _ in range(3):\n    step(next(it))\n", "the variable it, which is in the"),
        ("def read():\n    yield from loader\nit = read()\nfor _ in range(2):\n    step(next(it))\n", "variable it,"),
        ("step(torch.ones(4, 2))\n", "needs a loop of the script around optimizer.step() at"),
        ("[step(x) for x in loader]\n", "needs a loop of the script"),
        ("f = open('a', 'w+')\nfor x in loader:\n    step(x)\n", "is open to read and write"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_refused_in_one_line(text, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOOP + text)
    done = run(2, tmp_path / "out", script, "--checkpoint.every", "1")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert reason in line and "Traceback" not in done.stderr


def test_a_script_or_data_that_changed_is_refused_in_one_line(tmp_path):
    text = LOOP + "import os, sys\ndata = torch.full((300_000,), float(len(os.listdir('.')) > 90))\n"
    text += "for x in loader:\n    step(x)\nsys.exit(int(not os.path.exists('done')))\n"
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(text)
    assert run(1, out, script, "--checkpoint.every", "1").returncode == 1
    for number in range(100):
        (out / str(number)).touch()
    changed = run(1, out, script, "--checkpoint.every", "1")
    assert changed.returncode == 2 and "data has other values than when the checkpoint" in changed.stderr
    script.write_text(text + "\n")
    changed = run(1, out, script, "--checkpoint.every", "1")
    assert changed.returncode == 2 and "script.py has another text than when" in changed.stderr
