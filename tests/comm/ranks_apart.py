"""Real jobs under mpirun in which one rank does something else than the others, and which must, or must not, end."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from support import ROOT
from warm import job

TIMEOUT = 3  # seconds an operation may take in these jobs
PROLOGUE = """
import time
import numpy as np
import torch
import mpitrain as mt
from mpitrain.errors import CommunicationError, InputError
world = mt.init(timeout={timeout}, debug={debug})
x = torch.ones(4, 256)
"""


def run(
    tmp_path: Path, ranks: int, program: str, debug: bool, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `program` on every rank of a job; each rank prints "done" at its end."""
    prologue = PROLOGUE.format(timeout=TIMEOUT, debug=debug)
    script = tmp_path / "job.py"
    script.write_text(prologue + textwrap.dedent(program) + "\nprint('done', flush=True)\n")
    return job(ranks, [sys.executable, str(script)], cwd=tmp_path, PYTHONPATH=str(ROOT), **environment)


def failed_job(
    tmp_path: Path, ranks: int, program: str, *, debug: bool = False, limit: float = 30, **environment: str
) -> str:
    """Return the error output of a job that must fail within TIMEOUT + `limit` seconds, its start included."""
    begun = time.monotonic()
    result = run(tmp_path, ranks, program, debug, environment)
    assert result.returncode != 0, result.stdout + result.stderr
    assert time.monotonic() - begun < TIMEOUT + limit
    assert "Traceback" not in result.stderr
    again = re.compile("^\0?the cause, from above: .*\n?", re.MULTILINE)  # below mpirun's lines, which may end with a 0
    output = again.sub("", result.stderr)
    return re.sub(r"\b[3-9] s\b", f"{TIMEOUT} s", output)  # a busy machine looks a little later


def line(tmp_path: Path, text: str) -> str:
    """Return job.py:LINE for the line that contains the text."""
    lines = (tmp_path / "job.py").read_text().splitlines()
    return f"job.py:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def rows(report: str) -> dict[int, str]:
    """Return the report's table as rank -> text. The report must contain one table."""
    matches = re.findall(r"^  rank (\d+)  (.*)$", report, flags=re.MULTILINE)
    assert len(matches) == len({rank for rank, _ in matches}), report
    return {int(rank): text for rank, text in matches}


def good_job(tmp_path: Path, ranks: int, program: str, *, debug: bool = False, **environment: str) -> None:
    result = run(tmp_path, ranks, program, debug, environment)
    assert result.returncode == 0 and result.stdout.count("done") == ranks, result.stdout + result.stderr
