"""Collectives and training steps between hosts, beside plain TCP sockets and gloo.

The benchmarks `collectives` and `step` run on three network namespaces of this machine with two ranks each
(tests/cluster/namespace_hosts.py), joined by a bridge, and then by links of 10 Gbit/s and 0.1 ms. All hosts share the
cores of this machine, so that everything a rank does takes time from the network, too. Namespaces need root.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.runner.jobs import BenchmarkParser, run_on_hosts
from benchmarks.runner.peers import OUR_DDP
from benchmarks.runner.report import Values, write
from mpitrain.errors import EXIT_DONE

_LINKS = {"a bridge": (), "10 Gbit/s and 0.1 ms": ("--link", "1e10,1e-4")}
_RUNS = {
    "collectives": ("--sizes", "1Mi,16Mi", "--seconds", "3"),
    "step": ("--only", f"ZeRO-0,ZeRO-1,{OUR_DDP},torch DDP", "--width", "256", "--seconds", "15"),
}


def main(arguments: Sequence[str]) -> int:
    """Run both benchmarks over each link, and return the exit code; the report has the tables and targets of all."""
    options = BenchmarkParser("hosts", "Compare collectives and steps between hosts.", "6").parse(arguments)
    values, results = Values(), dict[str, Any]()
    report: Values = {"name": "hosts", "title": "Between hosts", "tables": [], "targets": [], "panels": []}
    for link, (name, more) in product(_LINKS, _RUNS.items()):
        print(f"{name} over {link} …", flush=True)
        code, values = run_on_hosts(name, ["--quick"] if options.quick else more, options.limit, *_LINKS[link])
        if code:
            return code
        results[f"{name} over {link}"] = values["results"]
        report["tables"] += [table | {"title": f"{table['title']}, over {link}"} for table in values["tables"]]
        peers = [of for of in values["targets"] if "tcp" in of["what"] or "torch DDP" in of["what"]]
        report["targets"] += [target | {"what": f"{target['what']}, over {link}"} for target in peers]
    write(values | report, results, options.out)
    return EXIT_DONE
