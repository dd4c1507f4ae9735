"""A real Slurm cluster on one machine: a slurmctld, a munged, and several slurmd, each of which is a node.

Everything it writes lies in one folder; the machine's own Slurm is not touched. Needs root, since slurmd
starts jobs as their users, and Debian's slurm-wlm and munge (tests/cluster/install.sh).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from support import ROOT, clean_environment

CONFIGURATION = """\
ClusterName=mpitrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{task}
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters={resources}
SlurmctldTimeout=10
SlurmdTimeout=20
InactiveLimit=0
KillWait=20
MinJobAge=600
JobRequeue=1
NodeName={nodes} NodeAddr=127.0.0.1 NodeHostName={host} Port={ports} CPUs=2 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000{devices} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=main Default=YES
PartitionName=graceful GraceTime=30
PartitionName=lost PreemptMode=CANCEL
PartitionName=urgent PriorityTier=2 PreemptMode=OFF
{kinds}
"""


class Impossible(Exception):
    """The reason why such a cluster is impossible on this machine."""


class SlurmCluster:
    """Nodes n1 to n`count` of 2 cores. Use it in `with`.

    Jobs of the partition "urgent" take the nodes away from all others: jobs of "main" are queued again, jobs of
    "graceful" are queued again after 30 s, and jobs of "lost" end.

    Attributes:
        variables: Environment variables for Slurm's commands and jobs.
    """

    def __init__(self, folder: Path, count: int = 3, devices: int = 0, *, limits_memory: bool = False) -> None:
        """Describe a cluster.

        devices: Devices of each node, copies of /dev/null, which Slurm gives to jobs. limits_memory: If true, a job may
        use the memory that it requested and no more, by a cgroup.
        """
        self.folder, self.count, self.devices, self.limits_memory = folder, count, devices, limits_memory
        self.variables: dict[str, str] = {}
        self.configuration = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        missing = [
            name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name, path=_PATH) is None
        ]
        if missing:
            raise Impossible(f"no {missing[0]}: Debian's slurm-wlm and munge are needed (tests/cluster/install.sh)")
        if os.geteuid() != 0:
            raise Impossible("slurmd needs root")
        with ExitStack() as undo:
            undo.callback(self.__exit__)
            self._start()
            undo.pop_all()
        return self

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # munged and slurmctld refuse folders that others may write to
        (folder / "state").mkdir()
        ports = _free_ports(self.count + 1)
        host = socket.gethostname().partition(".")[0]
        self.configuration.write_text(
            CONFIGURATION.format(
                host=host,
                folder=folder,
                port=ports[0],
                nodes=",".join(self.nodes),
                ports=",".join(map(str, ports[1:])),
                devices=f" Gres=gpu:{self.devices}" if self.devices else "",
                kinds="GresTypes=gpu" if self.devices else "",
                task="cgroup" if self.limits_memory else "none",
                resources="CR_Core_Memory" if self.limits_memory else "CR_Core",
            )
        )
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainRAMSpace=yes\n")  # read only by task/cgroup
        for number in range(self.devices):
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # Slurm counts devices alone
        files = f"NodeName={','.join(self.nodes)} Name=gpu File={folder}/gpu[0-{self.devices - 1}]"
        if self.devices:
            (folder / "gres.conf").write_text(f"AutoDetect=off\n{files}\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        options = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "seed", "pid")]
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *options)
        self._wait(lambda: (folder / "munge.socket").exists(), "munged does not start")
        self._daemon("slurmctld", "-D", "-f", self.configuration)
        for node in self.nodes:
            self.start_node(node)
        self._wait(lambda: set(self.states().values()) == {"idle"}, "the nodes do not come up")

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            with suppress(subprocess.SubprocessError, OSError):
                self.call("scancel", "--quiet", "--user=root", timeout=10)
                self.wait_until_idle(15)
        for name in reversed(list(self._daemons)):
            self._stop(name)
        for process in self._processes_of_jobs():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.count + 1)]

    def environment(self) -> dict[str, str]:
        """Return the environment of Slurm's commands and of jobs, in which this test's Python comes first."""
        settings = {"SLURM_CONF": str(self.configuration), "PATH": f"{sys.prefix}/bin:{_PATH}", "PYTHONPATH": str(ROOT)}
        # the nodes share the cores of this machine, which Open MPI cannot know: waiting ranks must give way
        return clean_environment(**settings, VENV=sys.prefix, OMPI_MCA_mpi_yield_when_idle="1") | self.variables

    def call(self, *command: object, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, command)], env=self.environment(), capture_output=True, text=True, timeout=timeout
        )

    def states(self) -> dict[str, str]:
        """Return the state of each node in sinfo's words."""
        lines = self.call("sinfo", "-h", "-N", "-o", "%N %T").stdout.split("\n")
        return {words[0]: words[1] for words in map(str.split, lines) if len(words) == 2}

    def submit(self, *arguments: object, cwd: Path) -> str:
        """Submit a job with sbatch, and return its number."""
        command = ["sbatch", "--parsable", *map(str, arguments)]
        result = subprocess.run(command, env=self.environment(), cwd=cwd, capture_output=True, text=True, timeout=30)
        if result.returncode:
            raise RuntimeError(f"sbatch failed: {result.stderr}")
        return result.stdout.strip()

    def preempt(self, number: str, folder: Path) -> None:
        """Have an urgent job take all nodes for a moment, and return when Slurm has begun to end job `number`."""
        script = folder / "urgent"
        script.write_text("#!/bin/sh\n")
        self.submit(
            "--partition=urgent", f"--nodes={self.count}", "--exclusive", "--output=/dev/null", script, cwd=folder
        )
        self.wait_for(number, lambda job: job["JobState"] != "RUNNING", 60)

    def job(self, number: str) -> dict[str, str]:
        """Return scontrol's fields of a job: JobState, Restarts, NodeList, ExitCode, ..."""
        words = self.call("scontrol", "-o", "show", "job", number).stdout.split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait_for(self, number: str, condition: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """Wait until `condition` is true of the job, and return its fields; TimeoutError shows them, too."""
        job: dict[str, str] = {}

        def fits() -> bool:
            nonlocal job
            job = self.job(number)
            return condition(job)

        self._wait(fits, f"job {number}", seconds, lambda: str(job))
        return job

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until no job runs, ends or is queued."""
        self._wait(lambda: not self.call("squeue", "-h").stdout.strip(), "jobs stay", seconds)

    def wait_for_restart(self, number: str, restarts: int, seconds: float = 120) -> None:
        """Wait until a job has restarted `restarts` times, or has ended, without Slurm's own delay of two minutes.

        A short delay is necessary: the nodes refuse a job that they were just asked to end ("credential revoked").
        """
        requeued = time.monotonic()

        def runs(job: dict[str, str]) -> bool:
            nonlocal requeued
            if job.get("JobState") != "PENDING":
                requeued = time.monotonic()
            elif time.monotonic() > requeued + 4:
                self.call("scontrol", "update", f"JobId={number}", "StartTime=now")
            return int(job.get("Restarts", 0)) >= restarts and job["JobState"] not in ("PENDING", "COMPLETING")

        self.wait_for(number, runs, seconds)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd, its step daemons and all their processes, so that none can report the end."""
        tasks = [p for p in self._processes_of_jobs() if _environment(p).get("SLURMD_NODENAME") == node]
        steps = {_parent(task) for task in tasks}
        daemon = self._daemons.pop(node)
        for process in (daemon.pid, *(p for p in steps if "slurmstepd" in _command(p)), *tasks):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        daemon.wait(10)

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-D", "-N", node, "-f", self.configuration, name=node)

    def _daemon(self, program: str, *arguments: object, name: str = "") -> None:
        """Start a daemon that dies with the tests, however they end."""
        path = shutil.which(program, path=_PATH)
        with open(self.folder / f"{name or program}.out", "ab") as out:
            self._daemons[name or program] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(path), *map(str, arguments)],
                stdout=out,
                stderr=out,
                env=self.environment(),
                start_new_session=True,
            )

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(10)

    def _processes_of_jobs(self) -> list[int]:
        """Return Slurm's step daemons, and processes that jobs of this cluster have left running."""
        conf = str(self.configuration)
        return [p for p in _all_processes() if p != os.getpid() and _environment(p).get("SLURM_CONF") == conf]

    def _wait(
        self, condition: Callable[[], bool], what: str, seconds: float = 30, more: Callable[[], str] = lambda: ""
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    text = (self.folder / f"{name}.out").read_text(errors="replace")[-1000:]
                    raise Impossible(f"{name} ended with {daemon.returncode}: {text}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds} s {more()}")
            time.sleep(0.2)


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    """Return free ports for the daemons, below those that the kernel assigns to outgoing connections."""
    ports: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def _all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(process: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.partition("=")[::2] for word in words if "=" in word)


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
