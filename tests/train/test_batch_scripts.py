"""jobs/train.pbs, run on this host as PBS would run it: bash, mpirun, the ranks and the training are real.

This machine has no PBS. So the tests set the variables that PBS sets (PBS_JOBID, PBS_NODEFILE, PBS_O_WORKDIR ...), and
put their own `qsub` and `qstat` on the PATH of the script: `qsub` records its arguments and environment, and `qstat`
prints a job as PBS prints it. The tests then run the submitted jobs from that record.
Not tested: that a PBS server accepts these options, and jobs on several hosts. jobs/train.sbatch, which shares
jobs/batch.sh, runs on a real Slurm cluster in tests/cluster; here only with devices, which that cluster pretends, too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support import PATIENCE, ROOT, clean_environment, launcher, pretend_environment
from warm import shared

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
    """A working directory with the text, the model and stand-ins for the commands of PBS."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.record = folder, folder / "run", folder / "record"
        text = folder / "text.txt"
        text.write_text("".join(f"line {number} of a small text\n" for number in range(STEPS * BATCH)))
        prepare([str(text)], folder / "data")
        (folder / "slow_model.py").write_text(FACTORY)
        (folder / "nodes").write_text("localhost\nlocalhost\n")  # a line for each rank
        self.record.mkdir()
        self.environment = shared().make_environment(folder / "venv")
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
        """Start job `number` as PBS does: from a copy of the script, with these variables and without arguments."""
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
        defaults = {"VENV": self.environment, "JOBS": str(ROOT / "jobs")}
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
        """Run a job to its end and return its exit code."""
        return self.wait(self.start(number, variables), number, seconds)

    def wait(self, job: subprocess.Popen[str], number: int, seconds: float = 110) -> int:
        try:
            return job.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise AssertionError(f"not done after {seconds} s:\n{self.out(number)}") from None

    def wait_for_step(self, step: int, job: subprocess.Popen[str], number: int) -> None:
        deadline = time.monotonic() + 100 * PATIENCE
        while not any(line["step"] >= step for line in self.metrics()):
            assert job.poll() is None and time.monotonic() < deadline, self.out(number)
            time.sleep(0.1)

    def newest_step(self) -> int:
        return int(sorted((self.run / "checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))

    def submitted(self) -> list[tuple[list[str], dict[str, str]]]:
        """Return for each call of qsub its arguments and the variables that it passes on to the job."""
        submissions = []
        for path in sorted(self.record.iterdir()):
            words, _, environment = path.read_text().partition("\0\n")
            arguments = words.split("\0")
            values = dict(pair.split("=", 1) for pair in environment.split("\0") if "=" in pair)
            names = arguments[arguments.index("-v") + 1].split(",")
            submissions.append((arguments, {name: values[name] for name in names}))
        return submissions

    def metrics(self) -> list[dict]:
        try:
            return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        except (OSError, ValueError):  # not there yet, or half a line
            return []


def terminate_all(job: subprocess.Popen[str]) -> None:
    """Send TERM to every process of the job, as `qdel` does first."""
    for path in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if path.name.isdigit() and os.getsid(int(path.name)) == job.pid:
                os.kill(int(path.name), signal.SIGTERM)


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


@pytest.mark.campaign
def test_stopped_job_submits_the_next_and_deleted_job_does_not(batch):
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
    options = ["-W", "depend=afterany:1000.server", "-l", f"select={SELECT}", "-l", "walltime=10:00:00"]
    assert arguments[:-3] == [*options, "-q", "night", "-A", "climate"]
    assert arguments[-1] == str(ROOT / "jobs/train.pbs")
    assert variables["FIRST_JOB"] == "1000.server" and variables["ATTEMPTS"] == "5"
    assert variables["ARGUMENTS"] == first["ARGUMENTS"]

    job = batch.start(1001, variables)
    batch.wait_for_step(step + 5, job, 1001)
    terminate_all(job)
    assert batch.wait(job, 1001) == 75, batch.out(1001)
    deleted_at = batch.newest_step()
    out = batch.out(1001)
    assert step + 5 <= deleted_at < STEPS and f"saved at step {deleted_at}, to be started again" in out
    assert "deleted, so no next job is submitted; continue with: FIRST_JOB=1000.server ARGUMENTS=" in out
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
def test_jobs_that_fail_without_progress_are_not_resubmitted(batch):
    variables = {"ARGUMENTS": batch.arguments(model__factory="slow_model:broken"), "ATTEMPTS": "2"}
    for number in (1000, 1001):
        assert batch.finish(number, variables) not in (0, 2, 75), batch.out(number)
        assert "failed with exit code" in batch.out(number) and "ZeroDivisionError" in batch.out(number)
        variables = batch.submitted()[-1][1]
    assert len(batch.submitted()) == 2
    assert batch.finish(1002, variables) == 1
    assert "giving up: 2 attempts in a row did not get past step 0" in batch.out(1002)
    assert len(batch.submitted()) == 2


def test_wrong_configuration_is_not_retried(batch):
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


def run_with_devices(batch: Batch, **variables: str) -> str:
    """Run jobs/train.sbatch on one node with two devices and return its output."""
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


@pytest.mark.simulated
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "a rank sees 2"),  # mpirun
        pytest.param({"SLURM_GPUS_PER_NODE": "2"}, "a rank sees 2", marks=pytest.mark.full),  # mpirun
        pytest.param({"SLURM_GPUS_PER_NODE": "2", "LAUNCH": "STEP"}, "a rank sees 2", marks=pytest.mark.full),
        pytest.param({"SLURM_GPUS_PER_TASK": "1", "LAUNCH": "STEP"}, "a rank sees 1", marks=pytest.mark.campaign),
    ],
    ids=["mpirun-per-task", "mpirun-per-node", "srun-per-node", "srun-per-task"],
)
def test_each_rank_of_a_batch_job_has_its_own_device(batch, device, variables, expected):
    (batch.folder / "slow_model.py").write_text(FACTORY + "\ndef quick(description):\n    return Slow(0)\n")
    out = run_with_devices(batch, **variables)
    assert expected in out and "each rank has its own: 0 pretend:0 (pretend-0)" in out, out
    assert ("1 pretend:0 (pretend-1)" if expected.endswith("1") else "1 pretend:1 (pretend-1)") in out
    trained = out.partition(" warning")[2]  # the doctor's last line
    assert "2 ranks on 1 nodes" in out and "1 x Pretend 0, 1 x Pretend 1" in trained and "done" in trained, out
    assert {line["world_size"] for line in batch.metrics()} == {2}


