"""Several hosts on one machine: network namespaces joined by a switch, between which MPI speaks TCP.

    h1 10.77.0.1 --- v1 |
    h2 10.77.0.2 --- v2 | bridge, in a namespace of its own: nothing is changed outside
    h3 10.77.0.3 --- v3 |

Each host has its own name (a UTS namespace), so that MPI takes it for a node: shared memory ends at it. All see
the same files, processes and cores; `disks` gives each a folder that the others do not see. Needs root and `ip`.
Open MPI only: its mpirun starts ranks through enter_host.sh instead of ssh. From a shell, three hosts with two ranks
each, and the same where each host has 1 Gbit/s and 10 ms to any other (link.py):

    python tests/cluster/namespace_hosts.py python tests/cluster/two_level.py
    python tests/cluster/namespace_hosts.py --link 1e9,0.01 --ranks 1,1,1 python tests/cluster/two_level.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from link import PIECE, Impossible, Link, StandIn, has_netem
from support import PATIENCE, clean_environment

AGENT = Path(__file__).with_name("enter_host.sh")
NETWORK = "10.77.0."
_NAME = "mpitrain-{pid}-"


class Hosts:
    """Hosts 1 to `count`. Use it in `with`; processes that still run on them at the end are killed.

    link: Link between each host and the switch; without one, as fast as this machine. Where the kernel has no
    `tc netem`, the process `stand_in` takes the place of the switch and of v1, v2, ...
    """

    def __init__(self, count: int = 3, link: Link | None = None) -> None:
        self.count = count
        self.link = link
        self.stand_in: StandIn | None = None
        self.prefix = _NAME.format(pid=os.getpid())
        self._switch = f"{self.prefix}switch"
        self._disks: Path | None = None

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0:
            raise Impossible("network namespaces need root")
        if shutil.which("ip") is None:
            raise Impossible("network namespaces need `ip` (Debian: iproute2)")
        _remove_those_of_dead_processes()
        try:
            self._make()
            self._await_all()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise Impossible(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from None
        except Impossible:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.stand_in is not None:
            self.stand_in.close()
        _remove([self._switch, *(self.namespace(host) for host in range(1, self.count + 1))])

    def _make(self) -> None:
        names = [self.namespace(host) for host in range(1, self.count + 1)]
        for name in (self._switch, *names):
            _ip("netns", "add", name)
        if self.link is not None and not has_netem(self._switch):
            self.stand_in = StandIn(self.link, self._switch, names)
        else:
            self._join_by_bridge()
        for host, name in enumerate(names, start=1):
            _ip("-n", name, "address", "add", f"{NETWORK}{host}/24", "dev", "e0")
            _ip("-n", name, "link", "set", "e0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            for setting, value in (self.link.settings() if self.link else {}).items():
                _ip("netns", "exec", name, "bash", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")

    def _join_by_bridge(self) -> None:
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in range(1, self.count + 1):
            name = self.namespace(host)
            _ip("-n", self._switch, "link", "add", f"v{host}", "type", "veth", "peer", "name", "e0", "netns", name)
            _ip("-n", self._switch, "link", "set", f"v{host}", "master", "bridge", "up")
            if self.link is not None:
                leaving, arriving = self.link.netem()
                _ip("-n", name, "link", "set", "e0", "gso_max_size", str(PIECE))
                _run("tc", "-n", name, "qdisc", "add", "dev", "e0", "root", *leaving)
                _run("tc", "-n", self._switch, "qdisc", "add", "dev", f"v{host}", "root", *arriving)

    def namespace(self, host: int) -> str:
        return f"{self.prefix}h{host}"

    def disks(self, folder: Path) -> Path:
        """Give each host a disk of its own: jobs on host N see folder/hN as folder/own. Return folder/own."""
        for name in ("own", *(f"h{host}" for host in range(1, self.count + 1))):
            (folder / name).mkdir(parents=True)
        self._disks = folder
        return folder / "own"

    def kill(self, host: int) -> None:
        """Kill all processes on a host at once."""
        _kill_all_on(self.namespace(host))

    def cut(self, host: int) -> None:
        """Take a host off the network without notice, like a node that dies."""
        self._connect(host, False)

    def mend(self, host: int) -> None:
        self._connect(host, True)

    def _connect(self, host: int, on: bool) -> None:
        if self.stand_in is not None:
            self.stand_in.tell("mend" if on else "cut", host)
        else:
            _ip("-n", self._switch, "link", "set", f"v{host}", "up" if on else "down")

    def clear(self) -> None:
        """Kill all processes on the hosts, reconnect the hosts, and return when they reach each other."""
        hosts = range(1, self.count + 1)
        for host in hosts:
            _kill_all_on(self.namespace(host))
            self.mend(host)
        for host in hosts:  # a host that was looked for in vain counts as unreachable for some time more
            _ip("-n", self.namespace(host), "neighbour", "flush", "dev", "e0")
        self._await_all()

    def _await_all(self) -> None:
        """Wait until all hosts reach each other."""
        hosts, deadline = range(1, self.count + 1), time.monotonic() + 20 * PATIENCE
        while not all(self.reaches(one, other) for one in hosts for other in hosts if one != other):
            assert time.monotonic() < deadline, "the hosts do not reach each other"

    def reaches(self, one: int, other: int) -> bool:
        """Return True where a packet from one host and its answer arrive within 2 s."""
        words = [
            "ip",
            "netns",
            "exec",
            self.namespace(one),
            "timeout",
            "2",
            "bash",
            "-c",
            f": <>/dev/tcp/{NETWORK}{other}/9",
        ]
        return b"refused" in subprocess.run(words, capture_output=True).stderr  # nobody listens there

    def mpirun(
        self, command: Sequence[object], ranks: Sequence[int] = (2, 2, 2), options: Sequence[str] = ()
    ) -> list[str]:
        """Return the command that runs `command` on ranks[0] ranks of host 1, ranks[1] of host 2, and so on."""
        mpirun = Path(sys.prefix) / "bin/mpirun"
        where = ",".join(f"{NETWORK}{host}:{count}" for host, count in enumerate(ranks, start=1))
        # the hosts share the cores of this machine, which MPI cannot know: waiting ranks must give way
        tcp = {
            "mpi_yield_when_idle": "1",
            "pml": "ob1",
            "btl": "tcp,sm,self",
            "btl_tcp_if_include": "e0",
            "plm_ssh_agent": str(AGENT),
        }
        settings = [word for name, value in tcp.items() for word in ("--mca", name, value)]
        inside = [
            *(str(mpirun), "--allow-run-as-root", "--bind-to", "none", "--host", where, "-n", str(sum(ranks))),
            *(*settings, *options, *map(str, command)),
        ]
        return ["ip", "netns", "exec", self.namespace(1), "unshare", "--uts", "bash", "-c",
                f'hostname h1; {self._mount("h1")} exec "$@"', "bash", *inside]  # fmt: skip

    def _mount(self, name: str) -> str:
        return f"mount --bind {self._disks}/{name} {self._disks}/own;" if self._disks is not None else ""

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of `mpirun`: variables of enter_host.sh, and gloo's network interface."""
        variables = {"MPITRAIN_HOSTS": self.prefix, "MPITRAIN_FIRST_HOST": f"{NETWORK}1", "GLOO_SOCKET_IFNAME": "e0"}
        variables["MPITRAIN_MOUNT"] = self._mount("$(hostname)")
        return clean_environment(**variables, **more)

    def run(
        self, command: Sequence[object], ranks: Sequence[int] = (2, 2, 2), timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a job across the hosts and capture its output."""
        return subprocess.run(
            self.mpirun(command, ranks),
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )


def why_not(link: Link | None = None) -> str:
    """Return why Open MPI jobs across namespaces joined by `link` are impossible here; empty if they are possible."""
    if not (Path(sys.prefix) / "bin/ompi_info").exists():
        return "hosts in network namespaces are for Open MPI, this environment has another MPI"
    try:
        with Hosts(1, link):
            return ""
    except Impossible as error:
        return str(error)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _remove(names: Sequence[str]) -> None:
    for name in names:
        _kill_all_on(name)
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", name)


def _kill_all_on(name: str) -> None:
    with suppress(subprocess.CalledProcessError):
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove_those_of_dead_processes() -> None:
    head, tail = _NAME.split("{pid}")
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        pid = name.removeprefix(head).partition(tail)[0]
        if name.startswith(head) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove([name])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=Link.parse, metavar="BITS_PER_SECOND,SECONDS")
    parser.add_argument("--ranks", default="2,2,2", metavar="N,...", help="numbers of ranks, one for each host")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if not options.command:
        parser.error("no command")
    ranks = [int(count) for count in options.ranks.split(",")]
    try:
        with Hosts(len(ranks), options.link) as hosts:
            return subprocess.run(hosts.mpirun(options.command, ranks), env=hosts.environment()).returncode
    except Impossible as reason:
        print(f"no hosts: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
