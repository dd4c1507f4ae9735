"""`--parallel.zero` shards states of optimizers, gradients and parameters, and changes no bit of what is computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from warm import job as forked_job

SCRIPT = str(Path(__file__).parent / "scripts/sharded.py")
PARAMETERS = (5 * (64 * 64 + 64) + 65) * 8  # bytes, and those of their gradients
STATES = (5 * (64 * 64 + 64) + 65) * 2 * 8 + 12 * 8  # bytes of the states of AdamW: two values a parameter, and steps

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]


def run(ranks: int, folder: Path, *options: str, script: str = SCRIPT):
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "mpitrain.run", *options, script]
    return forked_job(ranks, words, cwd=folder, timeout=100)


def held(folder: Path) -> list[tuple[int, ...]]:
    """Return the bytes that ranks hold of optimizer states, of parameters and of gradients, each as a tuple."""
    return list(zip(*[map(int, path.read_text().split()) for path in folder.glob("held-*")], strict=True))


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders and lines of runs that shard nothing, by the number of ranks."""
    out = {}
    for ranks in (2, 3):
        folder = tmp_path_factory.mktemp(f"whole{ranks}")
        done = run(ranks, folder)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 9, done.stderr[-3000:]
        assert held(folder) == [(STATES,) * ranks, (PARAMETERS,) * ranks, (PARAMETERS,) * ranks]
        out[ranks] = folder, done.stdout
    return out


@pytest.mark.parametrize(("ranks", "level"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 3)])
def test_ranks_hold_shares_and_lines_weights_and_saved_states_keep_their_bits(ranks, level, whole, tmp_path):
    folder, lines = whole[ranks]
    done = run(ranks, tmp_path, "--parallel.zero", str(level))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == lines
    states, parameters, gradients = held(tmp_path)
    assert sum(states) == STATES and max(states) < 1.5 * STATES / ranks
    slack = (ranks - 1) * (6 * 64 + 1) * 8  # small parameters are whole; instead of a gradient there is one zero
    assert level < 2 or PARAMETERS <= sum(gradients) <= PARAMETERS + slack
    assert level < 3 or PARAMETERS <= sum(parameters) <= PARAMETERS + slack
    assert_same_files(folder, tmp_path)


@pytest.mark.parametrize("level", ["1", "3"])
def test_a_killed_script_with_sharded_states_continues_with_the_same_bits(level, tmp_path):
    options = ("--parallel.zero", level, "--resume", "--checkpoint.every", "2")
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
        (["--parallel.zero", "3"], "SGD(p, 0.1)", "lambda: 0", "does not take closures"),
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
