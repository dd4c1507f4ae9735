"""Commands in processes of their own that need not import torch: they are forked from one that has.

`python -m mpitrain.train` takes seconds until it reads its arguments, nearly all of them for imports. Here a process
imports torch once, without MPI, and forks a child for each command. From there on the child does what `python -m` does,
with its own arguments, environment, working folder and output. What concerns the start itself (signals during imports,
libraries that are loaded first) is tested with `support.job`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from support import ROOT, clean_environment


class Warm:
    """A process with torch, and its forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(PYTHONPATH=str(ROOT)),
        )

    def run(
        self, name: str, *arguments: object, cwd: Path | None = None, timeout: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """What `python -m mpitrain.NAME ARGUMENTS` says, and its exit code. name: or -c, and code as the argument.

        timeout: seconds, then it is killed.
        """
        words = [name, *map(str, arguments)]
        with tempfile.TemporaryDirectory() as folder:
            told = [words, str(cwd or Path.cwd()), clean_environment(**environment), folder, timeout]
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            out, err = (Path(folder, kind).read_text(errors="replace") for kind in ("out", "err"))
        return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def _become(words: list[str], cwd: str, environment: dict[str, str], folder: str, timeout: float) -> None:
    """The rest of the forked process."""
    for descriptor, path in (0, os.devnull), (1, f"{folder}/out"), (2, f"{folder}/err"):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # found already, in another environment
    given = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = [cwd, *given]
    for place in given:
        if Path(place, "sitecustomize.py").exists():
            runpy.run_path(f"{place}/sitecustomize.py")
    sys.argv = words if words[0] != "-c" else ["-c", *words[2:]]
    signal.alarm(int(timeout))  # whose answer is death
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        runpy.run_module(f"mpitrain.{words[0]}", run_name="__main__", alter_sys=True)
    sys.exit()


def _serve() -> None:
    import h5py  # noqa: F401
    import pydantic  # noqa: F401
    import torch._dynamo  # noqa: F401 - which the first optimizer imports

    import mpitrain.checkpoint
    import mpitrain.config.settings
    import mpitrain.data  # noqa: F401

    assert "mpi4py" not in sys.modules
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            _become(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
