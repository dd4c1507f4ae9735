"""Jobs that run out of memory: one line says what filled it, and the first setting that it names makes the job fit."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
import warm
from support import job, launcher, memory_cgroup, one_line, train_command

OPEN_MPI = (Path(sys.prefix) / "bin/ompi_info").exists()
MIB = 1 << 20
MODEL = ["--model.layers", "4", "--model.width", "128", "--model.heads", "4", "--model.sequence", "64"]
SHORT = ["--train.steps", "2", "--train.evaluate_every", "0", "--train.evaluate_samples", "8"]

LIMITED = """
import resource, sys
import mpitrain as mt
from mpitrain.config.settings import Config

class Limited(mt.Callback):
    def on_fit_start(self, trainer):
        if trainer.world.rank == 1:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (150 << 20), resource.RLIM_INFINITY))

sys.exit(mt.Trainer(lambda: Config.from_args(sys.argv[1:]), callbacks=[Limited()]).fit())
"""


def test_a_failed_allocation_ends_in_one_line_with_what_filled_the_memory(sentence, tmp_path):
    arguments = [*MODEL, *SHORT, "--train.batch", "256", "--data.path", sentence, "--run.dir", tmp_path / "run"]
    done = warm.job(2, [sys.executable, "-c", LIMITED, *map(str, arguments)])
    line = one_line(done, "rank 1: host ", "is out of memory: the allocation of ", code=1, alone=False)
    shown = dict(re.findall(r"(parameters|gradients|activations|other) ([\d.]+ MiB)", line))
    assert set(shown) == {"parameters", "gradients", "activations", "other"}
    assert float(shown["activations"].split()[0]) > 20  # of the forward pass that failed
    assert "of addresses, ulimit -v" in line
    assert re.search(r"; (\S+ \S+ would save [\d.]+ MiB, ){2}\S+ \S+ would save [\d.]+ MiB per rank, by formula$", line)


REFUSED = """
import resource, sys
import numpy, torch
import mpitrain as mt
from mpitrain.config.settings import Config

class Refused(mt.Callback):
    def on_update(self, trainer, step):
        if trainer.world.rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (64 << 30, resource.RLIM_INFINITY))
            {request}

sys.exit(mt.Trainer(lambda: Config.from_args(sys.argv[1:]), callbacks=[Refused()]).fit())
"""


@pytest.mark.parametrize(
    ("request_text", "failed"),
    [
        ("torch.zeros(1).expand(1 << 38).split(1)", "an allocation failed"),  # std::bad_alloc of a std::vector
        ("numpy.empty(1 << 38)", "the allocation of 2.00 TiB failed"),
    ],
    ids=["C++", "NumPy"],
)
def test_failures_of_other_allocators_end_in_the_same_line(sentence, tmp_path, request_text, failed):
    arguments = [*MODEL, *SHORT, "--train.batch", "32", "--data.path", sentence, "--run.dir", tmp_path / "run"]
    done = warm.job(2, [sys.executable, "-c", REFUSED.format(request=request_text), *map(str, arguments)])
    line = one_line(done, "rank 1: host ", f"is out of memory: {failed}", code=1, alone=False)
    assert re.search(r"parameters .* activations .*; (\S+ \S+ would save [\d.]+ MiB, ){2}\S+ \S+ would save ", line)


LOOP = """
import resource, sys
import torch
import mpitrain as mt

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
engine = mt.initialize(model, torch.optim.AdamW(model.parameters()))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
engine(torch.zeros(40_000, 256))
"""


def test_a_failed_allocation_in_a_user_loop_ends_in_one_line_too():
    done = job(0, [sys.executable, "-c", LOOP])
    one_line(done, "is out of memory: the allocation of 39.1 MiB failed", "parameters 2.01 MiB", "ulimit", code=1)


@pytest.mark.campaign
def test_a_job_killed_by_its_cgroup_says_so_when_it_starts_again_and_fits_with_the_first_setting(sentence, tmp_path):
    run = tmp_path / "run"
    command = [
        *train_command(
            *MODEL, *SHORT, "--model.layers", "8", "--train.batch", "256", "--data.path", sentence, "--run.dir", run
        )
    ]
    with memory_cgroup(600 * MIB) as inside:
        killed = job(0, [*inside, *command])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        told = job(0, [*inside, sys.executable, "-m", "mpitrain.doctor", "--killed", str(run)]).stderr.strip()
        assert "is out of memory: the kernel killed a process of this job's cgroup" in told
        assert "the limit is 600 MiB; " in told
        setting, value = re.search(r"; (\S+) (\S+) would save", told).groups()
        done = job(0, [*inside, *command, f"--{setting}", value])
        assert done.returncode == 0, done.stderr
    assert told in done.stdout + done.stderr
    starts = [line for line in map(json.loads, (run / "events.jsonl").open()) if line["event"] == "start"]
    assert "message" not in starts[0] and starts[1]["message"] == told.removeprefix("mpitrain: ")


GROWING = """
import sys
import torch
import mpitrain as mt
from mpitrain.config.settings import Config

