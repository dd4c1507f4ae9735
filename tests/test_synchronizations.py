"""Each wait of one stream, or of the host, for another is needed: without it some test fails.

The package is copied, one wait is taken away, and the tests that are to find it run on the copy at two ranks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, clean_environment, launcher, require_pretend

pytestmark = pytest.mark.campaign

ORDER = "tests/comm/test_device_order.py"
STAGED = "mpitrain/comm/collectives/transports/staged.py"
BACKEND = "tests/backend/test_backend_device.py"
STREAMS, WORK = "mpitrain/backend/streams.py", "mpitrain/backend/work.py"
# file, what is replaced, by what, the tests that find it
MUTATIONS = {
    "copies in wait for the caller's stream": (STAGED, "self._in.wait_event(asked)", "pass", ORDER),
    "a slot is filled when it is empty": (STAGED, "self._in.wait_event(emptied)", "pass", ORDER),
    "the host waits for what is copied in": (STAGED, "ready.event.synchronize()", "pass", ORDER),
    "the caller's stream waits for what is copied out": (STAGED, "caller.wait_event(emptied)", "pass", ORDER),
    "a tensor that cannot be cut is copied before it is read": (
        STAGED,
        "recorded(device).synchronize()",
        "pass",
        "tests/comm/test_operations.py::test_uneven_blocks",
    ),
    "MPI is called when the device is through": (
        "mpitrain/comm/collectives/transports/direct.py",
        "recorded(first.device).synchronize()",
        "pass",
        ORDER,
    ),
    "ranks meet when their devices are through": (
        "mpitrain/comm/collectives/binding.py",
        "return [partial(synchronize, arena.tensor.device)]",
        "return []",
        ORDER,
    ),
    "the room for what is in no arena is filled when it is empty": (
        "mpitrain/comm/collectives/transports/peer.py",
        "current_stream(own[0].device).wait_event(self._emptied)",
        "pass",
        "tests/comm/test_operations.py",
    ),
    "the background waits for the caller's stream": (
        "mpitrain/comm/runtime/on_device.py",
        "self._stream.wait_event(event)",
        "pass",
        ORDER,
    ),
    "whoever waits has its stream wait": (
        "mpitrain/comm/runtime/on_device.py",
        "                stream.wait_event(self._end)",
        "                pass",
        ORDER,
    ),
    "memory in use is not given out": (
        "mpitrain/comm/runtime/on_device.py",
        "tensor.record_stream(self._stream)",
        "pass",
        ORDER,
    ),
    "a message is sent when it is there": (
        "mpitrain/comm/point_to_point.py",
        "recorded(device).synchronize()",
        "pass",
        ORDER,
    ),
    "a message lands when what was there has been read": (
        "mpitrain/comm/point_to_point.py",
        "asked.synchronize()",
        "pass",
        ORDER,
    ),
    "the backend's side stream waits for the caller": (
        STREAMS,
        "self._streams[device].wait_event(event)",
        "pass",
        BACKEND,
    ),
    "whoever waits for the backend has its stream wait": (
        STREAMS,
        "current_stream(device).wait_event(event)",
        "pass",
        BACKEND,
    ),
    "the backend carries out on its side stream": (
        STREAMS,
        "stack.enter_context(on_stream(self._streams[device]))",
        "pass",
        BACKEND,
    ),
    "memory that the backend uses is not given out": (
        STREAMS,
        "tensor.record_stream(self._streams[tensor.device])",
        "pass",
        BACKEND,
    ),
    "the backend's futures stand for its side stream": (
        WORK,
        "with self._order.beside() if self._order is not None else nullcontext():",
        "with nullcontext():",
        BACKEND,
    ),
    "the backend's futures know the devices": (WORK, "[*devices_of(outputs)]", "[]", BACKEND),
    "whoever waits for the backend's message has its stream wait": (
        WORK,
        "current_stream(device).wait_event(event)",
        "pass",
        BACKEND,
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_pretend()
    import pretend

    folder = tmp_path_factory.mktemp("mutated")
    ignored = shutil.ignore_patterns("__pycache__")
    pretend.build.library()
    for name in ("mpitrain", "tests", pretend.build.CACHE.name):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(PYTHONDONTWRITEBYTECODE="1") | {"MPITRAIN_TEST_RANKS": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--only-mpi", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        [*launcher(2), *command],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        errors="replace",
    )


def test_with_all_of_them_the_tests_pass(copy):
    tests = sorted({tests for *_, tests in MUTATIONS.values()})
    ended = run(copy, *tests)
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_synchronization_too_few_is_found(copy, mutation):
    file, old, new, tests = MUTATIONS[mutation]
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    (copy / file).write_text(text.replace(old, new))
    try:
        ended = run(copy, *tests.split())
    finally:
        (copy / file).write_text(text)
    assert ended.returncode != 0 and "failed" in ended.stdout, f"without it, {tests} passed"
