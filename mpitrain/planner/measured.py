"""Seconds of every block, measured as in training: all cores of the node compute at the same time.

`Workers` are processes without MPI, as many as there are ranks that compute side by side. Each process runs the whole
model forward and then backward, so that a block's weights and activations are as cold in the caches as in a real step.
It answers with medians over several rounds. Questions and answers are lines of JSON.

A rank of one thread is timed by its processor time, so that other processes on the machine do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from mpitrain.comm.memory import device as devices
from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import MpitrainError
from mpitrain.parallel.costs import Divided
from mpitrain.pipe.wire import as_tuple
from mpitrain.planner.subject import Cut, Subject, signature
from mpitrain.shard.in_place import InPlace

if TYPE_CHECKING:
    from mpitrain.shard.gradients import Gradients

_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
_SECONDS = 0.8  # time for the rounds of one number of samples
_LEAST, _MOST = 3, 9  # number of rounds


class BlockSeconds(NamedTuple):
    """Seconds of one block.

    Attributes:
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        later: Further seconds of a backward pass that adds to existing gradients.
    """

    forward: float
    backward: float
    later: float = 0.0


class MeasurementError(MpitrainError):
    """Error of a measuring process that ended, or that could not measure a block."""


class Workers:
    """Processes that measure blocks side by side.

    Args:
        config: Configuration of the job.
        description: Description of the job's data.
        count: Number of processes.
        threads: Threads of each process.

    Attributes:
        close: Function that ends the processes.
    """

    def __init__(self, config: Config, description: Description, count: int, threads: int) -> None:
        serializable = asdict(replace(description, columns=None))  # columns make no difference to a block
        serializable |= {key: serializable[key].str for key in ("x_dtype", "y_dtype")}
        subject = {"config": config.to_dict(), "description": serializable, "threads": threads}
        environment = unlaunched_environment() | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "mpitrain.planner.measured"]
        # their stderr, whose last line is in the error message if one of them fails
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 open as long as they run
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=environment
            )
            for _ in range(count)
        ]
        self.close = weakref.finalize(self, _kill, self._processes)
        self._send(subject)

    def measure(self, samples: int, divided: Divided) -> list[BlockSeconds]:
        """Return the seconds of each block, as the median over the processes.

        Args:
            samples: Samples of the microbatch.
            divided: Division of the model.

        Raises:
            MeasurementError: The blocks cannot be measured, for example because memory runs out.
        """
        self._send({"samples": samples, **asdict(divided)})
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise self._failure(process)
            answers.append(json.loads(line))
        for answer in answers:  # all of them have been read
            if "error" in answer:
                raise MeasurementError(f"blocks cannot be measured: {answer['error']}")
        each = np.median(np.array([answer["seconds"] for answer in answers]), axis=0)  # [blocks, 3]
        return [BlockSeconds(*map(float, seconds)) for seconds in each]

    def _send(self, what: Mapping[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(what).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(process) from None

    def _failure(self, process: subprocess.Popen[bytes]) -> MeasurementError:
        self.close()
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()
        return MeasurementError(f"a process that measures blocks ended: {last[-1] if last else process.returncode}")


def unlaunched_environment() -> dict[str, str]:
    """Return the environment for a child process that is not a rank, without the launcher's variables.

    With these variables, an MPI library loaded in the child would look for the job.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}


def time_blocks(cut: Cut, samples: int, device: torch.device) -> list[BlockSeconds]:
    """Return the seconds of each block in this process, as medians over rounds; equal blocks get their mean.

    Args:
        cut: Model with values, as one rank has it.
        samples: Samples of the microbatch.
        device: Device that the model is on.
    """
    places, on_device = _GradientMemory(cut.module), devices.is_accelerator(device)
    now = time.thread_time if not on_device and torch.get_num_threads() == 1 else time.perf_counter
    wait = partial(devices.synchronize, device) if on_device else lambda: None
    x, y = cut.samples(samples)
    rounds: list[list[tuple[float, float]]] = []
    again: list[list[tuple[float, float]]] = []  # rounds that add to existing gradients
    try:
        _round(cut, x, y, wait, now)
        end = time.perf_counter() + _SECONDS
        while len(rounds) < _LEAST or (len(rounds) < _MOST and time.perf_counter() < end):
            places.zero()
            rounds.append(_round(cut, x, y, wait, now))
            again.append(_round(cut, x, y, wait, now))
    finally:
        places.remove()
    first, second = np.array(rounds), np.array(again)  # [rounds, blocks, 2]
    later = np.median(second[..., 1] - first[..., 1], axis=0)  # by pairs: the load of the machine varies
    seconds = np.column_stack([np.median(first, axis=0), later])
    equal_blocks: dict[Any, list[int]] = {}
    for number, (_, block) in enumerate(cut.blocks):
        equal_blocks.setdefault((signature(block), number in (0, len(cut.blocks) - 1)), []).append(number)
    for numbers in equal_blocks.values():
        seconds[numbers] = seconds[numbers].mean(0)
    seconds[:, 2] = np.maximum(seconds[:, 2], 0.0)
    seconds[[not any(p.requires_grad for p in block.parameters()) for _, block in cut.blocks], 2] = 0.0
    return [BlockSeconds(*map(float, each)) for each in seconds]


