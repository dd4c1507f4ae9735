"""The main job as a user runs it: commands, exit codes, messages, kills."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import warm
from support import clean_environment, job, launcher, one_line, train_command

from mpitrain import report
from mpitrain.comm.job import arrival
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.monitor import read_events, read_goodput

SMALL = ("--model.layers", 1, "--model.width", 32, "--model.heads", 2, "--model.sequence", 32, "--train.batch", 8)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_nan_data_end_a_job_after_few_steps_unless_abort_after_is_0(tmp_path, forked):
    source = tmp_path / "source"
    source.mkdir()
    np.save(source / "x.npy", np.full((40, 6), np.nan, dtype=np.float32))
    np.save(source / "y.npy", np.arange(40) % 2)
    prepare([str(source)], tmp_path / "data", options=PrepareOptions(allow_nonfinite=True))
    arguments = ("--data.path", tmp_path / "data", "--model.name", "mlp", "--train.batch", 4, "--train.steps", 20)
    done = forked.run("train", *arguments, "--run.dir", tmp_path / "ended")
    assert done.returncode == 2 and "done at" not in done.stdout
    [ours] = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert "the loss has been nan since the first step, so nothing was learned; check data.path for" in ours
    assert len(lines(tmp_path / "ended")) < 3

    done = forked.run("train", *arguments, "--run.dir", tmp_path / "r", "--train.abort_after", 0)
    assert done.returncode == 1
    [ours] = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert "nan since the first step, so nothing was learned; check data.path for" in ours
    assert "ended at step 20 of 20, nothing learned since step 1" in done.stdout and "done at" not in done.stdout
    assert "20 steps, because gradients were not finite" in done.stdout
    assert "warning: optim.warmup 20 lasts for all of train.steps 20" in done.stdout
    assert next(line for line in done.stderr.splitlines() if line.startswith("step 20/20")).endswith("skipped 20")
    assert all(m["skipped"] for m in lines(tmp_path / "r"))


def test_killed_job_learns_digits_and_resumes_with_the_same_bits(tmp_path):
    arguments = (
        "--data.path", "digits", "--model.name", "mlp", "--model.width", 64, "--train.steps", 150, "--train.batch", 64,
        "--optim.lr", 0.01, "--checkpoint.every", 30, "--data.record_ids", "true",
    )  # fmt: skip
    whole = warm.job(2, train_command("--run.dir", tmp_path / "whole", *arguments))
    assert whole.returncode == 0, whole.stderr
    assert lines(tmp_path / "whole")[-1]["held_out_loss"] < 0.35
    assert np.isfinite([m["loss"] for m in lines(tmp_path / "whole")]).all()

    killed = tmp_path / "killed"
    command = warm.shared().launched(2, train_command("--run.dir", killed, *arguments))
    process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: (killed / "checkpoints/step-00000030/manifest.json").exists(), 60, process)
        victim = _process_of_rank(killed, 1)
        os.kill(victim, signal.SIGKILL)
        assert process.wait(30) != 0
    finally:
        process.kill()
    resumed = warm.job(2, train_command("--run.dir", killed, *arguments))
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout
    same = ("step", "loss", "lr", "grad_norm", "ids", "held_out_loss")
    assert [[m.get(k) for k in same] for m in lines(killed)] == [
        [m.get(k) for k in same] for m in lines(tmp_path / "whole")
    ]
    assert _content(killed / "checkpoints/step-00000150") == _content(tmp_path / "whole/checkpoints/step-00000150")


def _content(folder: Path) -> dict[str, bytes]:
    import h5py

    arrays: dict[str, bytes] = {}
    for path in sorted(folder.glob("rank-*.h5")):
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item, path=path: (
                    arrays.update({f"{path.name}/{name}": item[...].tobytes()}) if hasattr(item, "dtype") else None
                )
            )
    assert arrays
    return arrays


def _process_of_rank(folder: Path, rank: int) -> int:
    first = (folder / f"logs/rank-{rank:05d}.log").read_text().splitlines()[0]
    return int(first.rpartition("process ")[2])


def _wait_for(condition, seconds: float, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the job ended too early"
        assert time.monotonic() < deadline, "the job did not get there in time"
        time.sleep(0.002)


def _ranks(folder: Path) -> list[Path]:
    """Return /proc/PID of the ranks that train in a folder: its processes without child processes."""
    parents = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(folder).encode() in (process / "cmdline").read_bytes():
                parents[process.name] = (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
    return [Path("/proc") / name for name in parents if name not in parents.values()]


def _catches_usr1(process: Path) -> bool:
    caught = next(line for line in (process / "status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.parametrize("how", ["USR1 during imports", "Ctrl-C"])
def test_job_ends_cleanly_on_a_signal(tmp_path, sentence, how):
    command = train_command(*_endless(sentence, tmp_path / "r"))
    process = subprocess.Popen(
        warm.shared().launched(2, command) if how == "Ctrl-C" else [*launcher(2), *command],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if how == "USR1 during imports":
            _wait_for(lambda: [_catches_usr1(rank) for rank in _ranks(tmp_path / "r")] == [True] * 2, 60, process)
            assert not any("libtorch" in (rank / "maps").read_text() for rank in _ranks(tmp_path / "r"))
            process.send_signal(signal.SIGUSR1)
        else:
            _wait_for(lambda: (tmp_path / "r/metrics.jsonl").exists() and len(lines(tmp_path / "r")) > 3, 60, process)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    if how == "Ctrl-C":
        assert (
            process.returncode in ((1, 130) if warm.FORKS else (130,)) and "Traceback" not in err
        )  # see docs/faults.md
    else:
        _assert_stopped(process.returncode, out, err, tmp_path / "r")


# what a model does in its fourth step
REQUESTS = {"USR1": "os.kill(os.getpid(), signal.SIGUSR1)", "touch RUN/stop": "Path('r/stop').touch()"}
STOPPING_MODEL = """
import os, signal
from pathlib import Path
import torch

