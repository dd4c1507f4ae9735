"""`python -m mpitrain.report --watch RUN`: a live view of a run, read only from its files.

The run may be on another machine with a shared file system, or still be queued. The view ends when the run ends, with
the run's exit code. It keeps waiting for a job that was killed or is silent, because the job may continue or be
restarted.

It shows one frame that is redrawn on a terminal, or lines of text on a pipe.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from textwrap import shorten
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError, printable
from mpitrain.monitor.json_lines import StepLine
from mpitrain.monitor.watched import EXIT_CODES, Curve, RunStatus, WatchedRun
from mpitrain.storage.text import counted, duration, duration_text, number_text, seconds_text, short

_EVERY = 1.0  # seconds between reads of metrics and events
_RANKS_EVERY = 5.0  # seconds between reads of the ranks' files, of which there are many
_PRINT_EVERY = 10.0  # seconds between lines on a pipe


def run(folder: Path, *, once: bool = False) -> int:
    """Show a run until it ends or Ctrl-C is pressed: a redrawn frame on a terminal, occasional lines elsewhere.

    Args:
        folder: Path of the run folder, which does not have to exist yet.
        once: If true, show one frame and return.

    Returns:
        Exit code of the run, which is 0 if it is done, 75 if it stopped and can be resumed, and 1 if it failed; 0 after
        Ctrl-C. With `once` also 0 if it is still running, and 1 if it was killed.

    Raises:
        InputError: The path is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run folder {folder} is a file; use the folder of a run, such as {folder.parent}")
    watched, console = WatchedRun(folder), Console(highlight=False)
    try:
        if once:
            watched.read()
            console.print(frame(watched, console.width, plain=_is_ascii(console)))
        elif console.is_terminal and not console.is_dumb_terminal:
            _redraw(watched, console)
        else:
            _print_lines(watched)
    except KeyboardInterrupt:
        return EXIT_DONE
    except BrokenPipeError:  # the reader is gone; keep Python from reporting it again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    status = watched.status()
    return EXIT_CODES.get(status, EXIT_FAILED if status is RunStatus.KILLED else EXIT_DONE)


def _redraw(watched: WatchedRun, console: Console) -> None:
    """Redraw frames on the alternate screen, and print the last one on the normal screen at the end."""
    plain = _is_ascii(console)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for _ in _poll(watched):
                live.update(frame(watched, console.width, plain=plain), refresh=True)
    finally:
        console.print(frame(watched, console.width, plain=plain))


def _print_lines(watched: WatchedRun) -> None:
    last_print, status, step = float("-inf"), None, -1
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)  # poll reports a pipe without a reader even if no event is requested
    for _ in _poll(watched):
        if poller.poll(0):
            return
        news = [text for event in watched.new_events if (text := _describe(event))]
        watched.new_events.clear()
        for text in news:
            print(text, flush=True)
        now = time.monotonic()
        if watched.status() is not status or (watched.step != step and now - last_print >= _PRINT_EVERY):
            last_print, status, step = now, watched.status(), watched.step
            print(line(watched), flush=True)


def _poll(watched: WatchedRun) -> Iterator[None]:
    """Read the run's files again and again until it has ended, yielding after each time."""
    looked = float("-inf")
    while True:
        more = time.monotonic() - looked >= _RANKS_EVERY
        looked = time.monotonic() if more else looked
        watched.read(more=more)
        ended = watched.status() in EXIT_CODES
        if ended and not more:
            watched.read()
        yield
        if ended:
            return
        time.sleep(_EVERY)


def _describe(event: dict[str, Any]) -> str:
    """Return a line of text for a start or a loss of ranks, and "" for other events."""
    text = {
        "start": f"started at step {event['step']} with {event.get('ranks')} ranks",
        "lost": f"ranks {printable(event.get('ranks'))} died before step {event['step']}; training continues",
    }.get(event["event"])
    return f"{clock(event['time'])} {text}" if text else ""


def _is_ascii(console: Console) -> bool:
    """Return whether the terminal shows only ASCII."""
    return not console.encoding.lower().startswith("utf")


BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-:=+*#"
COLOURS = dict.fromkeys(("running", "done"), "green") | dict.fromkeys(("stopped", "silent"), "yellow")
COLOURS |= dict.fromkeys(("failed", "killed"), "red")
_HOSTS = 3  # hosts that are named
_LABEL = 13  # width in characters of the column with the figures' names
_CURVE_TEXT = 32  # longest text behind a curve
_CURVE, _LEAST_CURVE = 60, 8  # longest and shortest curve
_LEAST_BAR, _PLAIN_BAR = 8, 20  # shortest bar of steps, and its length in ASCII
_LONGEST_TEXT, _NAME = 300, 64  # longest warning and longest host name
_SHOWN_RANKS = 6  # ranks whose time categories are shown
_SHOWN_CATEGORIES = {"data": "data", "forward": "forward", "backward": "backward", "communication": "comm."}
_SHOWN_CATEGORIES |= {"optimizer": "optim.", "evaluation": "eval.", "checkpoint": "save", "other": "other"}


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """Return a text curve of at most `width` characters, scaled from the least to the largest mean.

    Each character stands for the mean of an equal share of the values.

    Args:
        values: Values in their order.
        width: Largest width in characters.
        levels: Characters from the lowest to the highest level.
    """
    count = min(width, len(values))
    if count < 1:
        return ""
    cuts = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[lo:hi]) / (hi - lo) for lo, hi in pairwise(cuts)]
    least, span = min(means), max(means) - min(means)
    return "".join(levels[round((mean - least) / span * (len(levels) - 1)) if span else 0] for mean in means)


