"""A run in a few lines of text: what its metrics say."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median, median_high
from typing import Any

from mpitrain.monitor.json_lines import FullStepLine
from mpitrain.monitor.metrics import HELD_OUT, step_lines
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
    lines = [_known(line) for line in step_lines(folder)]
    first, last = lines[0], lines[-1]
    held_out = [(m["step"], m["held_out_loss"]) for m in lines if m.get("held_out_loss") is not None]
    checkpoints = sorted(p.name for p in (folder / CHECKPOINTS).glob("step-*") if ".tmp-" not in p.name)
    rows = [
        ("steps", f"{first['step']} to {last['step']} ({len(lines)} recorded)"),
        ("loss", f"{_loss(first['loss'])} -> {_loss(last['loss'])}"),
        ("skipped", _skipped(lines)),
        ("held-out loss", " -> ".join(f"{_loss(v)} (step {s})" for s, v in held_out[:: max(1, len(held_out) // 4)])),
        *_metrics(lines),
        ("speed", _speed(lines)),
        (
            "step time",
            f"median {median(_all(lines, 'step_s')) * 1e3:.1f} ms, in all {duration(sum(_all(lines, 'step_s')))}",
        ),
        ("between groups", _between_groups(lines)),
        ("staleness", _staleness(lines)),
        ("memory", _memory(lines)),
        ("recovered", _recovered(lines)),
        ("ranks", ", ".join(str(size) for size in dict.fromkeys(m["world_size"] for m in lines))),
        ("checkpoints", ", ".join(checkpoints) or "none"),
    ]
    return f"run {folder}\n{aligned([row for row in rows if row[1]])}"


def _known(line: FullStepLine) -> dict[str, Any]:
    """Return a line of a run's metrics without what is not read here."""
    known = line.model_dump(exclude_none=True, exclude=set(line.model_extra or ())) | {"loss": line.loss}
    return known | {k: v for k, v in (line.model_extra or {}).items() if k.startswith(HELD_OUT)}


def _metrics(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Of each metric of held-out samples a row: the first and the last."""
    measured: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(HELD_OUT) and name != "held_out_loss" and isinstance(value, float):
                measured.setdefault(name.removeprefix(HELD_OUT), []).append(value)
    return [(f"held-out {spoken(n)}", f"{v[0]:.4g} -> {v[-1]:.4g}") for n, v in measured.items()]


def _speed(lines: list[dict[str, Any]]) -> str:
    samples = sum(_all(lines, "samples")) / sum(_all(lines, "step_s"))
    tokens = sum(_all(lines, "tokens")) / sum(_all(lines, "step_s"))
    return rates_text(samples, tokens)


def _between_groups(lines: list[dict[str, Any]]) -> str:
    """What averages cost in parallel.mode local, where groups of ranks met."""
    sent = [m["between_groups_bytes"] for m in lines if "between_groups_bytes" in m]
    if not sent:
        return ""
    return f"{median_high(sent) / 1e6:.4g} MB sent by rank 0 a step, {len(sent)} meetings in {len(lines)} steps"


def _staleness(lines: list[dict[str, Any]]) -> str:
    """How old the parameters were that updates were computed with, where a server did not wait for all workers."""
    known = [m for m in lines if "staleness_mean" in m]
    if not known:
        return ""
    mean = sum(m["staleness_mean"] for m in known) / len(known)
    most, ahead = max(m["staleness_max"] for m in known), max(m["ahead_max"] for m in known)
    return f"mean {mean:.2g} steps, at most {most:.3g}; workers at most {counted(ahead, 'step')} ahead of the slowest"


def _skipped(lines: list[dict[str, Any]]) -> str:
    """Steps without an update, and those at the end that taught nothing."""
    skipped = sum(bool(m.get("skipped")) for m in lines)
    useless = list(takewhile(lambda m: m.get("skipped") or m["loss"] is None, reversed(lines)))
    told = [f"{skipped} of {len(lines)} steps" if skipped else ""]
    told.append(f"nothing learned since step {useless[-1]['step']}" if useless else "")
    return ", ".join(filter(None, told))


def _recovered(lines: list[dict[str, Any]]) -> str:
    """How often ranks were lost, and how long it took until the first step without them."""
    seconds = [(m["recovered_s"], m["step"]) for m in lines if "recovered_s" in m]
    return ", ".join(f"{s:.1f} s from the loss of ranks to step {step}" for s, step in seconds)


def _memory(lines: list[dict[str, Any]]) -> str:
    """Rank 0's bytes by category, as the last start of the run had them, with what the formula says."""
    told = [m["memory"] for m in lines if "memory" in m]
    if not told:
        return ""
    names = ("parameters", "gradients", "states", "activations", "buffers")
    expected = told[-1]["expected"]
    parts = [f"{n} {told[-1][n] / 1e6:.4g}" + (f" ({expected[n] / 1e6:.4g})" if n in expected else "") for n in names]
    return ", ".join(parts) + " MB on rank 0 (in brackets: by formula)"


def _all(lines: list[dict[str, Any]], key: str) -> list[float]:
    return [m[key] for m in lines]