class Asking(torch.nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.w, self.calls = torch.nn.Parameter(torch.zeros(vocabulary, vocabulary)), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 4:
            REQUESTS
        return self.w[x]

    def loss(self, output, y):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())

def model(description):
    return Asking(description.vocabulary)
"""


@pytest.mark.parametrize("how", REQUESTS)
def test_job_saves_before_it_stops_on_request(tmp_path, forked, sentence, how):
    (tmp_path / "asking.py").write_text(STOPPING_MODEL.replace("REQUESTS", REQUESTS[how]))
    arguments = (*_endless(sentence, "r"), "--model.factory", "asking:model")
    done = forked.run("train", *arguments, cwd=tmp_path)
    _assert_stopped(done.returncode, done.stdout, done.stderr, tmp_path / "r")


def _endless(data, folder):
    steps = ("--train.steps", 100000, "--checkpoint.every", 0)
    return ("--data.path", data, *SMALL, *steps, "--run.dir", folder)


def _assert_stopped(code, out, err, run):
    assert code == 75, err
    assert "stopped at step" in out and (run / "checkpoints/latest").exists()
    assert not (run / "stop").exists()


FACTORY = """
import torch
def broken(description, **options):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(256, 256))
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            if self.calls == 3 and options["rank"] == RANK:
                raise ValueError("the model is unwell")
            return self.w[x]
        def loss(self, output, y):
            return torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())
    import os
    RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    return Model()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_on_any_rank_is_printed_once(tmp_path, sentence, rank):
    (tmp_path / "models_of_mine.py").write_text(FACTORY)
    began = time.monotonic()
    done = warm.job(
        2,
        train_command(
            "--data.path", sentence, *SMALL, "--run.dir", "r", "--model.factory", "models_of_mine:broken",
            "--model.options", f"{{rank = {rank}}}",
        ),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""),
    )  # fmt: skip
    assert time.monotonic() - began < 30  # of which the start takes most
    assert done.returncode not in (0, 2, 75)
    assert done.stderr.count("ValueError: the model is unwell\nTraceback") == 1
    assert f"mpitrain: rank {rank}: ValueError: the model is unwell" in done.stderr
    assert "the model is unwell" in (tmp_path / f"r/logs/rank-{rank:05d}.log").read_text()


