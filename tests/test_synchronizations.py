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
OPERATIONS = "tests/comm/test_operations.py"
BACKEND = "tests/backend/test_backend_device.py"
TRAINING = "tests/train/test_device.py"
CHECKPOINTS = "tests/checkpoint/test_store.py tests/checkpoint/test_background_saves.py"
STATES = f"{CHECKPOINTS} tests/shard/test_stages_checkpoints.py"
ON_THE_HOST, LOADER = "tests/shard/test_host_update.py", "tests/data/test_data_loader.py"
SERIAL = (ON_THE_HOST, LOADER)

STAGED = "mpitrain/comm/collectives/transports/staged.py"
DIRECT = "mpitrain/comm/collectives/transports/direct.py"
PEER = "mpitrain/comm/collectives/transports/peer.py"
BINDING = "mpitrain/comm/collectives/binding.py"
BESIDE = "mpitrain/comm/runtime/on_device.py"
MESSAGES = "mpitrain/comm/point_to_point.py"
STREAMS, WORK = "mpitrain/backend/streams.py", "mpitrain/backend/work.py"
HOST_UPDATE = "mpitrain/shard/host_update.py"
STATE, SNAPSHOT = "mpitrain/checkpoint/device_memory.py", "mpitrain/checkpoint/snapshot.py"
BATCHES, PLACED = "mpitrain/data/on_device.py", "mpitrain/trainer/device.py"
DEVICE = "mpitrain/comm/memory/device.py"
_BESIDE_OR_NOT = "with self._order.beside() if self._order is not None else nullcontext():"

# what waits: file, what is replaced, by what, the tests that find it
MUTATIONS = {
    "copies in, for the caller's stream": (STAGED, "self._in.wait_event(asked)", "pass", ORDER),
    "who fills a slot, until it is empty": (STAGED, "self._in.wait_event(emptied)", "pass", ORDER),
    "the host, for what is copied in": (STAGED, "ready.event.synchronize()", "pass", ORDER),
    "the caller's stream, for what is copied out": (STAGED, "caller.wait_event(emptied)", "pass", ORDER),
    "the host, for a tensor that is not cut": (STAGED, "recorded(device).synchronize()", "pass", OPERATIONS),
    "MPI, for the device": (DIRECT, "recorded(first.device).synchronize()", "pass", ORDER),
    "ranks that meet, for their devices": (
        BINDING,
        "return [partial(synchronize, arena.tensor.device)]",
        "return []",
        ORDER,
    ),
    "who fills the room, until it is empty": (
        PEER,
        "current_stream(own[0].device).wait_event(self._emptied)",
        "pass",
        OPERATIONS,
    ),
    "the background, for the caller's stream": (BESIDE, "self._stream.wait_event(event)", "pass", ORDER),
    "whoever waits, for the background": (
        BESIDE,
        "                stream.wait_event(self._end)",
        "                pass",
        ORDER,
    ),
    "memory, for the background": (BESIDE, "tensor.record_stream(self._stream)", "pass", ORDER),
    "a message, for what it is of": (MESSAGES, "recorded(device).synchronize()", "pass", ORDER),
    "a message to the device, for its readers": (MESSAGES, "asked.synchronize()", "pass", ORDER),
    "a message by the host, for its readers": (MESSAGES, "current_stream(device).wait_event(asked)", "pass", ORDER),
    "the backend, for the caller": (STREAMS, "self._streams[device].wait_event(event)", "pass", BACKEND),
    "whoever waits, for the backend": (STREAMS, "current_stream(device).wait_event(event)", "pass", BACKEND),
    "the backend, on its side stream": (
        STREAMS,
        "stack.enter_context(on_stream(self._streams[device]))",
        "pass",
        BACKEND,
    ),
    "memory, for the backend": (STREAMS, "tensor.record_stream(self._streams[tensor.device])", "pass", BACKEND),
    "futures, for the backend's side stream": (WORK, _BESIDE_OR_NOT, "with nullcontext():", BACKEND),
    "futures, for devices": (WORK, "[*devices_of(outputs)]", "[]", BACKEND),
    "whoever waits, for a message": (WORK, "current_stream(device).wait_event(event)", "pass", BACKEND),
    "gradients that leave, for backward": (
        HOST_UPDATE,
        "self._leaving.wait_event(devices.recorded(self._device))",
        "pass",
        ON_THE_HOST,
    ),
    "the host, for gradients": (HOST_UPDATE, "arrived.synchronize()", "pass", ON_THE_HOST),
    "the update, for values that leave": (HOST_UPDATE, "self._returned.synchronize()", "pass", ON_THE_HOST),
    "values that return, for their readers": (
        HOST_UPDATE,
        "self._returning.wait_event(devices.recorded(self._device))",
        "pass",
        ON_THE_HOST,
    ),
    "the device, for values that return": (
        HOST_UPDATE,
        "devices.current_stream(self._device).wait_event(self._returned)",
        "pass",
        ON_THE_HOST,
    ),
    "a save, for the device": (STATE, "    stream.wait_event(devices.recorded(device))", "    pass", CHECKPOINTS),
    "the file, for what is copied": (STATE, "copied.synchronize()", "pass", CHECKPOINTS),
    "a load, for the device": (STATE, "self.stream.wait_event(devices.recorded(device))", "pass", CHECKPOINTS),
    "whoever loads, for the last copy": (STATE, "self.stream.synchronize()", "pass", STATES),
    "who reads a file, until the buffer is free": (STATE, "left.synchronize()", "pass", STATES),
    "the background save, for its copy": (SNAPSHOT, "recorded(away[0].device).synchronize()", "pass", CHECKPOINTS),
    "the model, for its batch": (BATCHES, "device.current_stream(to).wait_event(copied)", "pass", LOADER),
    "who gives a batch, until it is copied": (PLACED, "copied.synchronize()", "pass", TRAINING),
    "the log, for what it tells": (DEVICE, "        copied.synchronize()", "        pass", TRAINING),
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
    """The tests, at two ranks unless they are serial ones."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = clean_environment(PYTHONDONTWRITEBYTECODE="1")
    if not set(tests) & set(SERIAL):
        command, environment["MPITRAIN_TEST_RANKS"] = [*launcher(2), *command, "--only-mpi"], "2"
    return subprocess.run(
        command,
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        errors="replace",
    )


def test_with_all_of_them_the_tests_pass(copy):
    every = {name for *_, tests in MUTATIONS.values() for name in tests.split()}
    for tests in (every - set(SERIAL), set(SERIAL)):
        ended = run(copy, *sorted(tests))
        assert ended.returncode == 0, ended.stdout[-3000:]


def is_first_of_its_tests(mutation: str) -> bool:
    return next(name for name, (*_, tests) in MUTATIONS.items() if tests == MUTATIONS[mutation][-1]) == mutation


@pytest.mark.parametrize(
    "mutation",
    [name if is_first_of_its_tests(name) else pytest.param(name, marks=pytest.mark.full) for name in MUTATIONS],
)
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
