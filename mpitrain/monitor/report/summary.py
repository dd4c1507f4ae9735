"""A run in a few lines of text: what its metrics say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median, median_high

from mpitrain.monitor.json_lines import FullStepLine
from mpitrain.monitor.run_files import HELD_OUT, step_lines
from mpitrain.storage.run_folder import CHECKPOINTS
from mpitrain.storage.text import aligned, counted, duration, number_text, rates_text, spoken

_loss = partial(number_text, form=".4f")


def summary(folder: Path) -> str:
    """A few lines of what a run did: steps, losses, speed, checkpoints.

    Args:
        folder: The run folder.

    Raises:
        InputError: No step of it is finished, or a line of its metrics is damaged.
    """
    lines = list(step_lines(folder))
    first, last, took = lines[0], lines[-1], sum(line.step_s for line in lines)
    held_out = [(line.step, line.held_out_loss) for line in lines if line.held_out_loss is not None]
    lost = [line for line in lines if line.recovered_s is not None]  # the first step without ranks that were lost
    checkpoints = sorted(p.name for p in (folder / CHECKPOINTS).glob("step-*") if ".tmp-" not in p.name)
    rows = [
        ("steps", f"{first.step} to {last.step} ({len(lines)} recorded)"),
        ("loss", f"{_loss(first.loss)} -> {_loss(last.loss)}"),
        ("skipped", _skipped(lines)),
        ("held-out loss", " -> ".join(f"{_loss(v)} (step {s})" for s, v in held_out[:: max(1, len(held_out) // 4)])),
        *_metrics(lines),
        ("speed", rates_text(sum(line.samples for line in lines) / took, sum(line.tokens for line in lines) / took)),
        ("step time", f"median {median(line.step_s for line in lines) * 1e3:.1f} ms, in all {duration(took)}"),
        ("between groups", _between_groups(lines)),
        ("staleness", _staleness(lines)),
        ("memory", _memory(lines)),
        ("recovered", ", ".join(f"{n.recovered_s:.1f} s from the loss of ranks to step {n.step}" for n in lost)),
        ("ranks", ", ".join(str(size) for size in dict.fromkeys(line.world_size for line in lines))),
        ("checkpoints", ", ".join(checkpoints) or "none"),
    ]
    return f"run {folder}\n{aligned([row for row in rows if row[1]])}"


def _metrics(lines: Sequence[FullStepLine]) -> list[tuple[str, str]]:
    """Return a row for each metric of held-out samples: the first and the last value."""
    measured: dict[str, list[float]] = {}
    for line in lines:
        for name, value in (line.model_extra or {}).items():
            if name.startswith(HELD_OUT) and isinstance(value, float):
                measured.setdefault(name.removeprefix(HELD_OUT), []).append(value)
    return [(f"held-out {spoken(n)}", f"{v[0]:.4g} -> {v[-1]:.4g}") for n, v in measured.items()]


def _between_groups(lines: Sequence[FullStepLine]) -> str:
    """Return what averages cost in parallel.mode local, where groups of ranks met."""
    sent = [line.between_groups_bytes for line in lines if line.between_groups_bytes is not None]
    if not sent:
        return ""
    return f"{median_high(sent) / 1e6:.4g} MB sent by rank 0 a step, {len(sent)} meetings in {len(lines)} steps"


def _staleness(lines: Sequence[FullStepLine]) -> str:
    """Return how old the parameters were that updates were computed with, where a server did not wait for all."""
    means = [line.staleness_mean for line in lines if line.staleness_mean is not None]
    if not means:
        return ""
    most, ahead = max(line.staleness_max or 0 for line in lines), max(line.ahead_max or 0 for line in lines)
    told = f"mean {sum(means) / len(means):.2g} steps, at most {most:.3g}"
    return f"{told}; workers at most {counted(ahead, 'step')} ahead of the slowest"


def _skipped(lines: Sequence[FullStepLine]) -> str:
    """Return the steps without an update, and those at the end that taught nothing."""
    skipped = sum(line.skipped for line in lines)
    useless = list(takewhile(lambda line: line.skipped or line.loss is None, reversed(lines)))
    told = [f"{skipped} of {len(lines)} steps" if skipped else ""]
    told.append(f"nothing learned since step {useless[-1].step}" if useless else "")
    return ", ".join(filter(None, told))


def _memory(lines: Sequence[FullStepLine]) -> str:
    """Return rank 0's bytes by category, as the last start of the run had them, with what the formula says."""
    memory = next((line.memory for line in reversed(lines) if line.memory is not None), None)
    if memory is None:
        return ""
    held, parts = memory.model_dump(exclude={"expected"}), []
    for name, count in held.items():
        formula = f" ({memory.expected[name] / 1e6:.4g})" if name in memory.expected else ""
        parts.append(f"{name} {count / 1e6:.4g}{formula}")
    return ", ".join(parts) + " MB on rank 0 (in brackets: by formula)"
