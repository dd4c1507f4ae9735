"""Unchanged scripts for one process give the same printed lines, weights and files on 1, 2 and 3 ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import job
from warm import job as forked_job

from mpitrain.run.kinds import kind_of

SCRIPTS = Path(__file__).parent / "scripts"
HABITS = ["classifier", "tagger", "gan", "vae", "by_hand", "recurrent", "policy", "samplers", "indexing", "writing"]
HABITS += ["regions", "language", "compiled", "fetching", "names", "contents"]
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
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
            assert a.shape == b.shape
            if not a.numel():
                continue
            worst = (a.double() - b.double()).abs().max().item()
            assert worst <= CLOSE * max(1.0, a.double().abs().max().item()), (path, worst)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["gan", "tagger", "classifier", "by_hand"], []),
        (["gan", "tagger", "classifier", "language", "regions", "contents"], ["--parallel.zero", "3"]),
    ],
)
def test_gradients_that_are_sent_during_backward_are_the_same(names, options, alone, tmp_path):
    """With accumulation, several backward passes into one gradient, and two optimizers that take turns."""
    words = [str(SCRIPTS.parent / "send_early.py"), *options, str(SCRIPTS / "several.py"), *names]
    done = forked_job(2, [sys.executable, *words], cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    printed, of_one = sections(done.stdout), sections(alone[0])
    for name in names:
        assert_same_lines(of_one[name], printed[name])
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("buckets:")]
    assert int(line.split()[1]) >= 20 or options, line  # gradients that go to their owners do not count


def test_a_script_is_recognised_by_a_relative_path(tmp_path):
    (tmp_path / "own.py").write_text("import os\nos.makedirs(f'out/{os.getpid()}')\nprint(__file__)\n")
    done = forked_job(3, [sys.executable, "-m", "mpitrain.run", "own.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and done.stdout == f"{tmp_path}/own.py\n", done.stderr
    assert len(list((tmp_path / "out").iterdir())) == 1  # rank 0 makes folders


def counts_of_regions(folder: Path, name: str) -> dict[str, str]:
    """Return how often each class of module ran as a local region in a script, on 2 ranks."""
    words = [sys.executable, str(SCRIPTS.parent / "count_regions.py"), str(SCRIPTS / f"{name}.py")]
    done = forked_job(2, words, cwd=folder, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("regions:")]
    return dict(word.split("=") for word in line.split()[1:])


def test_variables_decide_on_a_region_only_if_the_module_reads_them(tmp_path):
    counts = counts_of_regions(tmp_path, "names")
    assert 30 <= int(counts["Net"]) < 40 and "Scaled" not in counts, counts


def test_modules_run_as_local_regions_unless_they_do_more_than_treat_samples_apart(tmp_path):
    counts = counts_of_regions(tmp_path, "regions")
    local = {"Block", "LayerNorm", "Drops", "LSTM", "Replaces"}
    assert local <= set(counts), counts
    assert int(counts["Block"]) >= 6 and int(counts["Drops"]) >= 6, counts
    assert not set(counts) & {"DividesByCount", "NumbersRows", "Keeps", "Counts", "DrawsPath", "Recomputes"}, counts


def line_of(done, word: str) -> str:
    """Return the one line of ours on stderr that has this word."""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpitrain") and word in line]
    return line


def test_control_flow_that_differs_between_ranks_ends_in_one_line_with_both_places(tmp_path):
    line = line_of(run(2, tmp_path, "parts.py", "break", code=1), "the ranks part")
    lines = (SCRIPTS / "parts.py").read_text().splitlines()
    number = 1 + next(i for i, text in enumerate(lines) if "optimizer.step()" in text)
    assert f"step 3 of an optimizer at parts.py:{number}" in line and "the sum of () torch.int64 at parts.py:" in line


@pytest.mark.parametrize(
    ("how", "other"), [("small", "the sum of () torch.float32"), ("large", "the sum of (3, 9000)")]
)
def test_a_small_exchange_beside_another_one_ends_in_one_line_with_both(how, other, tmp_path):
    line = line_of(run(2, tmp_path, "parts.py", how, code=1), "the ranks part")
    assert "the sum of () torch.int64 at parts.py:" in line and other in line


def test_parameters_that_differ_between_ranks_end_in_one_line(tmp_path):
    done = run(2, tmp_path, "parts.py", "weights", code=1)
    assert line_of(done, "the ranks part").count("parameters with checksum") == 2
    assert done.stdout == ""


def test_an_error_of_the_script_has_one_traceback_and_its_exit_code(tmp_path):
    done = run(2, tmp_path, "parts.py", "error", code=1)
    assert done.stderr.count("ValueError: bad value") == 1 and done.stderr.count("Traceback") == 1
    assert "mpitrain/run" not in done.stderr and len(done.stdout.splitlines()) == 4


def test_an_exit_code_of_the_script_is_that_of_the_job(tmp_path):
    assert len(run(2, tmp_path, "parts.py", "exit", code=5).stdout.splitlines()) == 4


def test_a_model_that_writes_into_a_tensor_of_the_script_is_refused(tmp_path):
    assert "writes into its input" in run(2, tmp_path, "parts.py", "write", code=1).stderr


def command(ranks: int, folder: Path, *words: str, code: int = 0):
    """Run mpitrain.run with options; return the ended process."""
    done = forked_job(ranks, [sys.executable, "-m", "mpitrain.run", *words], cwd=folder, timeout=200)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def test_check_compares_steps_with_one_process(tmp_path):
    done = command(2, tmp_path, "--check", "3", str(SCRIPTS / "vae.py"))
    assert "3 steps" in line_of(done, "check:")
    assert "(limit" in line_of(done, "check:")


def test_check_finds_a_difference(tmp_path):
    script = tmp_path / "differs.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "scale = 2.0 if 'mpitrain.run.files' in sys.modules else 1.0\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    (model(torch.ones(4, 2)).sum() * scale).backward()\n"
        "    optimizer.step()\n"
    )
    assert "losses differ" in line_of(command(2, tmp_path, "--check", "2", str(script), code=1), "check:")


def test_a_script_that_spawns_its_ranks_gets_those_of_mpirun(tmp_path):
    done = command(2, tmp_path, str(SCRIPTS / "spawned.py"), "2")
    assert done.stdout == "gradient [[1.0, 1.0]]\n"
    assert "a script for torchrun" in line_of(done, "is a script") and "mpirun's ranks" in line_of(done, "spawns")
    assert "mpirun -n 3" in command(2, tmp_path, str(SCRIPTS / "spawned.py"), "3", code=2).stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--resume", "--check", "2", str(SCRIPTS / "vae.py")], "goes without --resume"),
        (["--parallel.zero=4", "vae.py"], "invalid choice: 4"),
        (["--train.precision", "fp16", "vae.py"], "invalid choice: 'fp16'"),
        (["absent.py"], "there is no script absent.py"),
        (["--as", "pbs", "vae.py"], "invalid choice"),
        (["--check", "2", "--as", "torchrun", str(SCRIPTS / "vae.py")], "--check is for scripts for one process"),
    ],
)
def test_what_it_does_not_do_is_refused_in_one_line(words, reason, tmp_path, forked):
    done = forked.run("run", *words, cwd=tmp_path)
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import torch\n", "plain"),
        ("import horovod.torch as hvd\n", "horovod"),
        ("from deepspeed import initialize\n", "deepspeed"),
        ("import torch.distributed as dist\ndist.init_process_group()\n", "torchrun"),
        ("import torch.multiprocessing as mp\nmp.spawn(print)\n", "torchrun"),
        ("import torch.distributed as dist\nprint(dist.is_available())\n", "plain"),
    ],
)
def test_the_kind_of_a_script_follows_from_its_text(text, kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert kind_of(str(script)) == kind