class Growing(mt.Callback):
    def on_update(self, trainer, step):
        if trainer.world.rank == 1 and trainer.world.size == 3 and step.number == 5:
            kept = []
            while True:
                kept.append(torch.ones(4 << 20))

sys.exit(mt.Trainer(lambda: Config.from_args(sys.argv[1:]), callbacks=[Growing()]).fit())
"""


@pytest.mark.campaign
@pytest.mark.skipif(not OPEN_MPI, reason="ranks can die alone only under Open MPI 5; this environment has another")
def test_ranks_that_go_on_without_one_that_the_cgroup_killed_say_which(sentence, tmp_path):
    arguments = ["--train.steps", "12", "--train.batch", "12", "--elastic.mode", "shrink", "--data.path", sentence]
    with memory_cgroup(1200 * MIB) as inside:
        command = [*inside, *launcher(3), "--with-ft", "ulfm", sys.executable, "-c", GROWING]
        done = job(0, [*command, *map(str, [*MODEL, *arguments, "--run.dir", tmp_path / "run"])])
    assert done.returncode == 0, done.stderr
    told = re.search(r"^mpitrain: (host .* is out of memory: .*)$", done.stdout + done.stderr, re.MULTILINE)[1]
    assert "a process of this job's cgroup, most likely rank 1, which had parameters" in told
    assert "the limit is 1.17 GiB; " in told and " would save " in told
    (lost,) = [line for line in map(json.loads, (tmp_path / "run/events.jsonl").open()) if line["event"] == "lost"]
    assert lost["ranks"] == [1] and lost["message"] == told


SHARING = """
import sys
import torch
import mpitrain as mt
from mpitrain.config.settings import Config

class Sharing(mt.Callback):
    def on_update(self, trainer, step):
        if trainer.world.rank == 1:
            torch.ones(32 << 20).share_memory_()

sys.exit(mt.Trainer(lambda: Config.from_args(sys.argv[1:]), callbacks=[Sharing()]).fit())
"""


@pytest.mark.campaign
def test_shared_memory_that_is_full_is_named_in_the_line(sentence, tmp_path):
    inside = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=40m tmpfs /dev/shm || exit 77; exec "$0" "$@"']
    arguments = [*MODEL, *SHORT, "--train.batch", "32", "--data.path", sentence, "--run.dir", tmp_path / "run"]
    done = job(0, [*inside, *launcher(2), sys.executable, "-c", SHARING, *map(str, arguments)])
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting needs root")
    line = one_line(done, "rank 1: host ", "because /dev/shm is full (to enlarge", code=1, alone=False)
    assert re.search(r"parameters .* activations .*; (\S+ \S+ would save [\d.]+ MiB, ){2}", line)
