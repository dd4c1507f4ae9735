"""Test collection and outcomes under mpirun: the tests of each world size, and one outcome for all ranks.

A test marked `ranks(1, 2, 3)` runs at those world sizes only, on every rank at once. At its end the ranks agree on
the outcome, so a failure on one rank is a failure on all and nobody is left waiting. Unmarked tests run once, in one
process. Rank 0 writes the counts that tests/run.sh adds up.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import DEVICE, PATIENCE, RANK, ROOT, in_slice, shown_device

from mpitrain.early import without_collecting

if TYPE_CHECKING:
    import torch
    from warm import Warm

RANKS = int(os.environ.get("MPITRAIN_TEST_RANKS", "0"))  # 0: serial
LABEL = os.environ.get("MPITRAIN_TEST_LABEL", "")
FOLDER = Path(os.environ.get("MPITRAIN_TESTS", ".tests"))
OPERATION_TIMEOUT = 60.0 * PATIENCE  # seconds
_FAILURE = pytest.StashKey[str]()
ON_DEVICE = (2, 3)  # sizes at which tests on a device run, if they run at one of these


class PatientProcess(subprocess.Popen):
    """A process that is waited for longer on slow machines."""

    def communicate(self, input=None, timeout=None):
        return super().communicate(input, timeout and timeout * PATIENCE)

    def wait(self, timeout=None):
        return super().wait(timeout and timeout * PATIENCE)


subprocess.Popen = PatientProcess  # also for subprocess.run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="run the long tests (kills, clusters)")
    parser.addoption("--full", action="store_true", help="run the long tests at full length")
    parser.addoption("--slice", metavar="K/N", help="run the K-th of N parts of the tests marked full, K from 0")
    parser.addoption("--part", metavar="K/N", help="run only the K-th of N parts of the files, K from 0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip importing files of other parts, or without a test of this world size: with many ranks, imports take long."""
    if not collection_path.name.startswith("test_"):
        return None
    if not _is_in_part(config, collection_path):
        return True
    if not RANKS:
        return None
    marks = re.findall(r"\bmark\.ranks\(([^)]*)\)", collection_path.read_text(encoding="utf-8"))
    numbers = [[part.strip() for part in mark.split(",")] for mark in marks]
    is_numeric = all(part.isdigit() for parts in numbers for part in parts if part)
    return True if is_numeric and not any(str(RANKS) in parts for parts in numbers) else None


def _is_in_part(config: pytest.Config, path: Path) -> bool:
    part = config.getoption("--part")
    return not part or in_slice(str(path.relative_to(ROOT)), part)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without collecting garbage, which takes a third of that time, and none of it later."""
    with without_collecting():
        return (yield)


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") is not None:
        item.add_marker(pytest.mark.mpi)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--slice")
    full = config.getoption("--full") or part
    long = bool(full or config.getoption("--campaign"))
    selected, dropped = [], []
    elsewhere: set[int] = set()  # the sizes at which there are long tests of ranks
    for item in items:
        sizes = item.get_closest_marker("ranks")
        here = RANKS in sizes.args if sizes is not None else RANKS == 0
        if _is_on_device(item) and sizes is not None:
            here = here and (RANKS in ON_DEVICE or not set(sizes.args) & set(ON_DEVICE))
        only_full = item.get_closest_marker("full") is not None
        is_long = only_full or item.get_closest_marker("campaign") is not None
        requested = (only_full and in_slice(item.nodeid, part)) if part else is_long == long and (full or not only_full)
        requested = requested and _is_in_part(config, item.path)  # a file named on the command line is never ignored
        if requested and long and sizes is not None:
            elsewhere.update(sizes.args)
        if DEVICE != "pretend":  # only what has to do with devices, which the other tests do not expect
            here = here and (_is_on_device(item) or item.get_closest_marker(DEVICE) is not None)
            here = here and item.get_closest_marker("simulated") is None
        (selected if requested and here else dropped).append(item)
    if elsewhere and not RANKS and LABEL:
        (FOLDER / f"long-sizes-{LABEL}").write_text("".join(f"{size}\n" for size in sorted(elsewhere)))
    items[:] = selected
    for item in selected if PATIENCE > 1 else ():
        own = item.get_closest_marker("timeout")
        seconds = float(own.args[0] if own is not None else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the simulated accelerator, still hidden, before anything computes gradients: see `pretend.load`."""
    if DEVICE == "pretend" and any(map(_is_on_device, session.items)):
        import pretend

        with suppress(pretend.build.BuildError):  # which the fixture says
            pretend.load()


