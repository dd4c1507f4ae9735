"""A slow link between hosts in namespaces: `tc netem` where the kernel has it, link_stand_in.c elsewhere.

Both do the same. A host sends and receives at most `bits_per_second` each way, and a packet arrives `seconds` after
it was sent, so a round trip takes twice `seconds`. TCP itself is the machine's: with cubic, Linux's default, an idle
connection starts slowly again; with bbr it does not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("link_stand_in.c")
QUEUE = 0.05  # seconds of data that wait for a cable; what comes then is dropped
PIECE = 16384  # bytes: what TCP hands over at once with netem, which counts such pieces and not bytes


class Impossible(Exception):
    """The reason why such hosts, or such a link between them, are impossible on this machine."""


@dataclass(frozen=True)
class Link:
    """The link between each host and the switch.

    Attributes:
        bits_per_second: Bandwidth of each direction, both at once.
        seconds: Delay from a host to any other, as `tc netem delay` on the sender's interface takes it.
    """

    bits_per_second: float
    seconds: float

    def __post_init__(self) -> None:
        if not (0 < self.bits_per_second <= 1e11 and 0 <= self.seconds <= 1):
            raise ValueError(f"a link has 0 to 1e11 bits per second and 0 to 1 seconds, not {self}")

    @classmethod
    def parse(cls, text: str) -> Link:
        """Return the link of a text such as "1e9,0.01": bits per second, seconds.

        Raises:
            ValueError: The text has another form.
        """
        bits_per_second, seconds = map(float, text.split(","))
        return cls(bits_per_second, seconds)

    def netem(self) -> tuple[list[str], list[str]]:
        """Return the arguments of `tc` for the packets that leave a host, and for those that the switch sends to it."""
        rate = ["rate", f"{self.bits_per_second:.0f}"]
        per_second = self.bits_per_second / 8 / PIECE
        under_way, waiting = (str(int(per_second * time) + 100) for time in (self.seconds + QUEUE, QUEUE))
        return (
            ["netem", "delay", f"{1e6 * self.seconds:.0f}us", *rate, "limit", under_way],
            ["netem", *rate, "limit", waiting],
        )

    def settings(self) -> dict[str, str]:
        """Return a host's settings in /proc/sys/net/ipv4: buffers for the data that is under way or waits."""
        most = str(max(4 << 20, int(4 * self.bits_per_second / 8 * (2 * self.seconds + QUEUE))))
        return {"tcp_rmem": f"4096 131072 {most}", "tcp_wmem": f"4096 65536 {most}"}


def has_netem(namespace: str) -> bool:
    """Return True where this kernel has `tc netem`, tried on the loopback of a namespace."""
    if shutil.which("tc") is None:
        return False
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    if subprocess.run(command, capture_output=True).returncode:
        return False
    subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root"], check=True, capture_output=True)
    return True


class StandIn:
    """The process that acts as switch and cables; it makes e0 on every host, which disappears when it ends.

    Raises:
        Impossible: There is no C compiler, or no /dev/net/tun.
    """

    def __init__(self, link: Link, switch: str, hosts: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = _build(Path(folder))
            values = [f"{value:.9g}" for value in (link.bits_per_second, link.seconds, QUEUE)]
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", switch, program, *values, *hosts],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None and self._process.stderr is not None
            if self._process.stdout.readline() != "ready\n":
                error = self._process.stderr.read().strip()
                self.close()
                raise Impossible(f"the stand-in for `tc netem` does not start: {error}")

    def tell(self, word: str, host: int) -> None:
        """Send a command for one host to the process. word: "cut" or "mend"."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {host}\n")
        self._process.stdin.flush()

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far, with the kernel's work of handing frames to hosts."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Close the process's stdin, which ends it."""
        self._process.communicate()


def _build(folder: Path) -> str:
    names = (os.environ["CC"],) if os.environ.get("CC") else ("cc", "gcc", "clang")
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        raise Impossible("this kernel has no `tc netem`, and its stand-in needs a C compiler: cc, gcc or clang, or CC")
    program = str(folder / "link_stand_in")
    result = subprocess.run([compiler, "-O2", "-o", program, str(SOURCE)], capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise Impossible(
            f"building {SOURCE.name} failed: {(result.stderr.strip() or 'no reason given').splitlines()[0]}"
        )
    return program