def frame(run: WatchedRun, width: int, *, plain: bool = False) -> RenderableType:
    """Return all that is known of a run in about 20 lines, or more if lines have to be wrapped. No number is truncated.

    Args:
        run: State of the run.
        width: Width of the terminal in characters.
        plain: If true, use only ASCII characters for curves and bars.
    """
    status = run.status()
    word = status.value, f"bold {COLOURS.get(status.value, 'default')}"
    parts: list[RenderableType] = [Text.assemble(word, "  ", (printable(run.folder, _LONGEST_TEXT), "bold"))]
    if detail := _status_detail(run, status):
        parts.append(Text(detail))
    if status is RunStatus.WAITING:
        return Group(*parts, *_warnings(run))
    if run.start:
        parts.append(Text(_machine(run)))
    parts += [_progress(run, width, plain), _figures(run, width, plain)]
    if any(run.recent_times.values()):
        parts.append(_time_table(run, width))
    return Group(*parts, *_warnings(run))


def line(run: WatchedRun) -> str:
    """Return the state of a run in one line."""
    step_line, status = run.steps.line, run.status()
    detail = _status_detail(run, status)
    words = [f"{clock(time.time())} {status.value}" + (f": {detail}" if detail else "")]
    if status is not RunStatus.WAITING:
        words.append(f"step {run.step:,}" + (f"/{run.total_steps:,}" if run.total_steps else ""))
    if step_line:
        words.append(f"loss {number_text(step_line.loss)}")
        if run.steps.held_out.last:
            words.append(f"held-out loss {number_text(run.steps.held_out.last[1])}")
        words.append(_throughput(run))
    if run.save:
        words.append(f"saved {printable(run.save.get('folder'))}")
    if run.seconds_left is not None and status is RunStatus.RUNNING:
        words.append(f"{duration(run.seconds_left)} left")
    return ", ".join(word for word in words if word)


def _status_detail(run: WatchedRun, status: RunStatus) -> str:
    """Return a sentence about the status of a run, or ""."""
    if status is RunStatus.WAITING:
        there = "has no metrics yet" if run.folder.is_dir() else "does not exist yet"
        return f"the folder {there}; the job may be in the queue or starting"
    if status in (RunStatus.SILENT, RunStatus.KILLED):
        since = clock(time.time() - run.quiet_seconds)
        verb = "no new line" if status is RunStatus.SILENT else "nothing new"
        return f"{verb} since {since} ({duration_text(run.quiet_seconds)}); {run.lock_text()}"
    return printable(run.end.get("message") or "", _LONGEST_TEXT)


def _machine(run: WatchedRun) -> str:
    start = run.start
    hosts = [printable(host, _NAME) for host in start.get("hosts") or []]
    more = f" and {len(hosts) - _HOSTS} more" if len(hosts) > _HOSTS else ""
    where = f" on {', '.join(hosts[:_HOSTS])}{more}" if hosts else ""
    means = "".join(f", {printable(start[key])}" for key in ("device", "parallel") if start.get(key))
    began = datetime.fromtimestamp(start["time"])
    ended = run.end.get("time")
    took = f"{duration((ended or time.time()) - start['time'])}{'' if ended else ' ago'}"
    return f"{counted(int(start.get('ranks') or 0), 'rank')}{where}, started {began:%Y-%m-%d %H:%M} ({took}){means}"


def _progress(run: WatchedRun, width: int, plain: bool) -> RenderableType:
    total = run.total_steps
    if not total:
        return Text(f"step {run.step:,}")
    left = run.seconds_left if run.status() is RunStatus.RUNNING else None
    share = min(1.0, run.step / total)
    step, rest = f"step {run.step:,}/{total:,}", f"{share:.0%}" + (f"  {duration(left)} left" if left else "")
    if width < len(step) + len(rest) + (_PLAIN_BAR if plain else _LEAST_BAR) + 2:
        return Text(f"{step}  {rest}")
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    bar: RenderableType = ProgressBar(total=total, completed=run.step)
    if plain:
        bar = Text(("#" * round(_PLAIN_BAR * share)).ljust(_PLAIN_BAR, "."))
    table.add_row(step, bar, rest)
    return table