def _is_on_device(item: pytest.Item) -> bool:
    """Return whether a test uses an accelerator, as its device or to transport device memory."""
    called = getattr(item, "callspec", None)
    params = called.params if called is not None else {}
    return params.get("device") == "pretend" or params.get("way", "cpu") != "cpu"


@pytest.fixture(params=["cpu", "pretend"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Return the CPU and, in a second test, this rank's device of the simulated accelerator.

    Work on the accelerator runs only when something waits for it. For a test on the accelerator alone:

        @pytest.mark.parametrize("device", ["pretend"], indirect=True)

    A test that starts jobs passes the kind on: `support.job(…, device=device.type)`.
    """
    import torch

    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with shown_device() as shown:
        yield shown


@pytest.fixture(scope="session")
def world():
    """Return the communicator over all ranks, in debug mode: ranks that diverge get an error instead of hanging."""
    import mpitrain

    return mpitrain.init(timeout=OPERATION_TIMEOUT, debug=True)


@pytest.fixture
def folder(world, mpi_tmp_path) -> Path:
    """Return an empty folder, the same on all ranks."""
    return Path(world.broadcast_object(str(mpi_tmp_path)))


@pytest.fixture(scope="session")
def forked() -> Warm:
    """Return a runner of commands in forked processes, which need not import torch."""
    from warm import shared

    return shared()


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed and LABEL:
        _record_failure(report)
    if RANKS > 1:
        if report.failed:
            item.stash[_FAILURE] = str(report.longrepr)[-2000:]
        if report.when == "teardown":
            _agree(report, item.stash.get(_FAILURE, None))
    return report


def _record_failure(report: pytest.TestReport) -> None:
    """Write the end of a failure to a file at once: if other ranks hang, pytest never prints its summary."""
    with (FOLDER / f"{LABEL}-{RANKS}-rank-{RANK}.failed").open("a", encoding="utf-8") as file:
        file.write(f"-- {report.nodeid} ({report.when}) failed on rank {RANK} of {RANKS or 1}, {LABEL}:\n")
        file.write(f"{str(report.longrepr)[-3000:]}\n")


def _agree(report: pytest.TestReport, failure: str | None) -> None:
    """Fail a test on every rank if it failed on any.

    Args:
        report: Last report of a test.
        failure: End of the failure on this rank, in any phase.
    """
    import mpitrain
    from mpitrain.errors import CommunicationError

    world = mpitrain.init(timeout=OPERATION_TIMEOUT, debug=True)
    for _ in range(50):  # while another rank is still inside the test, its operations do not match ours
        try:
            failures = world.all_gather_object(failure)
            break
        except CommunicationError:
            continue
    else:
        pytest.exit("the ranks do not find together after a failed test", returncode=1)
    if failure is None and any(failures):
        rank, text = next((rank, text) for rank, text in enumerate(failures) if text)
        report.outcome = "failed"
        report.longrepr = f"failed on rank {rank}:\n{text}"


class _Counts:
    """Numbers of tests passed, failed and skipped."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0


_counts = _Counts()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _counts.passed += report.when == "call" and report.passed
    _counts.failed += report.failed
    _counts.skipped += report.skipped


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if RANK == 0 and LABEL:
        FOLDER.mkdir(exist_ok=True)
        broken = 1 if exitstatus not in (0, 1, 5) else 0  # such as collection errors
        text = f"{_counts.passed} {_counts.failed + broken} {_counts.skipped}\n"
        (FOLDER / f"{LABEL}-{RANKS}.counts").write_text(text)
    sys.stdout.flush()
