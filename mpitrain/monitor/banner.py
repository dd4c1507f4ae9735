"""The first and the last thing a run says. Plain aligned ASCII: the same in a log and on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mpitrain.storage.text import aligned, counted, duration, rates_text, short


@dataclass(frozen=True)
class RunFacts:
    """What the start banner tells.

    Attributes:
        threads: Of each rank.
        device: "CPU", or what each rank computes on.
        mpi: The library and its version.
        tokens: Per sample; 0 where samples are not tokens.
        batch: The global one, in samples.
        samples_taken: In all steps.
        notes: Further labels and texts.
    """

    version: str
    ranks: int
    nodes: int
    threads: int  # per rank
    device: str  # "CPU", or what each rank computes on
    mpi: str  # library and version
    model: str
    parameters: int
    data: str
    samples: int
    held_out_samples: int
    tokens: int
    batch: int
    microbatch: int
    steps: int
    samples_taken: int
    start_step: int
    precision: str
    run_dir: str
    notes: tuple[tuple[str, str], ...] = ()  # further (label, text)


@dataclass(frozen=True)
class Outcome:
    """What the closing lines tell.

    Attributes:
        loss: Of the last step; NaN where there was none.
        held_out: The figures of the last evaluation, by name, as text; empty where nothing was held out.
        seconds: Of this start, not of the whole run.
        step_seconds: Part of them that its steps took, without evaluation and saving.
        samples_done: Samples of this start's steps.
        tokens: Per sample; 0 where samples are not tokens.
        peak_memory_bytes: Of the rank that held most.
        skipped: Steps without an update.
        fruitless_since: The step since which nothing was learned; 0 where something was.
        early: Why the run was done before its last step; empty where it was not.
        commands: What can be done next, and the command for it, to copy.
    """

    step: int
    steps: int
    start_step: int
    loss: float
    held_out: Mapping[str, str]
    seconds: float
    step_seconds: float
    samples_done: int
    tokens: int  # per sample; 0 where samples are not tokens
    peak_memory_bytes: int  # of the rank that held most
    run_dir: str
    skipped: int = 0
    fruitless_since: int = 0
    commands: tuple[tuple[str, str], ...] = ()
    early: str = ""


def banner(facts: RunFacts) -> str:
    """What a run says first. The lines are without a newline at the end."""
    size = f" of {facts.tokens:,} tokens" if facts.tokens else ""
    held_out = f", {facts.held_out_samples:,} held out" if facts.held_out_samples else ""
    passes = facts.samples_taken / facts.samples if facts.samples else 0.0
    start = f", from step {facts.start_step:,}" if facts.start_step else ""
    nodes, threads = counted(facts.nodes, "node"), counted(facts.threads, "thread")
    rows = [
        ("ranks", f"{facts.ranks:,} on {nodes}, {threads} each, {facts.device}"),
        ("MPI", facts.mpi),
        ("model", f"{facts.model}, {counted(facts.parameters, 'parameter')}"),
        ("data", facts.data),
        ("samples", f"{facts.samples:,}{size}{held_out}"),
        ("batch", f"{counted(facts.batch, 'sample')}, at most {facts.microbatch:,} per rank and pass"),
        ("steps", f"{facts.steps:,}{start} ({passes:.3g} passes over the data)"),
        ("precision", facts.precision),
        ("run folder", facts.run_dir),
        *facts.notes,
    ]
    return f"mpitrain {facts.version}\n{aligned(rows)}"


def closing(outcome: Outcome) -> str:
    """What a run says last. The lines are without a newline at the end."""
    steps = outcome.step - outcome.start_step
    done = "done" if outcome.step >= outcome.steps or outcome.early else "stopped"
    fruitless = ""
    if outcome.fruitless_since:
        done = "ended" if done == "done" else done
        fruitless = f", nothing learned since step {outcome.fruitless_since:,}"
    early = f", {outcome.early}" if outcome.early else ""
    since = f" ({steps:,} since the resume)" if outcome.start_step else ""
    rows = [("loss", "none: no step was taken" if math.isnan(outcome.loss) and not steps else f"{outcome.loss:.4f}")]
    rows += [(f"held-out {name}", text) for name, text in outcome.held_out.items()]
    if outcome.skipped:
        rows.append(("skipped", f"{counted(outcome.skipped, 'step')}, for gradients that were not finite"))
    rows.append(("throughput", _throughput(outcome)))
    rows.append(
        ("time", f"{duration(outcome.seconds)}, {duration(outcome.step_seconds)} of it in {counted(steps, 'step')}")
    )
    rows.append(("peak memory", f"{short(outcome.peak_memory_bytes)}B per rank at most"))
    rows.append(("run folder", outcome.run_dir))
    rows.extend(outcome.commands)
    return f"{done} at step {outcome.step:,} of {outcome.steps:,}{since}{fruitless}{early}\n{aligned(rows)}"


def _throughput(outcome: Outcome) -> str:
    if outcome.step_seconds <= 0:
        return "none"
    samples = outcome.samples_done / outcome.step_seconds
    return rates_text(samples, samples * outcome.tokens)
