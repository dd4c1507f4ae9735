"""The fenced blocks of README.md, CONTRIBUTING.md and docs/, and how the tests run them.

The blocks of a page are run unchanged and in order, in one folder for the page. Exceptions are marked by an HTML
comment right above the block, which no reader sees:

    <!-- test: skip because REASON -->     not run, because it needs a cluster for instance; its syntax is checked
    <!-- test: quick -->                   independent of the page and fast: run in the ordinary suite
    <!-- test: with NAME -->               a function of `setups.py` prepares its folder
    <!-- test: add --train.steps 4 -->     the words are appended to each of its training commands

A block that begins with a comment such as `# NAME.py` or `# NAME.toml` is written into that file. A comment such as
`# NAME.py: mpirun -n 2 python NAME.py` also runs the command. ```bash has commands, ```text has their output; in
```console the lines after a `$` are run, and the others are their output.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import warm
from support import ROOT, clean_environment, launcher

LIMIT, OF_A_START = 400, 120  # seconds of a block, and of ranks in it
_FENCE = re.compile(r"^```(\S*)(?: .*)?$")
_MARK = re.compile(r"^<!-- test: (skip|quick|with|add)(?: (.*?))? -->$")
_NAMED = re.compile(r"^# ([\w.-]+\.(?:py|toml|json|sh|sbatch))(?:: (.*))?$")
_TRAIN = re.compile(r"-m mpitrain\.train|^mpitrain train| mpitrain train")
_CONSOLE = re.compile(r"(?<![^ ])mpitrain (?=[a-z])")


@dataclass(frozen=True)
class Snippet:
    """A fenced block. skip: why it is not run. quick, setups, added: its marks. line: of its fence, counted from 1."""

    page: Path
    line: int
    language: str
    text: str
    skip: str = ""
    quick: bool = False
    setups: tuple[str, ...] = ()
    added: str = ""

    def __repr__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> tuple[str, str]:
        """(name of the file to write the block to, command to run afterwards); empty strings where there is none."""
        match = _NAMED.match(self.text.partition("\n")[0])
        return (match[1], match[2] or "") if match else ("", "")

    @property
    def script(self) -> str:
        """Shell script that runs the block; empty for a block that is not run."""
        name, command = self.file
        if name:
            return self.lengthened(command)
        if self.language in ("bash", "console"):
            return self.lengthened(self.shell)
        return f"python - <<'END_OF_BLOCK'\n{self.text}\nEND_OF_BLOCK" if self.language == "python" else ""

    @property
    def shell(self) -> str:
        """The block's shell commands, without their output."""
        if self.language == "console":
            return "\n".join(line[2:] for line in joined(self.text) if line.startswith("$ "))
        return self.file[1] if self.file[0] else self.text if self.language == "bash" else ""

    def lengthened(self, text: str) -> str:
        """Return commands, with the block's added arguments appended to each training command."""
        if not self.added:
            return text
        lines = []
        for line in joined(text):
            command, gap, comment = without_comment(line)
            lines.append(f"{command} {self.added}{gap}{comment}" if _TRAIN.search(command) else line)
        return "\n".join(lines)


def pages() -> list[Path]:
    """Return every page that people read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path) -> Iterator[Snippet]:
    """Return the fenced blocks of a page in order. Raises ValueError for an unknown mark, or one above no block."""
    lines = page.read_text(encoding="utf-8").splitlines()
    marks: list[re.Match[str]] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        if line.startswith("<!-- test"):
            mark = _MARK.match(line)
            if mark is None or (mark[1] == "skip" and not (mark[2] or "").startswith("because ")):
                raise ValueError(f"{page.name}:{number + 1}: {line} is no mark; see tests/docs/snippets.py")
            marks.append(mark)
        elif fence := _FENCE.match(line):
            end = lines.index("```", number + 1)
            yield _make(page, number, fence[1], "\n".join(lines[number + 1 : end]), marks)
            number, marks = end, []
        elif marks and line.strip():
            raise ValueError(f"{page.name}:{number + 1}: a mark stands above no block")
        number += 1


def _make(page: Path, number: int, language: str, text: str, marks: list[re.Match[str]]) -> Snippet:
    arguments = {kind: [m[2] or "" for m in marks if m[1] == kind] for kind in ("skip", "quick", "with", "add")}
    return Snippet(
        page,
        number + 1,
        language,
        text,
        skip="".join(arguments["skip"]),
        quick=bool(arguments["quick"]),
        setups=tuple(arguments["with"]),
        added=" ".join(arguments["add"]),
    )


def joined(text: str) -> list[str]:
    """Return the lines of a shell script, joining each that ends with a backslash to the next."""
    return text.replace("\\\n", " ").splitlines()


def without_comment(line: str) -> tuple[str, str, str]:
    """Return (command, space, comment) of a line."""
    match = re.match(r"^(.*?)(\s*)((?:(?<=\s)#.*|^#.*)?)$", line)
    assert match is not None
    return match[1], match[2], match[3]


def commands(snippet: Snippet) -> Iterator[tuple[str, list[str]]]:
    """Yield (module, arguments) for each `python -m mpitrain.X` and `mpitrain X` in a block's shell commands."""
    for line in joined(snippet.shell):
        line = _CONSOLE.sub(r"python -m mpitrain.", line)
        if "-m mpitrain." not in line:
            continue
        words = shlex.split(without_comment(line)[0])
        at = next(i for i, word in enumerate(words) if word.startswith("mpitrain.") and words[i - 1] == "-m")
        stop = next(
            (i for i, word in enumerate(words) if i > at and word in ("|", "||", ">", ">>", "&&", "&", ";")), len(words)
        )
        yield words[at], words[at + 1 : stop]


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a folder; each command must succeed, and ranks may share cores."""
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    for name in ("mpirun", "mpiexec"):
        words = [*launcher(1)[:-2], '"$@"']
        (tools / name).write_text(f"#!/bin/sh\nexec timeout {OF_A_START} {' '.join(words)}\n")
        (tools / name).chmod(0o755)
    (tools / "mpitrain").write_text('#!/bin/sh\nexec python -m mpitrain "$@"\n')  # what the installed script does
    (tools / "mpitrain").chmod(0o755)
    if warm.FORKS and not (tools / "python").exists():
        (tools / "python").symlink_to(warm.shared().python)  # which need not import torch
    path = os.pathsep.join([str(tools), str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    return subprocess.run(
        ["timeout", "-k", "5", str(LIMIT), "bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=clean_environment(PATH=path, PYTHONPATH=str(ROOT)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
