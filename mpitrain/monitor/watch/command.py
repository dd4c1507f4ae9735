"""`python -m mpitrain.report --watch RUN`: a live view of a run, from its files alone.

The run may go on elsewhere, on a shared file system, or be in the queue still. The view ends when the run does, with
its exit code; a job that was killed, or is silent, may go on or be started again, and is waited for.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError, printable
from mpitrain.monitor.watch.view import clock, frame, line
from mpitrain.monitor.watch.watched import EXIT_CODES, RunStatus, Watched

_EVERY = 1.0  # seconds between looks at metrics and events
_RANKS_EVERY = 5.0  # seconds between looks at the files of ranks, which are many
_TELL_EVERY = 10.0  # seconds between lines on a pipe


def run(folder: Path, *, once: bool = False) -> int:
    """Show a run until it ends, or Ctrl-C is pressed. On a terminal a frame, redrawn; elsewhere a line now and then.

    Args:
        folder: The run folder, which need not be there yet.
        once: Whether to show one frame and return.

    Returns:
        The run's exit code: 0 where it is done, 75 where it stopped and can go on, 1 where it failed. 0 after Ctrl-C.
        With `once` also 0 where it goes on, and 1 where it was killed.

    Raises:
        InputError: The path is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run folder {folder} is a file; give the folder of a run, such as {folder.parent}")
    watched, console = Watched(folder), Console(highlight=False)
    try:
        if once:
            watched.look()
            console.print(frame(watched, console.width, plain=_plain(console)))
        elif console.is_terminal and not console.is_dumb_terminal:
            _redraw(watched, console)
        else:
            _tell(watched)
    except KeyboardInterrupt:
        return EXIT_DONE
    except BrokenPipeError:  # nobody reads on; Python is not to say so when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    status = watched.status()
    return EXIT_CODES.get(status, EXIT_FAILED if status is RunStatus.KILLED else EXIT_DONE)


def _redraw(watched: Watched, console: Console) -> None:
    """Frames on a screen of their own, which is left with the last one on the usual screen."""
    plain = _plain(console)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for _ in _looks(watched):
                live.update(frame(watched, console.width, plain=plain), refresh=True)
    finally:
        console.print(frame(watched, console.width, plain=plain))


def _tell(watched: Watched) -> None:
    told, status, step = float("-inf"), None, -1
    gone = select.poll()
    gone.register(sys.stdout.fileno(), 0)  # a pipe that nobody reads on is an error, which is told without being asked
    for _ in _looks(watched):
        if gone.poll(0):
            return
        news = [text for event in watched.news if (text := _told(event))]
        watched.news.clear()
        for text in news:
            print(text, flush=True)
        now = time.monotonic()
        if watched.status() is not status or (watched.step != step and now - told >= _TELL_EVERY):
            told, status, step = now, watched.status(), watched.step
            print(line(watched), flush=True)


def _looks(watched: Watched) -> Iterator[None]:
    """Look at the run again and again, until it has ended."""
    looked = float("-inf")
    while True:
        more = time.monotonic() - looked >= _RANKS_EVERY
        looked = time.monotonic() if more else looked
        watched.look(more=more)
        ended = watched.status() in EXIT_CODES
        if ended and not more:
            watched.look()
        yield
        if ended:
            return
        time.sleep(_EVERY)


def _told(event: dict[str, Any]) -> str:
    """A line for an event that happens seldom; empty for others."""
    texts = {
        "start": f"started at step {event['step']} with {event.get('ranks')} ranks",
        "lost": f"ranks {printable(event.get('ranks'))} died before step {event['step']}; training goes on",
    }
    text = texts.get(event["event"], "")
    return f"{clock(event['time'])} {text}" if text else ""


def _plain(console: Console) -> bool:
    """Whether the terminal shows ASCII alone."""
    return not console.encoding.lower().startswith("utf")
