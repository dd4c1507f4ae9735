"""Commands on a pseudo-terminal of a given width, and their output."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_terminal(command: list[str], columns: int, executable: str | None = None, **environment: str) -> str:
    """Run a command whose stdin, stdout and stderr are the terminal; return its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUTF8": "1", **environment}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        settings.pop(name, None)
    process = subprocess.Popen(command, executable=executable, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    written = b""
    try:
        while chunk := _read(ours):
            written += chunk
        assert process.wait(timeout=60) == 0, written.decode()
    finally:
        process.kill()
        os.close(ours)
    return written.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux ends a terminal whose last writer has gone with EIO
        return b""


def shown(written: str) -> list[str]:
    """Return the lines visible at the end, without colours; only the escape sequences of a progress bar are known."""
    import re

    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines.extend([""] * (row + 1 - len(lines)))
        elif token.startswith("\x1b"):
            if token == "\x1b[2K":
                lines[row] = ""
            elif re.fullmatch(r"\x1b\[\d*A", token):
                row -= int(token[2:-1] or 1)
            else:
                assert token.endswith("m") or token in ("\x1b[?25l", "\x1b[?25h"), repr(token)
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return lines