def _round(cut: Cut, x: Any, y: Any, wait: Callable[[], object], now: Callable[[], float]) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds of each block, from one pass of a microbatch through all blocks."""
    count = len(cut.blocks)
    begins, ends = [0.0] * count, [0.0] * count  # of the forward passes
    reached: list[float | None] = [None] * count  # when the gradient of a block's output was there

    def stamp(number: int, gradient: torch.Tensor) -> None:
        wait()
        reached[number] = now()

    wait()
    with cut.autocast(x.device.type):
        for number in range(count):
            past = cut.past(number, x)
            begins[number] = now()
            x = cut.call(number, x, past)
            following = next((t for t in as_tuple(x) if t.requires_grad), None)
            if following is not None and number < count - 1:
                following.register_hook(partial(stamp, number))
            if number == count - 1:
                x = cut.loss(x, y)
            wait()
            ends[number] = now()
    back = now()
    x.backward()
    wait()
    over = now()
    forward = [end - begin for begin, end in zip(begins, ends, strict=True)]
    backward = [0.0] * count
    for number in reversed(range(count)):
        arrived = reached[number - 1] if number else None
        until = over if arrived is None else max(arrived, back)  # gradients of a shared tensor come in any order
        backward[number], back = until - back, until
    return list(zip(forward, backward, strict=True))


class _GradientMemory:
    """Memory for gradients that is allocated once, as in the engine.

    Gradients of large linear layers are computed directly in this memory; other gradients are copied into it as soon as
    they are complete (see `shard.in_place` and `shard.gradients`).
    """

    def __init__(self, module: nn.Module) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        self._places = {p: torch.zeros_like(p) for p in trained}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for p in trained
        ]
        self._in_place = InPlace(module, trained, cast("Gradients", self))

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the memory to compute a gradient in; None if the parameter has a gradient already."""
        place = self._places[parameter]
        return place.view_as(place) if parameter.grad is None else None

    def zero(self) -> None:
        """Set all gradients to None."""
        for parameter in self._places:
            parameter.grad = None

    def remove(self) -> None:
        """Remove all gradients and hooks from the module."""
        self.zero()
        self._in_place.remove()
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        place, gradient = self._places[cast(nn.Parameter, parameter)], parameter.grad
        if gradient is not None and gradient is not place:
            if gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
            parameter.grad = place


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()  # waits, and closes its pipes


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Read questions and answer them with measured seconds until the input ends.

    Args:
        requests: Lines of JSON: first the configuration, the data and the threads, then one question a line.
        answers: Stream for the answers, one line of JSON for each question.
    """
    subject = json.loads(requests.readline())
    torch.set_num_threads(subject["threads"])
    config = Config.from_dict(subject["config"])
    description = subject["description"]
    description |= {
        key: tuple(description[key]) for key in ("x_shape", "y_shape", "classes") if description[key] is not None
    }
    description |= {key: np.dtype(description[key]) for key in ("x_dtype", "y_dtype")}
    whole = Subject(config, Description(**description), real=True)
    device = devices.of_rank(config.run.device, 0)
    cuts: dict[Divided, Cut] = {}
    for line in requests:
        question = json.loads(line)
        samples = question.pop("samples")
        named = {"whole": tuple(question["whole"]), "axes": tuple(map(tuple, question["axes"]))}
        divided = Divided(**question | named)
        try:
            if divided not in cuts:
                cuts.clear()
                cuts[divided] = whole.cut(divided, fake=False, device=device)
            answer: dict[str, Any] = {"seconds": time_blocks(cuts[divided], samples, device)}
        except (Exception, MemoryError) as error:  # the model's code may raise anything
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    private = os.dup(1)
    os.dup2(2, 1)  # a model's prints must not mix with the answers
    with os.fdopen(private, "wb") as out:
        serve(sys.stdin.buffer, out)
