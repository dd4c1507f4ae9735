"""Ranks that are forked from a warm process, and how they end."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_signalled_while_it_ends_prints_no_traceback(forked):
    """Signal a rank while it ends, as mpirun does when several ranks fail at the same time."""
    work = "import os; print(os.getpid(), flush=True); input(); os._exit(3)"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    rank = subprocess.Popen([forked.python, "-c", work], **pipes)
    worker = Path("/proc", rank.stdout.readline().decode().strip())
    status = Path("/proc", str(rank.pid), "status")

    def hands_on() -> bool:
        caught = int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16)
        return bool(caught >> (signal.SIGCONT - 1) & 1)

    wait_until(hands_on)
    rank.send_signal(signal.SIGSTOP)
    rank.stdin.write(b"\n")
    rank.stdin.flush()
    wait_until(lambda: not worker.exists())
    rank.send_signal(signal.SIGTERM)
    rank.send_signal(signal.SIGCONT)
    assert (rank.communicate(timeout=30)[1], rank.returncode) == (b"", 3)