# -- how ranks are counted, bound and started: Slurm's commands and python are scripts of the test, mpirun is real

SITE_COMMANDS = {
    "scontrol": f"""#!/usr/bin/env bash
case "$*" in
*"show config") echo "MpiDefault              = $DEFAULT" ;;
*"show node"*) echo "NodeName=n1 CPUTot=$CPUS Sockets=1 Boards=1 CoresPerSocket=$CORES ThreadsPerCore=2" ;;
*) printf '   SubmitTime=2027-01-02T03:04:05 EligibleTime=Unknown\\n   Command={ROOT}/jobs/train.sbatch\\n' ;;
esac
""",
    "srun": """#!/usr/bin/env bash
if [ "$*" = --mpi=list ]; then
    printf 'MPI plugin types are...\\n' >&2
    printf '\\t%s\\n' $KINDS >&2
else
    echo "srun $* export $SLURM_EXPORT_ENV cpus $SRUN_CPUS_PER_TASK site ${SITE_SAYS:-} $MPITRAIN_SUBMITTED" >>"$RECORD"
fi
""",
    "python": """#!/usr/bin/env bash
case "$*" in
*mpi4py.rc*) echo "$LIBRARY" ;;
*Config.from_args*) echo "0 run" ;;
esac
""",
}


def run_on_site(folder: Path, **variables: str) -> tuple[str, list[str]]:
    """Run jobs/train.sbatch on a node of CPUS threads and CORES cores; return its output and the srun record."""
    for name, content in SITE_COMMANDS.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(content)
        (folder / "bin" / name).chmod(0o755)
    environment = {
        "LIBRARY": "MPICH Version: 4.2.3",
        "DEFAULT": "none",
        "KINDS": "none pmi2",
        "CPUS": "8",
        "CORES": "8",
    }
    environment |= {"SLURM_CPUS_ON_NODE": variables.get("CPUS", "8"), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    environment |= {"SLURM_SUBMIT_DIR": str(folder), "RECORD": str(folder / "record"), "VENV": "/nowhere"}
    done = subprocess.run(
        ["bash", str(ROOT / "jobs/train.sbatch")],
        cwd=folder,
        env=clean_environment(PATH=f"{folder / 'bin'}:{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}")
        | environment
        | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = folder / "record"
    return done.stdout + done.stderr, record.read_text().splitlines()[1:] if record.exists() else []


@pytest.mark.parametrize(
    ("site", "option"),
    [
        ({}, "--mpi=pmi2 "),
        ({"KINDS": "none pmix pmix_v4"}, "--mpi=pmix "),
        ({"KINDS": "cray_shasta none pmi2", "CRAY_MPICH_DIR": "/opt/cray"}, "--mpi=cray_shasta "),
        ({"KINDS": "cray_shasta none pmi2 pmix"}, "--mpi=pmi2 "),
        ({"DEFAULT": "pmix", "KINDS": "none pmi2 pmix"}, ""),
        ({"SLURM_MPI_TYPE": "cray_shasta"}, ""),
    ],
    ids=["pmi2", "pmix", "cray", "cray is listed", "default", "variable"],
)
def test_srun_gets_the_pmi_of_the_site(tmp_path, site, option):
    _, started = run_on_site(tmp_path, **site)
    assert len(started) == 2 and all(line.startswith(f"srun {option}--nodes=1 --ntasks=8 ") for line in started)
    submitted = time.mktime((2027, 1, 2, 3, 4, 5, 0, 0, -1))
    assert started[-1].endswith(f" {submitted:.0f}")  # for the run's goodput


@pytest.mark.parametrize(
    ("variables", "ranks", "cpus"),
    [({}, 4, 2), ({"SLURM_CPUS_PER_TASK": "3"}, 2, 4), ({"RANKS": "8"}, 8, 1), ({"CORES": "8"}, 8, 1)],
    ids=["a core each", "two cores each", "hardware threads", "CPUs that are cores"],
)
def test_ranks_get_whole_cores_where_slurm_counts_hardware_threads(tmp_path, variables, ranks, cpus):
    _, started = run_on_site(tmp_path, **{"CORES": "4"} | variables)
    assert f"--ntasks={ranks} --ntasks-per-node={ranks} " in started[-1] and f" cpus {cpus} " in started[-1], started


@pytest.mark.parametrize(
    ("variables", "bound"), [({}, ["core"]), ({"RANKS": "2"}, ["hwt", "hwt"])], ids=["cores", "hardware threads"]
)
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two processors, which are said to be one core")
def test_open_mpi_places_two_ranks_on_a_core_with_two_hardware_threads(tmp_path, variables, bound):
    topology = {"HWLOC_SYNTHETIC": "package:1 core:1 pu:2", "HWLOC_THISSYSTEM": "1"}
    machine = topology | {"CPUS": "2", "CORES": "1", "LIBRARY": "Open MPI v5.0.11", "OMPI_MCA_osc": "^ucx"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/cat").write_text(
        '#!/bin/sh\ncase "$*" in */thread_siblings_list*) echo 0,1 ;; *) exec /bin/cat "$@" ;; esac\n'
    )
    (tmp_path / "bin/cat").chmod(0o755)
    slots = {"PRTE_MCA_prte_default_hostfile": str(tmp_path / "hosts")}
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    out, _ = run_on_site(tmp_path, **machine, **slots, **variables)
    bindings = re.findall(r"Rank \d bound to package\[0\]\[(\w+):", out)
    assert bindings[-len(bound) :] == bound and "more processes than the ppr" not in out, out


def test_site_file_is_read_first_and_its_environment_reaches_the_ranks(tmp_path):
    site = tmp_path / "site.sh"
    site.write_text('[ "$NO_SUCH_VARIABLE" = "" ]\nexport SITE_SAYS=loaded\n')
    _, started = run_on_site(tmp_path, SITE=str(site), SLURM_EXPORT_ENV="NONE")
    assert len(started) == 2 and all(" export ALL " in line and " site loaded " in line for line in started)
    with pytest.raises(AssertionError, match="which does not exist"):
        run_on_site(tmp_path, SITE=str(tmp_path / "nowhere.sh"))
