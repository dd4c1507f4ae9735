"""PyTorch's own tests of torch.distributed, as they ship in its wheel, over this backend.

    python tests/backend/torch_suite.py [--sizes 2 3 4] [--as mpitrain gloo mpi peer] [--only WORD]

`--as mpitrain` registers the backend with the tests as one that can do what gloo can. `--as gloo` and `--as mpi` run
the tests written for those backends alone, while every group is ours, as under `python -m mpitrain.backend`.
`--as peer` is gloo itself, for comparison. The ranks of one mpirun run all tests in turn and agree on each outcome.
When a rank is left alone in a test, the job ends, and a new job goes on with the next test. Prints how many tests
ran, passed, failed and were skipped, and the reasons for skipping.

Needs `expecttest` and `torch` with its tests, nothing else.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]

LIMIT = 25.0  # seconds for one operation of a test
PATIENCE = 8.0  # seconds that a rank waits for the others after a test
AGAIN = re.compile("gloo|mpi|MPI|get_future")  # reasons to skip that another name may remove
NOT_OURS = {  # tests that cannot apply, each with its reason
    "test_get_backend": "get_backend() says mpitrain, whatever name the script gave",
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test. kind: passed, failed or skipped; reason: why, for failed and skipped tests."""

    name: str
    kind: str
    reason: str
    seconds: float


PEER = "peer"  # gloo itself


def suite(ranks: int, name: str, only: str = "", without: Sequence[str] = (), limit: float = 300) -> list[Outcome]:
    """Run the tests on `ranks` ranks, with the backend under the name `name`. without: tests to leave out."""
    from support import clean_environment, launcher

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "results"
        ended = time.monotonic() + limit
        while time.monotonic() < ended:
            report.write_text("")
            command = [*launcher(ranks), sys.executable, str(HERE), "--rank", name, folder, only]
            finished = [*without, *(outcome.name for outcome in outcomes)]
            (Path(folder) / "done").write_text("\n".join(finished))
            environment = clean_environment(
                BACKEND="gloo" if name == PEER else name,
                WORLD_SIZE=str(ranks),
                TEMP_DIR=folder,
                INIT_METHOD=f"file://{folder}/init",
            )
            process = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=limit
            )
            lines = [json.loads(line) for line in report.read_text().splitlines()]
            outcomes += [Outcome(*line[1:]) for line in lines if line[0] == "ended"]
            if process.returncode == 0:
                return outcomes
            if not lines:
                raise SystemExit(f"the suite does not start:\n{process.stderr[-3000:]}")
            if lines[-1][0] == "begun":
                text = "\n".join(line for line in process.stderr.splitlines() if "Warning" not in line)
                outcomes.append(Outcome(lines[-1][1], "failed", f"job ended: {text[:1500]}", 0.0))
    return outcomes