def _figures(run: WatchedRun, width: int, plain: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=_LABEL)
    table.add_column()  # wraps its lines between words
    step_line, room = run.steps.line or StepLine(step=0), width - _LABEL - 2
    skipped = f"{counted(run.steps.skipped, 'step')}, because gradients were not finite"
    rows = [
        ("loss", _curve(run.steps.loss, room, plain)),
        ("held-out loss", _curve(run.steps.held_out, room, plain)),
        ("learning rate", number_text(step_line.lr, ".3g", "")),
        ("gradient norm", number_text(step_line.grad_norm) if "grad_norm" in step_line.model_fields_set else ""),
        ("throughput", _throughput(run)),
        ("step time", _step_time(list(run.steps.seconds))),
        ("memory", f"{short(step_line.memory_bytes)}B peak on rank 0" if step_line.memory_bytes else ""),
        ("goodput", "" if step_line.goodput is None else f"{step_line.goodput:.1%} of the wall clock of all starts"),
        ("skipped", skipped if run.steps.skipped else ""),
        ("checkpoint", _checkpoint(run)),
        ("restarts", _restarts(run)),
        ("damaged", f"{counted(run.steps.damaged, 'line')} of metrics.jsonl" if run.steps.damaged else ""),
    ]
    for label, text in rows:
        if text:
            table.add_row(label, text)
    return table


def _curve(curve: Curve, width: int, plain: bool) -> str:
    if curve.last is None:
        return ""
    step, value = curve.last
    values = [v for _, v in curve.points]
    last, first = f"{number_text(value):>8}", f"from {number_text(values[0])}, at step {step:,}"
    beside = width - _CURVE_TEXT - len(last) - 4  # room for the curve; equal for both curves
    broken = beside < _LEAST_CURVE
    drawn = sparkline(values, min(_CURVE, width - len(last) - 2 if broken else beside), PLAIN if plain else BLOCKS)
    return f"{last}  {drawn}" + ("\n" if broken else "  ") + first


def _throughput(run: WatchedRun) -> str:
    seconds, step_line = sum(run.steps.seconds), run.steps.line
    if not seconds or step_line is None or step_line.samples is None:
        return ""
    each = len(run.steps.seconds) / seconds
    samples = f"{short(step_line.samples * each)} samples/s"
    return f"{short(step_line.tokens * each)} tokens/s ({samples})" if step_line.tokens else samples


def _step_time(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    most = quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
    last = f"the last {counted(len(seconds), 'step')}"
    return f"median {seconds_text(median(seconds))}, 99 % within {seconds_text(most)} ({last})"


def _checkpoint(run: WatchedRun) -> str:
    if not run.save:
        return "none yet"
    ago = duration_text(max(0.0, time.time() - run.save["time"]))
    seconds = run.save.get("seconds")
    took = f", delayed training by {seconds_text(seconds)}" if isinstance(seconds, (int, float)) else ""
    return f"{printable(run.save.get('folder', ''))}, {ago} ago{took}"


def _restarts(run: WatchedRun) -> str:
    words = []
    if run.starts > 1:
        resumed = run.start.get("resumed_step")
        words.append(f"{run.starts - 1}, the last " + (f"from step {resumed:,}" if resumed else "from the beginning"))
    if run.lost:
        which = "rank" if len(run.lost) == 1 else "ranks"
        words.append(f"continues without {which} {printable(', '.join(map(str, run.lost)))}")
    return "; ".join(words)


def _time_table(run: WatchedRun, width: int) -> Table:
    """Return a table of the share of each time category, with ranks that computed longest first.

    It has a line for each rank; if that is too wide, a column for each rank for which there is room. Servers come last.
    """
    sums: dict[int, dict[str, float]] = {}
    for rank, recent in run.recent_times.items():
        sums[rank] = {name: sum(seconds.get(name, 0.0) for seconds in recent) for name in _SHOWN_CATEGORIES}
    shown = [name for name in _SHOWN_CATEGORIES if any(seconds[name] > 0 for seconds in sums.values())]
    slowest = sorted(sums, key=lambda r: (r in run.servers, sums[r]["communication"] - sum(sums[r].values())))
    rows = [["% of time", *(_SHOWN_CATEGORIES[name] for name in shown)]]
    for rank in slowest[:_SHOWN_RANKS]:
        total = sum(sums[rank].values()) or 1.0
        named = f"{'server' if rank in run.servers else 'rank'} {rank}"
        rows.append([named, *(f"{100 * sums[rank][name] / total:.0f}" for name in shown)])
    if _table_width(rows) > width:
        columns = [list(column) for column in zip(*rows, strict=True)]
        fitting = range(len(rows), 1, -1)
        rows = next((cut for n in fitting if _table_width(cut := [row[:n] for row in columns]) <= width), columns)
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _table_width(rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table in characters, with two between columns."""
    return sum(max(map(len, column)) for column in zip(*rows, strict=True)) + 2 * (len(rows[0]) - 1)


def _warnings(run: WatchedRun) -> list[Text]:
    return [
        Text.assemble(
            (f"{when[11:19]} rank {rank} ", "dim"),
            (printable(level), "yellow" if level == "WARNING" else "red"),
            f" {printable(shorten(message, _LONGEST_TEXT, placeholder=' ...'), None)}",
        )
        for when, rank, level, message in run.warnings
    ]


def clock(when: float) -> str:
    """Return the local time of day of `when`, in unix seconds."""
    return f"{datetime.fromtimestamp(when):%H:%M:%S}"
