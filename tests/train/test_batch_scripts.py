"""jobs/train.pbs as PBS would run it, on this host: bash, mpirun, the ranks and the training are real.

There is no PBS to be had for this machine. So the tests give the script what PBS gives it (PBS_JOBID, PBS_NODEFILE,
PBS_O_WORKDIR ...), and `qsub` and `qstat` on its PATH are scripts of the test: the one notes what it was asked for, in
which environment, and the other prints a job as PBS prints it. Jobs that were submitted are then run from that note.
What is not shown: that a PBS server takes these options, and several hosts. jobs/train.sbatch, which shares
jobs/batch.sh, runs on a real Slurm cluster in tests/cluster; here only with devices, which that cluster pretends too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support import ROOT, clean_environment, launcher, pretend_environment

from mpitrain.data.prepare import prepare

pytestmark = pytest.mark.timeout(500)

BATCH, SEQUENCE, STEPS = 8, 16, 60
SELECT = "1:ncpus=2:mpiprocs=2:ompthreads=1:mem=4gb:host=a-host-with-a-name-that-does-not-fit"
FACTORY = """
import time
import torch

class Slow(torch.nn.Module):
    \"\"\"A model whose every step takes a while, so that there is time to disturb it.\"\"\"
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.w = seconds, torch.nn.Parameter(torch.zeros(256, 256))

    def forward(self, x):
        time.sleep(self.seconds)
        return self.w[x]

    def loss(self, output, y):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())

def slow(description):
    return Slow(0.05)

def broken(description):
    model = Slow(0)
    model.w.register_hook(lambda gradient: 1 / 0)
    return model
