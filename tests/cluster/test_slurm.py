"""jobs/train.sbatch on a real Slurm cluster of three nodes: a job trains, is asked to stop, loses a node, and goes on;
a cancelled job ends for good."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from support import ROOT, environment_with, pretend_environment

from mpitrain.data.prepare import prepare

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

BATCH, SEQUENCE = 8, 16
KEEP_NONE = ("--checkpoint.every", 0)  # but what is saved when a job stops
SAME = ("step", "loss", "lr", "grad_norm", "ids")
FACTORY = """
import time
import torch

class Slow(torch.nn.Module):
    \"\"\"A model whose every step takes a while, so that there is time to disturb it.\"\"\"
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(256, 256))

    def forward(self, x):
        time.sleep(SECONDS)
        return self.w[x]

    def loss(self, output, y):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())

def slow(description, **options):
    return Slow()
"""


class Training:
    """A job of `steps` steps, one epoch of a small text, in a folder of its own."""

    def __init__(self, folder: Path, slurm: SlurmCluster, steps: int = 120, seconds: float = 0.05) -> None:
        self.folder, self.slurm, self.steps, self.run = folder, slurm, steps, folder / "run"
        text = folder / "text.txt"
        text.write_text("".join(f"line {number} of a small text\n" for number in range(steps * BATCH)))
        prepare([str(text)], folder / "data")
        self.set_pace(seconds)

    def set_pace(self, seconds: float) -> None:
        """Set the duration of a step, for ranks that start from now on."""
        (self.folder / "slow_model.py").write_text(FACTORY.replace("SECONDS", str(seconds)))

    def submit(self, *options: str, script: Path = ROOT / "jobs/train.sbatch", more: tuple[object, ...] = ()) -> str:
        arguments = {
            "--data.path": self.folder / "data",
            "--model.factory": "slow_model:slow",
            "--model.sequence": SEQUENCE,
            "--train.batch": BATCH,
            "--train.steps": self.steps,
            "--checkpoint.every": 20,
            "--data.record_ids": "true",
            "--run.dir": self.run,
        }
        words = [word for pair in arguments.items() for word in pair]
        return self.slurm.submit(f"--output={self.folder}/out", *options, script, *words, *more, cwd=self.folder)

    @property
    def out(self) -> str:
        try:
            return (self.folder / "out").read_text(errors="replace")
        except OSError:
            return ""

    def newest_step(self) -> int:
        steps = [path.name.removeprefix("step-") for path in (self.run / "checkpoints").glob("step-*")]
        return max(int(step) for step in steps if step.isdigit())

    def metrics(self) -> list[dict]:
        try:
            return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        except (OSError, ValueError):  # not there yet, or half a line
            return []

    def wait_for_step(self, step: int, number: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not any(m["step"] >= step for m in self.metrics()):
            assert time.monotonic() < deadline, f"step {step} not reached: {self.slurm.job(number)}\n{self.out}"
            time.sleep(0.1)

    def ended(self, number: str, seconds: float = 180) -> dict[str, str]:
        try:
            return self.slurm.wait_for(
                number, lambda job: job.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), seconds
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.out}") from None

    def assert_every_sample_was_seen_once(self) -> None:
        lines = self.metrics()
        assert [m["step"] for m in lines] == list(range(1, self.steps + 1))
        ids = [number for m in lines for number in m["ids"]]
        assert len(ids) == self.steps * BATCH == len(set(ids))


def test_a_job_trains_on_three_nodes(slurm, tmp_path):
    training = Training(tmp_path, slurm, steps=40, seconds=0)
    scripts = shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    variables = slurm.environment() | {"VENV": sys.prefix}  # with the start of every process
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    # site.sh is all that the job gets: --export=NONE exports nothing
    (scripts / "site.sh").write_text(f"echo the site has its say\n{exports}")
    number = training.submit("--nodes=3", "--export=NONE", script=scripts / "train.sbatch")
    job = training.ended(number)
    assert job["JobState"] == "COMPLETED" and "the site has its say" in training.out, training.out
    training.assert_every_sample_was_seen_once()
    assert {m["world_size"] for m in training.metrics()} == {6}
    assert "6 ranks on 3 nodes" in training.out and "0 errors" in training.out and "done" in training.out


@pytest.mark.timeout(900)
def test_a_stopped_job_resumes_with_the_same_bits(slurm, tmp_path):
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Training(tmp_path / "undisturbed", slurm, steps=400, seconds=0)
    number = undisturbed.submit("--nodes=2", more=KEEP_NONE)
    assert undisturbed.ended(number)["JobState"] == "COMPLETED", undisturbed.out

    training = Training(tmp_path, slurm, steps=400, seconds=0.2)
    number = training.submit("--nodes=2", "--time=10", "--signal=B:USR1@100", more=KEEP_NONE)
    asks = {
        "got USR1": lambda: slurm.call("scancel", "--batch", "--signal=USR1", number),
        "run/stop exists": lambda: (training.run / "stop").touch(),
        "Slurm has queued the job again": lambda: slurm.preempt(number, tmp_path),
        "asking the job to save": lambda: slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=2"),
    }
    saved = [0]
    for restarts, (message, ask) in enumerate(asks.items(), start=1):
        training.wait_for_step(saved[-1] + 10, number)
        before = training.out
        if restarts == len(asks):
            training.set_pace(0)
        ask()
        slurm.wait_for(number, lambda job, n=restarts: int(job.get("Restarts", 0)) == n, 150)
        slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=10")
        slurm.wait_for_restart(number, restarts)
        saved.append(training.newest_step())
        assert saved[-2] + 10 <= saved[-1] < training.steps
        assert message in training.out.removeprefix(before) and f"saved at step {saved[-1]}, to be" in training.out
    job = training.ended(number)
    assert job["JobState"] == "COMPLETED" and job["Restarts"] == "4", training.out
    for step in saved:
        assert f"from step {step} with 4 ranks on 2 nodes" in training.out
    training.assert_every_sample_was_seen_once()
    expected, got = ([{k: m[k] for k in SAME} for m in run.metrics()] for run in (undisturbed, training))
    assert got == expected


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])  # under mpirun and under srun
def test_a_cancelled_job_saves_and_is_not_requeued(slurm, tmp_path, mpi):
    training = Training(tmp_path, slurm)
    environment = "--export=ALL" + (f",VENV={environment_with(mpi)}" if mpi == "mpich" else "")
    number = training.submit("--nodes=2", "--partition=graceful", environment, more=KEEP_NONE)
    training.wait_for_step(10, number)
    slurm.preempt(number, tmp_path)  # tells the ranks alone, and leaves them time
    slurm.wait_for_restart(number, 1)
    first = training.newest_step()
    assert 10 <= first < training.steps and f"saved at step {first}, to be started again" in training.out
    training.wait_for_step(first + 10, number)
    slurm.call("scancel", number)
    assert training.ended(number)["JobState"] == "CANCELLED", training.out
    second = training.newest_step()
    assert second >= first + 10, training.out
    assert f"saved at step {second}, to be started again" in training.out
    assert "cancelled, so it is not queued again; continue with: sbatch" in training.out

    number = training.submit("--nodes=2", environment)  # cancelled with all its processes before it trains
    slurm.wait_for(number, lambda job: training.out.count(f"from step {second} with 4 ranks") == 1, 60)
    slurm.call("scancel", "--full", number)
    assert training.ended(number)["JobState"] == "CANCELLED", training.out
    slurm.wait_until_idle()
    assert slurm.job(number)["Restarts"] == "0"


def test_a_preempted_job_is_requeued(slurm, tmp_path):
    training = Training(tmp_path, slurm)
    number = training.submit("--nodes=1", "--partition=lost", more=KEEP_NONE)
    training.wait_for_step(10, number)
    slurm.preempt(number, tmp_path)
    slurm.wait_for_restart(number, 1)
    assert f"saved at step {training.newest_step()}, to be started again" in training.out


def test_a_job_whose_node_dies_continues_on_the_remaining_nodes(slurm, tmp_path):
    training = Training(tmp_path, slurm)
    number = training.submit("--nodes=2-3")
    training.wait_for_step(30, number)
    assert slurm.job(number)["NumNodes"] == "3"
    slurm.kill_node("n3")
    slurm.wait_for_restart(number, 1)
    job = training.ended(number)
    assert job["JobState"] == "COMPLETED" and int(job["Restarts"]) >= 1, training.out
    assert job["NodeList"] == "n[1-2]" and slurm.states()["n3"].startswith("down")
    training.assert_every_sample_was_seen_once()
    sizes = [m["world_size"] for m in training.metrics()]
    assert sizes[0] == 6 and sizes[-1] == 4 and sorted(sizes, reverse=True) == sizes
    assert "resumed from" in training.out


def test_a_job_that_fails_repeatedly_at_one_step_is_not_requeued(slurm, tmp_path):
    training = Training(tmp_path, slurm, seconds=0)
    broken = (
        (tmp_path / "slow_model.py").read_text().replace("time.sleep(0)", "raise ValueError('the model is unwell')")
    )
    (tmp_path / "slow_model.py").write_text(broken)
    number = training.submit("--nodes=1", "--export=ALL,ATTEMPTS=2")
    for restarts in (1, 2):
        slurm.wait_for_restart(number, restarts)
    job = training.ended(number)
    assert job["JobState"] == "FAILED" and job["Restarts"] == "2", training.out
    assert training.out.count("ValueError: the model is unwell\nTraceback") == 2
    assert "giving up: 2 attempts in a row did not get past step 0" in training.out


def test_a_job_killed_by_its_memory_limit_says_so_twice_and_trains_with_the_first_setting(slurm_with_limits, tmp_path):
    slurm, training = slurm_with_limits, Training(tmp_path, slurm_with_limits, steps=200)
    large = {"layers": 8, "width": 128, "heads": 4, "sequence": 64}
    options = ["--nodes=1", "--mem=700", "--export=ALL,ATTEMPTS=2,RANKS=1", f"--output={tmp_path}/out"]
    options += [ROOT / "jobs/train.sbatch", "--run.dir", training.run, "--data.path", tmp_path / "data"]
    options += [word for name, value in large.items() for word in (f"--model.{name}", value)]
    options += ["--train.steps", 2, "--train.batch", 256, "--train.evaluate_every", 0, "--train.evaluate_samples", 8]
    number = slurm.submit(*options, cwd=tmp_path)
    for restarts in (1, 2):
        slurm.wait_for_restart(number, restarts)
    job = training.ended(number)
    assert job["JobState"] != "COMPLETED" and "giving up: 2 attempts" in training.out, training.out
    told = re.findall(r"^mpitrain: (host .* is out of memory: .*)$", training.out, re.MULTILINE)
    assert len(told) == 3, training.out  # by the script, by the next start, and by the script again
    for line in told:
        # cgroups of version 1 count a kill only in the cgroup of the step, which is gone by then
        assert "the kernel killed a process of th" in line and "in its first step, which by formula needs" in line
        assert "the limit is 700 MiB; " in line
    setting, value = re.search(r"; (\S+) (\S+) would save", told[-1]).groups()
    (training.run / "attempts").unlink()
    job = training.ended(slurm.submit(*options, f"--{setting}", value, cwd=tmp_path))
    assert job["JobState"] == "COMPLETED", training.out


def test_a_job_with_a_wrong_setting_ends_at_once(slurm, tmp_path):
    training = Training(tmp_path, slurm)
    job = training.ended(training.submit("--nodes=1", more=("--train.stpes", 5)), 60)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    assert training.out.count("did you mean 'train.steps'?") == 1 and "Traceback" not in training.out


@pytest.mark.parametrize(
    "options",
    [["--gpus-per-node=2"], pytest.param(["--gpus-per-task=1", "--ntasks=2"], marks=pytest.mark.full)],
    ids=" ".join,
)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_each_rank_of_a_job_has_its_own_device(slurm_with_devices, device, tmp_path, options):
    """Slurm assigns devices by CUDA_VISIBLE_DEVICES; the simulated accelerator is set to the same devices."""
    training = Training(tmp_path, slurm_with_devices, steps=2, seconds=0)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.environ['PRETEND_VISIBLE_DEVICES'] = os.environ.get('CUDA_VISIBLE_DEVICES', '')\n"
    )
    shown = pretend_environment()
    shown["PYTHONPATH"] = f"{tmp_path}:{shown['PYTHONPATH']}:{ROOT}"
    slurm_with_devices.variables = shown
    job = training.ended(training.submit("--nodes=1", *options))
    assert job["JobState"] == "COMPLETED", training.out
    message = "each rank has its own: 0 pretend:0 (pretend-0), 1 pretend:1 (pretend-1)"
    trained = training.out.partition(" warning")[2]
    assert message in training.out and "1 x Pretend 0, 1 x Pretend 1" in trained, training.out
