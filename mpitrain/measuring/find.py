"""Batch and bucket sizes of a configuration, found by short runs of its job on this machine.

    --find-batch    microbatches of 1, 2, 4 ... samples: step, throughput and memory of each, and the largest that fits
    --find-bucket   comm.bucket_mb from 0.25 to 64 MiB: step of each, and the fastest

Memory is a straight line in the samples of a microbatch. The largest one that fits is therefore calculated from the two
largest that ran, and a size is tried only if the line says that it fits.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as devices
from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.measuring.machine import Stamps
from mpitrain.measuring.self_start import make_parser, run_measurement, temporary_folder
from mpitrain.monitor import peak_memory_bytes
from mpitrain.parallel.layouts import layout_of
from mpitrain.pipe.schedule import default_microbatches
from mpitrain.planner.machine import size_of
from mpitrain.storage.text import bytes_text, counted, seconds_text, short
from mpitrain.trainer.device import memory_limit
from mpitrain.trainer.trainer import Trainer

BUCKETS = (0.25, 1.0, 4.0, 16.0, 25.0, 64.0)  # MiB
_WARM = 2  # steps that are not measured
_ROUNDS = 3  # of all bucket sizes in turns, of which the fastest run counts
_LONG, _QUICK = 4.0, 0.5  # seconds of a step beyond which no larger batch is tried


def main(arguments: Sequence[str]) -> int:
    """Run `mpitrain.plan --find-batch` or `--find-bucket` with all arguments, and return the exit code."""
    options_parser = make_parser("mpitrain.plan [CONFIG.toml] [--section.key value]...", __doc__ or "", "2", 600)
    which = options_parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--find-batch", action="store_true", help="find the largest batch of a rank that fits")
    which.add_argument("--find-bucket", action="store_true", help="find the fastest comm.bucket_mb")
    memory = partial(size_of, option="--memory")
    size = "memory that a rank may use, such as 2GiB [its share of the node's or device's]"
    options_parser.add_argument("--memory", type=memory, metavar="SIZE", help=size)
    options, rest = options_parser.parse_known_args(list(arguments))
    config = Config.from_args(rest)
    measure, show = (find_batch, show_batch) if options.find_batch else (find_bucket, show_bucket)

    def keep(results: dict[int, Any]) -> None:
        for ranks, result in results.items():
            print(f"\n{counted(ranks, 'rank')}\n" + "\n".join(show(result)))

    name = "batch size" if options.find_batch else "bucket size"
    command = ["-m", "mpitrain.plan", *arguments]
    return run_measurement(command, options, name, lambda world: measure(world, config, options), keep)


def run_steps(world: Communicator, config: Config, quick: bool, **train: Mapping[str, Any]) -> tuple[float, int]:
    """Train for a few steps, and return the median seconds of a step and the most bytes of a rank. Collective.

    Args:
        world: All ranks.
        config: Configuration of the job.
        quick: If true, take fewer steps.
        train: Settings that replace those of the configuration, by section.
    """
    steps, stamps = _WARM + (4 if quick else 12), Stamps(time.perf_counter)
    fixed: dict[str, Mapping[str, Any]] = {
        "train": {"steps": steps, "evaluate_every": 0, "evaluate_samples": 1, "batch_warmup": []},
        "checkpoint": {"every": 0},
        "parallel": {"auto": False},
    }
    values = config.to_dict()
    with temporary_folder(world, Path()) as folder, open(os.devnull, "w") as nowhere:
        for section, settings in (*fixed.items(), *train.items(), ("run", {"dir": str(folder / "run")})):
            values[section] |= settings
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            trainer = Trainer(values, [stamps], world=world)
            trainer.print = lambda text: None
            trainer.fit()
    figures = float(np.median(np.diff(stamps.timestamps)[_WARM - 1 :])), peak_memory_bytes(trainer.device)
    del trainer
    gc.collect()
    seconds, nbytes = zip(*world.all_gather_object(figures), strict=True)
    return max(seconds), max(nbytes)


def find_batch(world: Communicator, config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Return step time and memory for growing batches, and the largest batch that fits. Collective.

    Args:
        world: All ranks.
        config: Configuration of the job.
        options: Options of the command line.

    Returns:
        "room": bytes of a rank; "runs": (samples of a microbatch, samples of a batch, seconds, bytes) of each run;
        "largest": the most samples of a microbatch that fit, None if memory did not grow; "end": why larger ones were
        not tried.
    """
    layout, on = layout_of(config, world.size), devices.of_rank(config.run.device, world.local_rank)
    room = min(world.all_gather_object(options.memory or memory_limit(on, world)))
    samples_per = layout.readers * default_microbatches(layout.pipeline)
    runs: list[tuple[int, int, float, int]] = []
    largest, end = None, ""
    for samples in _powers():
        train = {"batch": samples * samples_per, "microbatch": samples, "accumulation": 0}
        try:
            seconds, nbytes = run_steps(world, config, options.quick, train=train)
        except InputError as error:
            if not runs:
                raise
            end = str(error)
            break
        if runs and nbytes > runs[-1][3]:
            largest = samples + int((room - nbytes) // ((nbytes - runs[-1][3]) / (samples - runs[-1][0])))
        runs.append((samples, samples * samples_per, seconds, nbytes))
        if nbytes > room or (largest is not None and largest < 2 * samples):
            break
        if seconds > (_QUICK if options.quick else _LONG):
            end = f"a step takes {seconds_text(seconds)}"
            break
    return {"room": room, "runs": runs, "largest": largest, "end": end}


def show_batch(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show a result of `find_batch`."""
    room, runs, largest = result["room"], result["runs"], result["largest"]
    yield "  microbatch   batch      step   samples/s      memory"
    for samples, batch, seconds, nbytes in runs:
        rate = short(batch / seconds)
        yield f"{samples:12,} {batch:7,} {seconds_text(seconds):>9} {rate:>11} {bytes_text(nbytes):>11}"
    if result["end"]:
        yield f"  larger ones were not tried: {result['end']}"
    fits = "unknown, because memory did not grow" if largest is None else f"{max(0, largest):,} samples"
    fastest = max(runs, key=lambda run: run[1] / run[2])[0]
    yield f"largest microbatch in {bytes_text(room)} per rank: {fits}; fastest here: --train.microbatch {fastest}"


def find_bucket(world: Communicator, config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step by bucket size in MiB. Collective.

    Args:
        world: All ranks.
        config: Configuration of the job.
        options: Options of the command line.

    Raises:
        InputError: There is only one rank.
    """
    if world.size == 1:
        raise refusal("one rank reduces no gradients; use --ranks 2 or more")
    sizes = sorted({*BUCKETS, config.comm.bucket_mb})
    runs = [
        {size: run_steps(world, config, options.quick, comm={"bucket_mb": size})[0] for size in sizes}
        for _ in range(1 if options.quick else _ROUNDS)
    ]
    best = {size: min(run[size] for run in runs) for size in sizes}
    return {"seconds": list(best.items()), "configured": config.comm.bucket_mb}


def show_bucket(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show a result of `find_bucket`."""
    seconds = dict(result["seconds"])
    yield "  bucket      step"
    for size, each in seconds.items():
        yield f"{size:8g} {seconds_text(each):>9}"
    fastest = min(seconds, key=lambda size: seconds[size])
    less = 1 - seconds[fastest] / seconds[result["configured"]]
    yield f"fastest: --comm.bucket_mb {fastest:g}, {less:.0%} less than with {result['configured']:g}"


def _powers() -> Iterator[int]:
    """Yield 1, 2, 4 and so on."""
    number = 1
    while True:
        yield number
        number *= 2
