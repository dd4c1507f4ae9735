"""Collectives and training steps between hosts, beside plain TCP sockets and gloo.

The benchmarks `collectives` and `step` run on three network namespaces of this machine with two ranks each
(tests/cluster/namespace_hosts.py), joined by a bridge, and then by links of 10 Gbit/s and 0.1 ms. All hosts share the
cores of this machine, so that everything a rank does takes time from the network, too. Namespaces need root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.jobs import BenchmarkParser
from benchmarks.runner.peers import OUR_DDP
from benchmarks.runner.report import ROOT, write
from mpitrain.errors import EXIT_DONE

_LINKS = {"a bridge": (), "10 Gbit/s and 0.1 ms": ("--link", "1e10,1e-4")}
_RUNS = {
    "collectives": ("--sizes", "1Mi,16Mi", "--seconds", "3"),
    "step": ("--only", f"ZeRO-0,ZeRO-1,{OUR_DDP},torch DDP", "--width", "256", "--seconds", "15"),
}


def main(arguments: Sequence[str]) -> int:
    """Run both benchmarks over each link, and return the exit code; the report has the tables and targets of all."""
    options = BenchmarkParser("hosts", "Compare collectives and steps between hosts.", "6").parse(arguments)
    values, results = dict[str, Any](), dict[str, Any]()
    report: dict[str, Any] = {"name": "hosts", "title": "Between hosts", "tables": [], "targets": [], "panels": []}
    with tempfile.TemporaryDirectory(prefix="mpitrain-") as folder:
        for link, (name, more) in ((link, run) for link in _LINKS for run in _RUNS.items()):
            print(f"{name} over {link} …", flush=True)
            job = [sys.executable, str(ROOT / "tests/cluster/namespace_hosts.py"), *_LINKS[link]]
            job += ["env", "-u", "MPI4PY_RC_INITIALIZE", sys.executable, "-m", "benchmarks", name, "--out", folder]
            job += ["--quick"] if options.quick else more
            limit = {"MPIEXEC_TIMEOUT": f"{options.limit:.0f}"}
            if code := subprocess.run(job, env=os.environ | limit, check=False).returncode:
                return code
            values = json.loads(Path(folder, f"BENCH-{name}.json").read_text(encoding="utf-8"))
            results[f"{name} over {link}"] = values["results"]
            report["tables"] += [table | {"title": f"{table['title']}, over {link}"} for table in values["tables"]]
            peers = [of for of in values["targets"] if "tcp" in of["what"] or "torch DDP" in of["what"]]
            report["targets"] += [target | {"what": f"{target['what']}, over {link}"} for target in peers]
    write(values | report, results, options.out)
    return EXIT_DONE
