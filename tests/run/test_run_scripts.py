"""Unchanged scripts for one process give the same printed lines, weights and files on 2 and 3 ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import job
from warm import job as forked_job

SCRIPTS = Path(__file__).parent / "scripts"
HABITS = ["classifier", "tagger", "gan", "vae", "by_hand", "recurrent", "policy", "samplers", "indexing", "writing"]
NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?")
CLOSE = 1e-12  # relative to the largest value of a tensor, or to 1 for a printed number

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]


def run(ranks: int, folder: Path, *words: str, code: int = 0):
    """Run a script in a folder, alone (0) or on ranks; return the ended process."""
    folder.mkdir(exist_ok=True, parents=True)
    script = str(SCRIPTS / words[0])
    command = [sys.executable, *(["-m", "mpitrain.run"] if ranks else []), script, *words[1:]]
    done = forked_job(ranks, command, cwd=folder, timeout=200) if ranks else job(0, command, cwd=folder, timeout=200)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return run(0, folder, "several.py", *HABITS).stdout, folder


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines that each script printed."""
    parts = re.split(r"^== (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {name: lines.splitlines() for name, lines in zip(parts[::2], parts[1::2], strict=True)}


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)


def assert_same_lines(expected: list[str], lines: list[str]) -> None:
    """Check that lines are equal but for the last digits of their numbers."""
    assert [NUMBER.sub("#", line) for line in expected] == [NUMBER.sub("#", line) for line in lines]
    for one, other in zip(expected, lines, strict=True):
        for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True):
            assert abs(float(a) - float(b)) <= CLOSE * max(1.0, abs(float(a))), (one, other)


@pytest.mark.parametrize("ranks", [2, 3])
def test_scripts_print_save_and_end_as_in_one_process(alone, ranks, tmp_path):
    expected, folder = alone
    done = run(ranks, tmp_path / "out", "several.py", *HABITS)
    printed, of_one = sections(done.stdout), sections(expected)
    assert list(printed) == list(of_one) == HABITS
    for name in HABITS:
        assert_same_lines(of_one[name], printed[name])
    files = sorted(p.relative_to(folder) for p in folder.rglob("*"))
    assert sorted(p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*")) == files
    saved = [path for path in files if path.suffix == ".pt"]
    assert len(saved) >= 10
    for path in saved:
        pairs = zip(tensors(torch.load(folder / path)), tensors(torch.load(tmp_path / "out" / path)), strict=True)
        for a, b in pairs:
            worst = (a.double() - b.double()).abs().max().item()
            assert worst <= CLOSE * max(1.0, a.double().abs().max().item()), (path, worst)