"""
QSUB = """#!/usr/bin/env bash
{ printf '%s\\0' "$@"; echo; env -0; } >"$RECORD/submitted-$(ls "$RECORD" | wc -l)"
echo 1001.server
"""
QSTAT = f"""#!/usr/bin/env bash
printf 'Job Id: 1000.server\\n    Job_Name = mpitrain\\n    Account_Name = climate\\n'
printf '    Resource_List.select = {SELECT[:30]}\\n\\t{SELECT[30:]}\\n    Resource_List.walltime = 10:00:00\\n\\n'
"""


class Batch:
    """A folder to work in, with the text, the model and the commands of a PBS."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.record = folder, folder / "run", folder / "record"
        text = folder / "text.txt"
        text.write_text("".join(f"line {number} of a small text\n" for number in range(STEPS * BATCH)))
        prepare([str(text)], folder / "data")
        (folder / "slow_model.py").write_text(FACTORY)
        (folder / "nodes").write_text("localhost\nlocalhost\n")  # a line for each rank
        self.record.mkdir()
        (folder / "bin").mkdir()
        for name, content in (("qsub", QSUB), ("qstat", QSTAT)):
            (folder / "bin" / name).write_text(content)
            (folder / "bin" / name).chmod(0o755)

    def arguments(self, **more: object) -> str:
        chosen = {
            "data.path": "data",
            "model.factory": "slow_model:slow",
            "model.sequence": SEQUENCE,
            "train.batch": BATCH,
            "train.steps": STEPS,
            "checkpoint.every": 0,
            "data.record_ids": "true",
            "run.dir": "run",
        } | {name.replace("__", "."): value for name, value in more.items()}
        return " ".join(f"--{name} {value}" for name, value in chosen.items())

    def start(self, number: int, variables: dict[str, str]) -> subprocess.Popen[str]:
        """Run job `number` of the server as PBS does: a copy of the script, these variables, no arguments."""
        copy = self.folder / f"{number}.SC"
        copy.write_bytes((ROOT / "jobs/train.pbs").read_bytes())
        environment = clean_environment(
            PATH=f"{self.folder / 'bin'}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
            PYTHONPATH=f"{ROOT}:{self.folder}",
            PBS_JOBID=f"{number}.server",
            PBS_NODEFILE=str(self.folder / "nodes"),
            PBS_O_WORKDIR=str(self.folder),
            PBS_O_QUEUE="night",
            RECORD=str(self.record),
            OMPI_MCA_osc="^ucx",
        )
        defaults = {"VENV": sys.prefix, "JOBS": str(ROOT / "jobs")}
        with open(self.folder / f"out-{number}", "w") as out:
            return subprocess.Popen(
                ["bash", str(copy)],
                cwd="/",
                env=environment | defaults | variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def out(self, number: int) -> str:
        return (self.folder / f"out-{number}").read_text(errors="replace")

    def finish(self, number: int, variables: dict[str, str], seconds: float = 110) -> int:
        """Run a job to its end; its exit code."""
        return self.wait(self.start(number, variables), number, seconds)

    def wait(self, job: subprocess.Popen[str], number: int, seconds: float = 110) -> int:
        try:
            return job.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise AssertionError(f"not done after {seconds} s:\n{self.out(number)}") from None

    def wait_for_step(self, step: int, job: subprocess.Popen[str], number: int) -> None:
        deadline = time.monotonic() + 100
        while not any(line["step"] >= step for line in self.metrics()):
            assert job.poll() is None and time.monotonic() < deadline, self.out(number)
            time.sleep(0.1)

    def newest_step(self) -> int:
        return int(sorted((self.run / "checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))

    def submitted(self) -> list[tuple[list[str], dict[str, str]]]:
        """What qsub was given each time: its arguments, and the variables that it would hand on."""
        found = []
        for path in sorted(self.record.iterdir()):
            words, _, environment = path.read_text().partition("\0\n")
            arguments = words.split("\0")
            values = dict(pair.split("=", 1) for pair in environment.split("\0") if "=" in pair)
            names = arguments[arguments.index("-v") + 1].split(",")
            found.append((arguments, {name: values[name] for name in names}))
        return found

    def metrics(self) -> list[dict]:
        try:
            return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        except (OSError, ValueError):  # not there yet, or half a line
            return []


def delete(job: subprocess.Popen[str]) -> None:
    """What `qdel` does first: TERM for every process of the job."""
    for path in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if path.name.isdigit() and os.getsid(int(path.name)) == job.pid:
                os.kill(int(path.name), signal.SIGTERM)


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


@pytest.mark.campaign
def test_a_job_that_is_asked_to_stop_submits_the_next_and_one_that_is_deleted_does_not(batch):
    first = {"ARGUMENTS": batch.arguments(), "ATTEMPTS": "5"}
    job = batch.start(1000, first)
    batch.wait_for_step(5, job, 1000)
    os.kill(job.pid, signal.SIGUSR1)  # what the script's own timer does ten minutes before the time limit
    assert batch.wait(job, 1000) == 75, batch.out(1000)
    step = batch.newest_step()
    assert 5 <= step < STEPS
    out = batch.out(1000)
    assert (
        "got USR1" in out and f"saved at step {step}, to be started again" in out and "next job is 1001.server" in out
    )
    [(arguments, variables)] = batch.submitted()
    wanted = ["-W", "depend=afterany:1000.server", "-l", f"select={SELECT}", "-l", "walltime=10:00:00"]
    assert arguments[:-3] == [*wanted, "-q", "night", "-A", "climate"]
    assert arguments[-1] == str(ROOT / "jobs/train.pbs")
    assert variables["FIRST_JOB"] == "1000.server" and variables["ATTEMPTS"] == "5"
    assert variables["ARGUMENTS"] == first["ARGUMENTS"]

    job = batch.start(1001, variables)
    batch.wait_for_step(step + 5, job, 1001)
    delete(job)
    assert batch.wait(job, 1001) == 75, batch.out(1001)
    deleted_at = batch.newest_step()
    out = batch.out(1001)
    assert step + 5 <= deleted_at < STEPS and f"saved at step {deleted_at}, to be started again" in out
    assert "deleted: no next job; go on with: FIRST_JOB=1000.server ARGUMENTS=" in out
    assert len(batch.submitted()) == 1

    assert batch.finish(1002, variables) == 0, batch.out(1002)  # as that line says
    for number, start in ((1001, step), (1002, deleted_at)):
        out = batch.out(number)
        assert f"job 1000.server in run: from step {start} with 2 ranks on 1 nodes" in out
        assert f"resumed from run/checkpoints/step-{start:08d}" in out
    assert "done" in out and len(batch.submitted()) == 1
    lines = batch.metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    ids = [number for line in lines for number in line["ids"]]
    assert len(ids) == STEPS * BATCH == len(set(ids))
    assert {line["world_size"] for line in lines} == {2}


@pytest.mark.campaign
def test_jobs_that_fail_again_and_again_without_progress_are_given_up(batch):
    variables = {"ARGUMENTS": batch.arguments(model__factory="slow_model:broken"), "ATTEMPTS": "2"}
    for number in (1000, 1001):
        assert batch.finish(number, variables) not in (0, 2, 75), batch.out(number)
        assert "failed with exit code" in batch.out(number) and "ZeroDivisionError" in batch.out(number)
        variables = batch.submitted()[-1][1]
    assert len(batch.submitted()) == 2
    assert batch.finish(1002, variables) == 1
    assert "giving up: 2 attempts in a row did not get past step 0" in batch.out(1002)
    assert len(batch.submitted()) == 2


def test_a_wrong_configuration_is_not_tried_again(batch):
    assert batch.finish(1000, {"ARGUMENTS": "--train.stepps 5"}) == 2
    assert "train.steps" in batch.out(1000) and not batch.submitted()


# -- devices, under Slurm: `mpirun` and `srun` give processes those that Slurm 22.05 gave them in a job of two devices

SCONTROL = f"""#!/usr/bin/env bash
echo "   Command={ROOT}/jobs/train.sbatch"
"""
MPIRUN = """#!/usr/bin/env bash
[ -z "${SLURM_GPUS_PER_TASK:-}" ] || export PRETEND_VISIBLE_DEVICES=0 # its daemon is one task: one device for all ranks
exec MPIRUN "$@"
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done # of `srun --options command`: for what is done once on each node
exec "$@"
"""
STEP = """#!/usr/bin/env bash
export PRETEND_VISIBLE_DEVICES=0,1
[ -z "${SLURM_GPUS_PER_TASK:-}" ] || PRETEND_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK
exec "$@"
"""


def with_devices(batch: Batch, **variables: str) -> str:
    """Run jobs/train.sbatch on one node with two devices; what it printed."""
    real, *options = launcher(2)
    arguments = batch.arguments(train__steps=2, model__factory="slow_model:quick").split()
    for name, content in (("scontrol", SCONTROL), ("mpirun", MPIRUN), ("srun", SRUN), ("step", STEP)):
        (batch.folder / "bin" / name).write_text(content.replace("MPIRUN", real))
        (batch.folder / "bin" / name).chmod(0o755)
    path = f"{batch.folder / 'bin'}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(batch.folder), "SLURM_JOB_NUM_NODES": "1"}
    slurm |= {"SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2"}
    shown = pretend_environment()
    shown["PYTHONPATH"] = f"{shown['PYTHONPATH']}:{ROOT}:{batch.folder}"
    step = f"{real} {' '.join(options)} {batch.folder}/bin/step"
    variables = {name: value.replace("STEP", step) for name, value in variables.items()}
    done = subprocess.run(
        ["bash", str(ROOT / "jobs/train.sbatch"), *arguments],
        cwd=batch.folder,
        env=clean_environment(PATH=path, VENV="/nowhere", OMPI_MCA_osc="^ucx", **shown) | slurm | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize(
    ("asked", "sees"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "a rank sees 2"),  # mpirun
        pytest.param({"SLURM_GPUS_PER_NODE": "2"}, "a rank sees 2", marks=pytest.mark.full),  # mpirun
        pytest.param({"SLURM_GPUS_PER_NODE": "2", "LAUNCH": "STEP"}, "a rank sees 2", marks=pytest.mark.full),
        pytest.param({"SLURM_GPUS_PER_TASK": "1", "LAUNCH": "STEP"}, "a rank sees 1", marks=pytest.mark.campaign),
    ],
    ids=["mpirun-per-task", "mpirun-per-node", "srun-per-node", "srun-per-task"],
)
def test_each_rank_of_a_batch_job_has_a_device_of_its_own(batch, device, asked, sees):
    (batch.folder / "slow_model.py").write_text(FACTORY + "\ndef quick(description):\n    return Slow(0)\n")
    out = with_devices(batch, **asked)
    assert sees in out and "each rank has its own: 0 pretend:0 (pretend-0)" in out, out
    assert ("1 pretend:0 (pretend-1)" if sees.endswith("1") else "1 pretend:1 (pretend-1)") in out
    trained = out.partition(" to look at")[2]  # the doctor's last line
    assert "2 ranks on 1 nodes" in out and "1 x Pretend 0, 1 x Pretend 1" in trained and "done" in trained, out
    assert {line["world_size"] for line in batch.metrics()} == {2}