BAD = {
    "typo": (["--train.stpes", "5"], "unknown key 'train.stpes'; did you mean 'train.steps'?"),
    "no such config": (["nothing.toml"], "config file nothing.toml does not exist"),
    "no such data": (["--data.path", "nowhere"], "nowhere"),
    "too few samples": (["--train.batch", "100000"], "fewer than train.batch 100000"),
    "no such checkpoint": (["--checkpoint.resume", "nowhere"], "does not exist; give auto, never or"),
    "no such factory": (["--model.factory", "nowhere:model"], "nowhere"),
    "wrong model": (["--model.name", "mlp"], "takes arrays, but the data are tokens"),
    "no such optimizer": (["--optim.name", "adamv"], "did you mean 'Adam'"),
    "option it lacks": (["--optim.options", "{nu = 1}"], "AdamW has no nu"),
    "folder is a file": (["--run.dir", "file.txt"], "run folder file.txt cannot be used"),
    "folder cannot be made": (["--run.dir", "/proc/run"], "run folder /proc/run cannot be used"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_line_and_exit_code_2(tmp_path, forked, sentence, name):
    (tmp_path / "file.txt").write_text("not a folder")
    arguments, message = BAD[name]
    base = ("--data.path", sentence, *SMALL, "--train.steps", 2)
    both = (*arguments, *base) if arguments[0].endswith(".toml") else (*base, *arguments)
    assert one_line(forked.run("train", *both, cwd=tmp_path), message).startswith("mpitrain: ")
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("name", [*(name for name in BAD if "folder" not in name), "nothing fits"])
def test_refused_job_never_makes_a_run_folder(tmp_path, forked, sentence, name):
    """A file named runs shows it: a run folder could not be created even for a moment."""
    (tmp_path / "runs").write_text("not a folder")
    (tmp_path / "tiny.toml").write_text(
        'node = { cores = 2, memory = "90 MiB", memory_bandwidth = "10 GB/s" }\ncore.matrix = { fp32 = "50 Gflop/s" }\n'
    )
    tiny = ["--parallel.auto", "true", "--parallel.machine", "tiny.toml", "--run.device", "cpu"]
    arguments, message = {**BAD, "nothing fits": (tiny, "no layout")}[name]
    base = ("--data.path", sentence, *SMALL, "--train.steps", 2)
    both = (*arguments, *base) if arguments[0].endswith(".toml") else (*base, *arguments)
    one_line(forked.run("train", *both, cwd=tmp_path), message)


def test_killed_start_leaves_no_run_folder(tmp_path, sentence):
    (tmp_path / "models_of_mine.py").write_text(
        "import os, signal\ndef killed(description):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = train_command("--data.path", sentence, *SMALL[-2:], "--model.factory", "models_of_mine:killed")
    done = warm.job(2, command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and not (tmp_path / "runs").exists()


def test_logs_contain_lines_from_before_the_run_folder_exists(tmp_path, sentence):
    done = warm.job(2, train_command("--data.path", sentence, *SMALL, "--train.steps", 1), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (logs,) = (tmp_path / "runs").glob("*/logs")
    for rank in range(2):
        first, second, *_ = (logs / f"rank-{rank:05d}.log").read_text().splitlines()
        assert first.split(" ", 1)[1].startswith(f"rank {rank} INFO started: rank {rank} of 2, process ") and second


def test_unnamed_runs_get_separate_folders_within_one_second(tmp_path, sentence):
    """Folders for the next 100 seconds exist already, as if other jobs had started then."""
    wrong = ("--data.path", sentence, *SMALL, "--train.steps", 1, "--checkpoint.resume", "nowhere")
    one_line(warm.job(2, train_command(*wrong), cwd=tmp_path), "does not exist; give auto", alone=False)
    assert not list(tmp_path.glob("runs/*"))
    now = datetime.now().replace(microsecond=0)
    others = [tmp_path / f"runs/{now + timedelta(seconds=n):%Y%m%d-%H%M%S}" for n in range(100)]
    for other in others:
        other.mkdir(parents=True)
    done = warm.job(2, train_command(*wrong[:-2]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = set((tmp_path / "runs").iterdir()) - set(others)
    assert run.name.endswith("-2") and run.with_name(run.name[:-2]) in others and not any(map(os.listdir, others))
    assert f'dir = "runs/{run.name}"' in (run / "config.toml").read_text() and f"runs/{run.name}" in done.stdout
    assert (run / "checkpoints/step-00000001").is_dir() and (run / "logs/rank-00001.log").exists()


@pytest.mark.parametrize("kind", ["empty", "not hdf5"])
def test_damaged_data_give_one_line(tmp_path, forked, sentence, kind):
    shutil.copytree(sentence, tmp_path / "data")
    shard = tmp_path / "data/train-00000.h5"
    size = shard.stat().st_size
    shard.write_bytes(b"" if kind == "empty" else b"x" * size)
    done = forked.run("train", "--data.path", "data", *SMALL, "--run.dir", "r", cwd=tmp_path)
    one_line(done, "train-00000.h5")


def test_unexpected_files_in_a_run_folder_give_one_line(tmp_path, forked, sentence):
    """Folders with the names of files, and a checkpoint whose manifest has a correct checksum but lacks values."""
    latest = tmp_path / "r/checkpoints/latest"
    latest.mkdir(parents=True)

    def train(steps):
        arguments = ("--data.path", sentence, *SMALL, "--train.steps", steps, "--run.dir", "r")
        done = forked.run("train", *arguments, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]

    code, [line] = train(1)  # a save would have to replace what it did not make: refused before the first step
    assert code == 2 and "checkpoints/latest exists already, but mpitrain did not write it" in line and latest.is_dir()
    latest.rmdir()
    assert train(1) == (0, [])
    config = tmp_path / "r/config.toml"
    config.unlink()
    config.mkdir()
    assert train(1) == (0, [])  # what is not ours is kept under another name
    assert config.is_file() and any(path.is_dir() for path in config.parent.glob("config.toml?*"))
    folder = tmp_path / "r/checkpoints/step-00000001"
    payload = json.loads((folder / "manifest.json").read_text())["payload"]
    for name in ("optimizer", "position"):
        values = {key: value for key, value in payload["values"].items() if key != name}
        text = json.dumps(payload | {"values": values})
        (folder / "manifest.json").write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "payload": {text}}}\n')
        code, [line] = train(2)
        assert code == 1 and f"has no '{name}' among its values" in line


def test_bad_input_under_mpirun_is_printed_once_by_rank_0(tmp_path, sentence):
    done = job(2, train_command("--data.path", sentence, *SMALL, "--train.stpes", 3), cwd=tmp_path)
    one_line(done, "did you mean 'train.steps'?", alone=False)
    last = done.stderr.splitlines()[-1]  # below what mpirun says
    assert last.removeprefix("the cause, from above: ").removeprefix("mpitrain: ") == (
        "command line: unknown key 'train.stpes'; did you mean 'train.steps'?"
    )


def test_a_second_job_in_one_run_folder_is_refused(tmp_path, forked, sentence):
    (tmp_path / "r").mkdir()
    with open(tmp_path / "r/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = forked.run("train", "--data.path", sentence, *SMALL, "--run.dir", "r", cwd=tmp_path)
    one_line(done, "in use by another job")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_NTASKS": "4"}, "Slurm has 4 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, "srun --mpi="),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "mpirun belongs to another MPI"),
    ],
)
def test_processes_that_did_not_join_one_job_are_refused(tmp_path, forked, environment, message):
    one_line(forked.run("train", "--train.steps", 1, cwd=tmp_path, **environment), message, alone=False)


def test_help_lists_the_keys(tmp_path, forked):
    done = forked.run("train", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--train.steps" in done.stdout


def test_commands_import_nothing_that_they_do_not_use(tmp_path):
    program = """
        import json, gc, runpy, sys
        from contextlib import suppress
        for words in json.loads(sys.argv[1]):
            sys.argv = words
            with suppress(SystemExit):
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        import torch, mpitrain as mt
        model = torch.nn.Linear(4, 2)
        engine = mt.initialize(model, torch.optim.AdamW, {"train": {"batch": 4}})
        engine.backward(engine(torch.ones(4, 4)).sum())
        engine.step()
        names = ("torch._dynamo", "sympy", "scipy", "matplotlib", "transformers", "tensorboard", "altair", "pyarrow")
        print("imported:", *[name for name in names if name in sys.modules])
        order = [name for name in sys.modules if name in ("torch", "mpi4py.MPI")]
        print(order, gc.isenabled(), gc.get_freeze_count() > 0)
    """
    commands = [
        ["mpitrain.train", "--model.name", "gpt", *SMALL, "--train.steps", 2, "--run.dir", "r"],
        ["mpitrain.evaluate", "r", "--samples", 4],
        ["mpitrain.predict", "r", "in.txt", "--out", "out.csv"],
        ["mpitrain.generate", "r", "--prompt", "def", "--tokens", 2, "--out", "out.jsonl"],
        *(["mpitrain.checkpoint", act, "r"] for act in ("ls", "show", "verify")),
        ["mpitrain.checkpoint", "export", "r", "weights.pt"],
        ["mpitrain.report", "r"],
    ]
    (tmp_path / "in.txt").write_text("hello\n")
    texts = json.dumps([[str(word) for word in words] for words in commands])
    command = [sys.executable, "-c", textwrap.dedent(program), texts]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=100)
    assert "done at step 2" in done.stdout, done.stderr
    assert all((tmp_path / name).exists() for name in ("out.csv", "out.jsonl", "weights.pt")), done.stderr
    # ranks sleep while they wait for others in MPI's start, so torch is imported before it
    assert done.stdout.splitlines()[-2:] == ["imported:", "['torch', 'mpi4py.MPI'] True True"]


def test_a_run_records_the_parts_of_its_start(tmp_path, capsys):
    began = time.monotonic()
    done = job(2, train_command(*SMALL, "--train.steps", 2, "--run.dir", tmp_path))
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    parts, *rest = [line.get("start_s") for line in lines(tmp_path)]
    assert list(parts) == ["launcher", "packages", "mpi", "setup", "first_step"] and rest == [None]
    assert all(seconds >= 0 for seconds in parts.values()) and 0.5 < sum(parts.values()) < took
    assert report.main([str(tmp_path)]) == 0
    assert "s to the end of the first step: launcher 0." in capsys.readouterr().out
    start = read_events(tmp_path)[0]
    assert start["start_s"] == {name: s for name, s in parts.items() if name != "first_step"}
    account = read_goodput(tmp_path)
    assert 0 < account.ratio < 1 and took - 1 < account.wall < took  # the rest is after the last event
    assert account.parts()["imports"] == parts["packages"] and 0 < account.parts()["tail"] < 1
    last = lines(tmp_path)[-1]
    assert 0 < last["data_s"] + last["wait_s"] < last["step_s"] and last["goodput"] >= account.ratio


def test_open_mpi_connects_hosts_only_if_there_are_several(tmp_path):
    program = "import os, mpitrain.comm.job.mpi; print(os.environ.get('OMPI_MCA_btl'))"
    of_user = {"OMPI_MCA_btl": "self,sm"}
    for variables, expected in (({}, "^ofi,openib"), (of_user, "self,sm")):
        assert job(0, [sys.executable, "-c", program], **variables).stdout.strip() == expected


@pytest.mark.parametrize(
    ("size", "here", "expected"),
    [(None, None, True), ("1", "1", True), ("4", "4", True), ("4", "2", False), ("4", None, False)],
)
def test_the_launcher_says_whether_all_ranks_are_on_one_host(monkeypatch, size, here, expected):
    names = {"OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_SIZE": here, "PMI_SIZE": None}
    for name, value in (names | {"SLURM_STEP_NUM_TASKS": None}).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert arrival.is_on_one_host() is expected


def test_importing_the_package_imports_two_of_its_modules_and_no_other_package():
    code = "import sys; import mpitrain; print(*sys.modules)"
    loaded = set(job(0, [sys.executable, "-c", code]).stdout.split())
    without = set(job(0, [sys.executable, "-c", code.replace("import mpitrain; ", "")]).stdout.split())
    packages = {name for name in loaded - without if name.partition(".")[0] not in sys.stdlib_module_names}
    assert packages == {"mpitrain", "mpitrain.early", "mpitrain.errors"}
