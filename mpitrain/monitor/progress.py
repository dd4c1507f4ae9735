"""Progress display of a run: one bar that redraws itself on a terminal, plain lines everywhere else.

    step 120/300 ━━━━━╸━━━━━━ loss 2.3451  lr 1.50e-03  12.3k tokens/s  left 0:04:12

    step 120/300  loss   2.3451  lr 1.50e-03   12.3k tokens/s  left  0:04:12

If steps were skipped, their number is appended. The plain lines are meant for log files: they have fixed columns, fewer
than 80 characters without the number of skipped steps, no control characters, and each is flushed at once.
The bar never hides the cursor, because a killed job could not show it again. It is drawn from the training thread, at
most a few times a second, because a second thread would take time from a rank that has one core.

Under a launcher, isatty() does not show whether a rank's output ends on a terminal. Open MPI's mpirun gives a rank a
pseudo-terminal as stdout even if its own output goes to a file, and a pipe as stderr even if its own goes to a
terminal; MPICH's launcher always gives pipes. The destination of the launcher's own stream decides, and /proc shows it
on the launcher's node:

    rank 0 --pipe--> [hydra_pmi_proxy --pipe-->] mpirun --> terminal, file or pipe

Nothing is written directly to that terminal: all output passes through the launcher, so its order is kept.
"""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from contextlib import suppress
from typing import TextIO

from mpitrain.errors import printable
from mpitrain.storage import proc
from mpitrain.storage.text import duration, short

REDRAW_S = 0.2
NARROW = 60  # terminals with fewer columns get a bar with fewer figures


class Progress:
    """Progress display of rank 0; `close` ends it."""

    def __init__(
        self, total_steps: int, start_step: int, every: int, stream: TextIO | None = None, unit: str = "tokens"
    ) -> None:
        """Start the display, with a bar if the output ends on a terminal.

        Args:
            total_steps: Steps of the whole run.
            start_step: Steps done before this start.
            every: Interval between plain lines, in steps; the first and the last step are always shown.
            stream: Stream to write to; default stderr.
            unit: Unit of the rate, such as tokens or samples.
        """
        self._total, self._start, self._every, self._unit = total_steps, start_step, every, unit
        self._stream = sys.stderr if stream is None else stream
        self._first: tuple[int, float] | None = None  # number and time of the first step shown
        self._bar = _open_bar(self._stream, total_steps, start_step)

    def update(self, step: int, loss: float, lr: float, rate: float, skipped: int = 0) -> None:
        """Show a step.

        Args:
            step, loss, lr: Number, loss and learning rate of the step.
            rate: Tokens or samples per second.
            skipped: Number of steps so far that made no update.
        """
        self._first = self._first or (step, time.monotonic())
        left = seconds_left(self._total, self._first, step, time.monotonic())
        if self._bar is not None:
            self._bar.show(step, loss, lr, rate, self._unit, left, skipped)
        elif step % self._every == 0 or step in (self._start + 1, self._total):
            self.print_line(plain_line(step, self._total, loss, lr, rate, self._unit, left) + _skipped(skipped))

    def print_line(self, text: str) -> None:
        """Print a line of text, above the bar if there is one."""
        text = printable(text, None, as_text=True)
        if self._bar is not None:
            self._bar.print_line(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Stop the bar and leave its last state on the screen. A second call does nothing."""
        if self._bar is not None:
            self._bar.close()


def seconds_left(total: int, first: tuple[int, float], step: int, now: float) -> float:
    """Return the estimated seconds until the last step, from the mean time of the steps after the first one seen.

    The first step is left out because it includes warming up.

    Args:
        total: Number of the last step.
        first: Number and time of the first step seen.
        step: Number of the step just done.
        now: Current time in seconds, on the same clock as `first`.

    Returns:
        Seconds, or NaN until a second step is done.
    """
    if step >= total:
        return 0.0
    return (total - step) * (now - first[1]) / (step - first[0]) if step > first[0] else math.nan


def plain_line(step: int, total: int, loss: float, lr: float, rate: float, unit: str, left: float) -> str:
    """Return one line for a log, with columns that stay at the same place from step to step.

    Args:
        step, total: Number of the step, and of the last one.
        loss, lr: Loss and learning rate of the step.
        rate, unit: Amount of `unit` per second.
        left: Estimated seconds until the end.
    """
    return (
        f"step {step:{len(str(total))}}/{total}  loss {_loss(loss):>8}  lr {lr:.2e}  "
        f"{short(rate):>6} {unit}/s  left {duration(left):>8}"
    )


def bar_text(columns: int, loss: float, lr: float, rate: float, unit: str, left: float) -> str:
    """Return the text beside the bar: the loss always, the other figures if the terminal is wide enough.

    Args:
        columns: Width of the terminal in characters.
        loss, lr, rate, unit, left: See `plain_line`.
    """
    if columns < NARROW:
        return f"loss {_loss(loss)} {duration(left)}"
    middle = f"  lr {lr:.2e}" if columns >= 80 else ""
    return f"loss {_loss(loss)}{middle}  {short(rate):>5} {unit}/s  left {duration(left)}"


def _skipped(steps: int) -> str:
    return f"  skipped {steps}" if steps else ""


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.2e}"  # NaN takes the second form and prints as nan


def _open_bar(stream: TextIO, total_steps: int, start_step: int) -> _Bar | None:
    """Return a bar, or None if the stream does not end on a terminal that can move its cursor."""
    try:
        terminal = terminal_behind(stream.fileno())
    except (OSError, ValueError, AttributeError):  # a stream without a file under it
        return None
    if terminal is None or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    # other prints are shown above the bar, unless stdout goes to a file
    return _Bar(stream, terminal, total_steps, start_step, redirect_stdout=terminal_behind(1) == terminal)


class _Bar:
    """Progress bar of rich, drawn only by `show`."""

    def __init__(self, stream: TextIO, terminal: str, total_steps: int, start_step: int, redirect_stdout: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._terminal, self._drawn = terminal, 0.0
        self._console = Console(file=stream, force_terminal=True)
        self._update_width()
        steps, bar = TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=None)
        text = TextColumn("{task.fields[text]}", markup=False)
        self._rich = RichProgress(
            steps, bar, text, console=self._console, auto_refresh=False, redirect_stdout=redirect_stdout, expand=True
        )
        self._task = self._rich.add_task("", total=total_steps, completed=start_step, text="before the first step")
        self._rich.start()
        self._console.show_cursor(True)

    def show(self, step: int, loss: float, lr: float, rate: float, unit: str, left: float, skipped: int) -> None:
        self._update_width()
        text = bar_text(self._console.width, loss, lr, rate, unit, left) + _skipped(skipped)
        due = time.monotonic() - self._drawn >= REDRAW_S
        self._rich.update(self._task, completed=step, text=text, refresh=due)
        if due:
            self._drawn = time.monotonic()

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._rich.stop()

    def _update_width(self) -> None:
        """Read the terminal's width: it may be resized, and under a launcher rich cannot query it."""
        with suppress(OSError), open(self._terminal, opener=_open_terminal) as device:
            self._console.width = os.get_terminal_size(device.fileno()).columns or 80


# options that make mpirun prefix each line, or send it elsewhere
TAGGING = ("-output", "--output", "-tag-output", "--tag-output", "-timestamp-output", "--timestamp-output")
LABELLING = ("-l", "-prepend-rank", "--prepend-rank", "-xterm", "--xterm")


def terminal_behind(descriptor: int) -> str | None:
    """Return the path of the terminal on which bytes written to a file descriptor appear.

    It is None if they go to a file, a pipe, another node, or through a launcher that prefixes each line.
    """
    launcher, parent = None, os.getppid()
    while os.path.basename(_command(parent)[0]) in proc.LAUNCHERS:
        launcher, parent = parent, proc.state_and_parent_of(parent)[1]
    if launcher is None or descriptor not in (1, 2):  # the launcher forwards only these two
        return os.ttyname(descriptor) if os.isatty(descriptor) else None
    if any(word.startswith(TAGGING) or word in LABELLING for word in _command(launcher)):
        return None
    try:
        # a pipe or a pseudo-terminal leads to the launcher; a file means that the rank itself was redirected
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)):
            return None
        path = os.readlink(f"/proc/{launcher}/fd/{descriptor}")
        with open(path, opener=_open_terminal) as device:
            return path if device.isatty() else None
    except OSError:  # a path such as pipe:[123], or no permission
        return None


def _open_terminal(path: str, flags: int) -> int:
    """Open a terminal without making it the controlling terminal of this process."""
    return os.open(path, flags | os.O_NOCTTY)


def _command(process: int) -> list[str]:
    """Return the argument list of a process, or [""] if it cannot be read."""
    return proc.read(f"{process}/cmdline").split("\0")