def table(ranks: int, name: str, outcomes: Sequence[Outcome]) -> str:
    kinds = Counter(outcome.kind for outcome in outcomes)
    ran = kinds["passed"] + kinds["failed"]
    lines = [
        f"{ranks} ranks as {name}: {ran} run, {kinds['passed']} passed, {kinds['failed']} failed, "
        f"{kinds['skipped']} skipped, {sum(outcome.seconds for outcome in outcomes):.0f} s"
    ]
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.kind == "skipped")
    lines += [f"  {count:4} skipped: {reason}" for reason, count in reasons.most_common()]
    lines += [f"  failed: {o.name}\n    {o.reason[-1200:]}" for o in outcomes if o.kind == "failed"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--as", dest="names", nargs="+", default=["mpitrain", "gloo", "mpi"])
    parser.add_argument("--only", default="", help="a regular expression of test names")
    chosen = parser.parse_args()
    failed = 0
    for ranks in chosen.sizes:
        for name in chosen.names:
            outcomes = suite(ranks, name, chosen.only)
            print(table(ranks, name, outcomes), flush=True)
            failed += sum(outcome.kind == "failed" for outcome in outcomes)
    return 1 if failed else 0


# -- one rank ------------------------------------------------------------------------------------------------


def one_rank(name: str, folder: str, only: str) -> None:
    import warnings

    warnings.simplefilter("ignore")
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    import mpitrain
    import mpitrain.backend
    from mpitrain.backend.process_group import Barriers, get_registry
    from mpitrain.backend.registration import NAME, use_for_all_groups
    from mpitrain.errors import CommunicationError

    world = mpitrain.init(timeout=LIMIT, abort_on_error=False)
    os.environ["MASTER_ADDR"] = "localhost"
    common_distributed.skip_if_small_worldsize = _skip_below_three_ranks  # it asks for 8 ranks; what it guards needs 3
    for names in common_distributed.DistTestCases.backend_feature.values():
        names.add(os.environ["BACKEND"])
    if name not in (NAME, PEER):
        use_for_all_groups()
    if name == NAME:
        with mock.patch.object(os, "environ", {**os.environ, "BACKEND": _LikeGloo(NAME)}):
            from torch.testing._internal.distributed import distributed_test as tests
    else:
        from torch.testing._internal.distributed import distributed_test as tests

    class Suite(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        """The tests, run in this process as one rank."""

    shared = Path(folder)
    for sub in ("barrier", "test_dir", "init_dir"):
        (shared / sub).mkdir(exist_ok=True)
    report = (shared / "results").open("a") if world.rank == 0 else None
    finished = set((shared / "done").read_text().split())
    chosen = [test for test in sorted(dir(Suite)) if test.startswith("test_") and re.search(only, test)]
    barriers = Barriers(get_registry().control)

    def write_event(*event: Any) -> None:
        if report is not None:
            report.write(json.dumps(event) + "\n")
            report.flush()

    for test in chosen:
        if test in finished:
            continue
        write_event("begun", test)
        begun = time.monotonic()
        if test in NOT_OURS and name not in (NAME, PEER):
            kind, reason = "skipped", NOT_OURS[test]
        else:
            address = {"init_method": f"file://{shared}/init-{test}", "rank": world.rank, "world_size": world.size}
            begin = functools.partial(
                dist.init_process_group,
                os.environ["BACKEND"],
                timeout=timedelta(seconds=LIMIT),
                **(address if name == PEER else {}),
            )
            file = str(shared / f"file-{test}")
            kind, reason = _run(begin, Suite, test, world.rank, file, dist, tests, common_distributed)
        try:
            barriers.wait(PATIENCE)
        except CommunicationError:
            write_event("ended", test, "failed", f"rank {world.rank} is out alone: {kind} {reason}", 0.0)
            world.process.faults.end_job(f"rank {world.rank} is out of {test} alone: {kind} {reason}")
        everyone = world.all_gather_object([kind, reason])
        failures = [f"rank {rank}: {text}" for rank, (how, text) in enumerate(everyone) if how == "failed"]
        if failures:
            kind, reason = "failed", failures[0]
        if dist.is_initialized():
            dist.destroy_process_group()
        write_event("ended", test, kind, reason, time.monotonic() - begun)


class _LikeGloo(str):
    """A backend name that compares equal to "gloo" where the tests check for it."""

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def _skip_below_three_ranks(function: Any) -> Any:
    import unittest

    return unittest.skipIf(int(os.environ["WORLD_SIZE"]) < 3, "Needs 3 ranks")(function)


def _run(
    begin: Callable[[], None], suite: Any, test: str, rank: int, file: str, dist: Any, tests: Any, common: Any
) -> tuple[str, str]:
    """Run one test on this rank; return passed, skipped or failed, and why. begin: creates the default group."""
    import traceback
    import unittest

    from torch.testing._internal.common_utils import set_rng_seed

    method = getattr(suite, test)
    if getattr(method, "__unittest_skip__", False):
        return "skipped", method.__unittest_skip_why__
    try:
        begin()
        case = suite(test)
        case.rank, case.file_name = rank, file
        tests.Barrier.barrier_id = 0
        set_rng_seed(1)
        if rank == 0:
            for left in (*Path(os.environ["TEMP_DIR"], "barrier").iterdir(),):
                left.unlink()
            for left in (*Path(os.environ["TEMP_DIR"], "test_dir").iterdir(),):
                left.unlink()
        dist.barrier()
        getattr(case, test)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as leaving:
        for skip in common.TEST_SKIPS.values():
            if leaving.code == skip.exit_code:
                return "skipped", skip.message
        return ("passed", "") if not leaving.code else ("failed", f"exit code {leaving.code}")
    except ValueError as error:
        if "Rank 2 is out of range" in str(error):  # some tests check the size only when the name is not "mpi"
            return "skipped", "Needs 3 ranks"
        return "failed", traceback.format_exc()[-1500:]
    except BaseException:
        return "failed", traceback.format_exc()[-1500:]
    return "passed", ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(*sys.argv[2:5])
    else:
        sys.exit(main())
