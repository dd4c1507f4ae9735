"""`--parallel.zero 1` shards the states of a script's optimizers, and changes no bit of what it computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from warm import job as forked_job

SCRIPT = str(Path(__file__).parent / "scripts/sharded.py")
WHOLE = (5 * (24 * 24 + 24) + 25) * 2 * 8 + 12 * 8  # bytes of the states of AdamW: two values a parameter, and steps

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]


def run(ranks: int, folder: Path, *options: str, script: str = SCRIPT):
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "mpitrain.run", *options, script]
    return forked_job(ranks, words, cwd=folder, timeout=100)


def state_bytes(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("bytes-*")]


def leaves(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{name}.{key}")


def assert_same_files(one: Path, other: Path) -> None:
    expected, saved = (dict(leaves(torch.load(folder / "out.pt"))) for folder in (one, other))
    assert len(expected) == 12 + 12 * 3 and set(expected) == set(saved)
    assert all(torch.equal(x, saved[name]) for name, x in expected.items())


@pytest.mark.parametrize(("ranks", "level"), [(2, "1"), (3, "1"), (2, "2"), (3, "2")])
def test_states_are_divided_and_lines_weights_and_saved_states_keep_their_bits(ranks, level, tmp_path):
    whole, sharded = run(ranks, tmp_path / "whole"), run(ranks, tmp_path / "sharded", "--parallel.zero", level)
    assert whole.returncode == sharded.returncode == 0, sharded.stderr[-3000:]
    assert whole.stdout == sharded.stdout and len(whole.stdout.splitlines()) == 9
    assert state_bytes(tmp_path / "whole") == [WHOLE] * ranks
    counts = state_bytes(tmp_path / "sharded")
    assert len(counts) == ranks and sum(counts) == WHOLE and max(counts) < 1.25 * WHOLE / ranks
    assert_same_files(tmp_path / "whole", tmp_path / "sharded")


def test_a_killed_script_with_sharded_states_continues_with_the_same_bits(tmp_path):
    options = ("--parallel.zero", "1", "--resume", "--checkpoint.every", "2")
    whole = run(2, tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "kill").touch()
    assert run(2, killed, *options).returncode != 0
    (killed / "kill").unlink()
    done = run(2, killed, *options)
    assert done.returncode == 0 and "continues after step 4" in done.stderr, done.stderr[-3000:]
    assert done.stdout.splitlines() == whole.stdout.splitlines()[4:]
    assert_same_files(tmp_path / "whole", killed)


@pytest.mark.parametrize(
    ("options", "optimizer", "step", "reason"),
    [
        (["--parallel.zero", "1"], "LBFGS(p)", "lambda: 0", "and not LBFGS"),
        (["--parallel.zero", "1"], "SGD(p, 0.1)", "lambda: 0", "does not take closures"),
        (["--parallel.zero", "3"], "SGD(p, 0.1)", "", "--parallel.zero 3"),
    ],
)
def test_what_cannot_be_sharded_is_refused_in_one_line(options, optimizer, step, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\np = model.parameters()\n"
        f"optimizer = torch.optim.{optimizer}\nmodel(torch.ones(4, 2)).sum().backward()\noptimizer.step({step})\n"
    )
    done = run(2, tmp_path, *options, script=str(script))
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr
