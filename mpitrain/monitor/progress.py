"""How far the run is: one bar that redraws itself on a terminal, plain lines everywhere else.

    step 120/300 ━━━━━╸━━━━━━ loss 2.3451  lr 1.50e-03  12.3k tokens/s  left 0:04:12

    step 120/300  loss   2.3451  lr 1.50e-03   12.3k tokens/s  left  0:04:12

Where steps were skipped, their number follows. The plain lines are for a log file: fixed columns, under 80 characters
but for that number, no control characters, each flushed at once.
The bar never hides the cursor, because a killed job could not bring it back, and draws from the training thread at
most a few times a second, because a second thread would take time from a rank with one core.

Under a launcher isatty() does not tell whether what a rank writes ends on a terminal: Open MPI's mpirun gives a rank a
pseudo-terminal as stdout even when its own output goes to a file, and a pipe as stderr even when its own goes to a
terminal; MPICH's gives pipes always. What counts is where the launcher's own stream goes, which /proc tells on the
launcher's node:

    rank 0 --pipe--> [hydra_pmi_proxy --pipe-->] mpirun --> terminal, file or pipe

Nothing is written to that terminal itself: bytes go by the launcher, in the order of everybody's.
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
NARROW = 60  # columns under which the bar leaves out what matters less


class Progress:
    """Rank 0's view of the run, until it is closed."""

    def __init__(
        self, total_steps: int, start_step: int, every: int, stream: TextIO | None = None, unit: str = "tokens"
    ) -> None:
        """Open a bar, where there is a terminal for it.

        Args:
            total_steps: Those of the whole run.
            start_step: Those done before this start.
            every: Steps between plain lines; the first and the last step are always shown.
            stream: Where to write; stderr unless given.
            unit: What the rate counts per second.
        """
        self._total, self._start, self._every, self._unit = total_steps, start_step, every, unit
        self._stream = sys.stderr if stream is None else stream
        self._first: tuple[int, float] | None = None  # the first step seen, and when
        self._bar = _open_bar(self._stream, total_steps, start_step)

    def update(self, step: int, loss: float, lr: float, rate: float, skipped: int = 0) -> None:
        """Show a step.

        Args:
            step: Its number.
            loss: Its loss.
            lr: Its learning rate.
            rate: Tokens or samples per second.
            skipped: Steps so far that made no update.
        """
        self._first = self._first or (step, time.monotonic())
        left = seconds_left(self._total, self._first, step, time.monotonic())
        if self._bar is not None:
            self._bar.show(step, loss, lr, rate, self._unit, left, skipped)
        elif step % self._every == 0 or step in (self._start + 1, self._total):
            self.say(plain_line(step, self._total, loss, lr, rate, self._unit, left) + _skipped(skipped))

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        text = printable(text, None, as_text=True)
        if self._bar is not None:
            self._bar.say(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it last was. Twice is fine."""
        if self._bar is not None:
            self._bar.close()


def seconds_left(total: int, first: tuple[int, float], step: int, now: float) -> float:
    """Seconds until the last step, from the mean over all steps after the first one seen, which pays for warming up.

    Args:
        total: The last step.
        first: The first step seen, and the time then.
        step: The step that is done.
        now: Seconds on any clock.

    Returns:
        NaN while that is not known.
    """
    if step >= total:
        return 0.0
    return (total - step) * (now - first[1]) / (step - first[0]) if step > first[0] else math.nan


def plain_line(step: int, total: int, loss: float, lr: float, rate: float, unit: str, left: float) -> str:
    """One line for a log. The columns stay where they are from step to step; `left` is in seconds."""
    return (
        f"step {step:{len(str(total))}}/{total}  loss {_loss(loss):>8}  lr {lr:.2e}  "
        f"{short(rate):>6} {unit}/s  left {duration(left):>8}"
    )


def bar_text(columns: int, loss: float, lr: float, rate: float, unit: str, left: float) -> str:
    """What stands beside the bar; the loss always, the rest as the width allows."""
    if columns < NARROW:
        return f"loss {_loss(loss)} {duration(left)}"
    middle = f"  lr {lr:.2e}" if columns >= 80 else ""
    return f"loss {_loss(loss)}{middle}  {short(rate):>5} {unit}/s  left {duration(left)}"


def _skipped(steps: int) -> str:
    return f"  skipped {steps}" if steps else ""


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 1000 else f"{loss:.2e}"  # nan takes the second and reads nan


def _open_bar(stream: TextIO, total_steps: int, start_step: int) -> _Bar | None:
    """None where a bar would be noise: not a terminal, or one that cannot move its cursor."""
    try:
        terminal = terminal_behind(stream.fileno())
    except (OSError, ValueError, AttributeError):  # a stream without a file under it
        return None
    if terminal is None or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    # prints meanwhile go above the bar, unless they are meant for a file
    return _Bar(stream, terminal, total_steps, start_step, redirect_stdout=terminal_behind(1) == terminal)


class _Bar:
    """rich's bar, drawn from update() alone."""

    def __init__(self, stream: TextIO, terminal: str, total_steps: int, start_step: int, redirect_stdout: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._terminal, self._drawn = terminal, 0.0
        self._console = Console(file=stream, force_terminal=True)
        self._fit()
        steps, bar = TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=None)
        text = TextColumn("{task.fields[text]}", markup=False)
        self._rich = RichProgress(
            steps, bar, text, console=self._console, auto_refresh=False, redirect_stdout=redirect_stdout, expand=True
        )
        self._task = self._rich.add_task("", total=total_steps, completed=start_step, text="before the first step")
        self._rich.start()
        self._console.show_cursor(True)

    def show(self, step: int, loss: float, lr: float, rate: float, unit: str, left: float, skipped: int) -> None:
        self._fit()
        text = bar_text(self._console.width, loss, lr, rate, unit, left) + _skipped(skipped)
        due = time.monotonic() - self._drawn >= REDRAW_S
        self._rich.update(self._task, completed=step, text=text, refresh=due)
        if due:
            self._drawn = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._rich.stop()

    def _fit(self) -> None:
        """The terminal may be resized, and under a launcher rich cannot ask it."""
        with suppress(OSError), open(self._terminal, opener=_without_taking_it) as device:
            self._console.width = os.get_terminal_size(device.fileno()).columns or 80


LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "hydra_pmi_proxy")
# options by which mpirun writes something before each line, or puts it elsewhere
TAGGING = ("-output", "--output", "-tag-output", "--tag-output", "-timestamp-output", "--timestamp-output")
LABELLING = ("-l", "-prepend-rank", "--prepend-rank", "-xterm", "--xterm")


def terminal_behind(descriptor: int) -> str | None:
    """Path of the terminal on which bytes written to a descriptor appear.

    Args:
        descriptor: The descriptor.

    Returns:
        None where they go to a file, a pipe, another node, or through a launcher that marks each line.
    """
    launcher, parent = None, os.getppid()
    while os.path.basename(_command(parent)[0]) in LAUNCHERS:
        launcher, parent = parent, proc.state_and_parent_of(parent)[1]
    if launcher is None or descriptor not in (1, 2):  # the launcher passes on these two
        return os.ttyname(descriptor) if os.isatty(descriptor) else None
    if any(word.startswith(TAGGING) or word in LABELLING for word in _command(launcher)):
        return None
    try:
        # a pipe or a pseudo-terminal leads to the launcher; a file is where somebody redirected the rank itself to
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)):
            return None
        path = os.readlink(f"/proc/{launcher}/fd/{descriptor}")
        with open(path, opener=_without_taking_it) as device:
            return path if device.isatty() else None
    except OSError:  # such as pipe:[123], or not ours to see
        return None


def _without_taking_it(path: str, flags: int) -> int:
    """Open a terminal, which does not become that of this process by being opened."""
    return os.open(path, flags | os.O_NOCTTY)


def _command(process: int) -> list[str]:
    """The process's argument list; [""] where the system does not tell."""
    return proc.read(f"{process}/cmdline").split("\0")
