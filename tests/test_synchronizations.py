"""Synchronizations between streams and the host: each is needed, since without it some test fails.

The test copies the package, removes one wait, and runs the tests that must notice it on the copy at two ranks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from support import ROOT, require_pretend

pytestmark = pytest.mark.campaign

IN_ORDER, OPERATION = "tests/comm/test_device_order.py", "tests/comm/test_operations.py"
ORDER = f"{IN_ORDER}::test_an_operation_keeps_its_place_in_stream_order"
REPLACED = f"{IN_ORDER}::test_results_overwrite_memory_only_after_earlier_reads"
BACKGROUND = f"{IN_ORDER}::test_a_background_operation_keeps_its_place_in_stream_order"
MEMORY = f"{IN_ORDER}::test_memory_is_not_reused_while_an_operation_may_access_it"
MESSAGE = f"{IN_ORDER}::test_messages_keep_their_place_in_stream_order"
BLOCKS = f"{OPERATION}::test_uneven_blocks"
SUBMITTED = f"{OPERATION}::test_asynchronous_operations_complete_in_the_order_of_submission"
BACKEND = "tests/backend/test_backend_device.py::test_operations_keep_their_order_on_the_stream"
BACKEND_MESSAGE = "tests/backend/test_backend_device.py::test_messages_keep_their_order_on_the_stream"
BACKEND_MEMORY = "tests/backend/test_backend_device.py::test_memory_is_not_reused_during_an_operation"
LOSSES = "tests/train/test_device.py::test_device_has_the_losses_of_the_cpu[ddp-pretend]"
BATCH = "tests/train/test_device.py::test_batch_may_be_changed_right_after_to_device"
SAVED = "tests/checkpoint/test_store.py::test_saved_tensors_are_loaded_whole_and_in_columns"
SAVED_BESIDE = "tests/checkpoint/test_background_saves.py::test_a_background_save_stores_the_state_at_its_call"
RESUMED = "tests/shard/test_stages_checkpoints.py::test_training_on_a_device_resumes_bitwise_and_on_the_cpu[pretend]"
ON_THE_HOST = "tests/shard/test_host_update.py"
LOADER = "tests/data/test_data_loader.py::test_a_device_gets_the_samples_that_the_host_reads"
SERIAL = (ON_THE_HOST, LOADER)

STAGED = "mpitrain/comm/collectives/transports/by_programs.py"
DIRECT = "mpitrain/comm/collectives/transports/choice.py"
PEER = "mpitrain/comm/collectives/transports/by_programs.py"
BINDING = "mpitrain/comm/collectives/binding.py"
BESIDE = "mpitrain/comm/runtime/work.py"
MESSAGES = "mpitrain/comm/point_to_point.py"
WORK = "mpitrain/backend/work.py"
HOST_UPDATE = "mpitrain/shard/offload.py"
STATE, SNAPSHOT = "mpitrain/checkpoint/device_memory.py", "mpitrain/checkpoint/store.py"
READING = "mpitrain/checkpoint/reading.py"
BATCHES, PLACED = "mpitrain/data/on_device.py", "mpitrain/trainer/device.py"
DEVICE = "mpitrain/comm/memory/device.py"
_BESIDE_OR_NOT = "with self._order.side_streams() if self._order is not None else nullcontext():"

# what waits: file, what is replaced, by what, the tests that find it
MUTATIONS = {
    "copies in, for the caller's stream": (STAGED, "self._in.wait_event(submission)", "pass", ORDER),
    "who fills a slot, until it is empty": (STAGED, "self._in.wait_event(emptied)", "pass", REPLACED),
    "the host, for what is copied in": (STAGED, "ready.event.synchronize()", "pass", ORDER),
    "the caller's stream, for what is copied out": (STAGED, "caller.wait_event(emptied)", "pass", ORDER),
    "the host, for a tensor that is not cut": (STAGED, "record_event(device).synchronize()", "pass", BLOCKS),
    "MPI, for the device": (DIRECT, "record_event(first.device).synchronize()", "pass", ORDER),
    "ranks that meet, for their devices": (
        BINDING,
        "return [partial(synchronize, arena.tensor.device)]",
        "return []",
        ORDER,
    ),
    "who fills the room, until it is empty": (
        PEER,
        "current_stream(vectors[0].device).wait_event(self._emptied)",
        "pass",
        SUBMITTED,
    ),
    "the background, for the caller's stream": (BESIDE, "self._streams[device].wait_event(event)", "pass", BACKGROUND),
    "whoever waits, for the background": (
        BESIDE,
        "                stream.wait_event(event)",
        "                pass",
        BACKGROUND,
    ),
    "memory, for the background": (BESIDE, "tensor.record_stream(self._streams[tensor.device])", "pass", MEMORY),
    "a message, for what it is of": (MESSAGES, "record_event(device).synchronize()", "pass", MESSAGE),
    "a message to the device, for its readers": (MESSAGES, "ready.synchronize()", "pass", MESSAGE),
    "a message by the host, for its readers": (
        MESSAGES,
        "current_stream(self.tensor.device).wait_event(self.ready)",
        "pass",
        MESSAGE,
    ),
    "the backend, for the caller": (BESIDE, "self._streams[device].wait_event(event)", "pass", BACKEND),
    "whoever waits, for the backend": (
        BESIDE,
        "                stream.wait_event(event)",
        "                pass",
        BACKEND,
    ),
    "the backend, on its side stream": (
        BESIDE,
        "stack.enter_context(on_stream(self._streams[device]))",
        "pass",
        BACKEND,
    ),
    "memory, for the backend": (BESIDE, "tensor.record_stream(self._streams[tensor.device])", "pass", BACKEND_MEMORY),
    "futures, for the backend's side stream": (WORK, _BESIDE_OR_NOT, "with nullcontext():", BACKEND),
    "futures, for devices": (WORK, "[*devices_of(outputs)]", "[]", BACKEND),
    "whoever waits, for a message": (WORK, "current_stream(device).wait_event(event)", "pass", BACKEND_MESSAGE),
    "gradients that leave, for backward": (
        HOST_UPDATE,
        "self._to_host.wait_event(devices.record_event(self._device))",
        "pass",
        ON_THE_HOST,
    ),
    "the host, for gradients": (HOST_UPDATE, "arrived.synchronize()", "pass", ON_THE_HOST),
    "the update, for values that leave": (HOST_UPDATE, "self._device_copied.synchronize()", "pass", ON_THE_HOST),
    "values that return, for their readers": (
        HOST_UPDATE,
        "self._to_device.wait_event(devices.record_event(self._device))",
        "pass",
        ON_THE_HOST,
    ),
    "the device, for values that return": (
        HOST_UPDATE,
        "devices.current_stream(self._device).wait_event(self._device_copied)",
        "pass",
        ON_THE_HOST,
    ),
    "a save, for the device": (STATE, "    stream.wait_event(devices.record_event(device))", "    pass", SAVED),
    "the file, for what is copied": (STATE, "copied.synchronize()", "pass", SAVED),
    "a load, for the device": (STATE, "self.stream.wait_event(devices.record_event(device))", "pass", SAVED),
    "whoever loads, for the last copy": (READING, "copy_stream.stream.synchronize()", "pass", SAVED),
    "who reads a file, until the buffer is free": (STATE, "left.popleft().synchronize()", "pass", RESUMED),
    "the background save, for its copy": (
        SNAPSHOT,
        "record_event(device_tensors[0].device).synchronize()",
        "pass",
        SAVED_BESIDE,
    ),
    "the model, for its batch": (BATCHES, "device.current_stream(to).wait_event(copied)", "pass", LOADER),
    "who gives a batch, until it is copied": (
        PLACED,
        "device.record_event(to, copy_stream).synchronize()",
        "pass",
        BATCH,
    ),
    "the log, for what it tells": (DEVICE, "        copied.synchronize()", "        pass", LOSSES),
}


# A forked process has torch, but must import the package and the tests from the copy.
ON_THE_COPY = """
import sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("mpitrain", "support"):
        del sys.modules[name]
sys.dont_write_bytecode = True
import pytest
without = [word for name in ("cacheprovider", "hypothesispytest", "anyio") for word in ("-p", f"no:{name}")]
sys.exit(pytest.main(["-q", "-x", "--color=no", *without, *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_pretend()
    import pretend

    folder = tmp_path_factory.mktemp("mutated")
    pretend.build.library()
    for name in ("mpitrain", "tests", pretend.build.CACHE.name):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run the tests, at two ranks unless they are serial."""
    command = [sys.executable, "-c", ON_THE_COPY, *tests]
    environment = {"PYTHONPATH": str(copy)}
    ranks = 1
    if not set(tests) & set(SERIAL):
        ranks = 2
        command.append("--only-mpi")
        environment["MPITRAIN_TEST_RANKS"] = "2"
    return warm.job(ranks, command, timeout=170, cwd=copy, **environment)


def test_the_tests_pass_with_all_synchronizations(copy):
    every = {name for *_, tests in MUTATIONS.values() for name in tests.split()}
    for tests in (every - set(SERIAL), set(SERIAL)):
        ended = run(copy, *sorted(tests))
        assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_synchronization_is_detected(copy, mutation):
    file, old, new, tests = MUTATIONS[mutation]
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    (copy / file).write_text(text.replace(old, new))
    try:
        ended = run(copy, *tests.split())
    finally:
        (copy / file).write_text(text)
    print(ended.stdout[-1500:])
    assert ended.returncode != 0 and re.search(r"\b[1-9]\d* failed", ended.stdout), f"without it, {tests} passed"
