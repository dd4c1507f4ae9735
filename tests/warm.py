"""Commands and ranks in new processes that need not import torch: they are forked from one that has.

`python -m mpitrain.train` takes seconds until it reads its arguments, nearly all of them for imports. Here a process
imports torch once, without MPI, and forks a child for each command. From there on the child does what `python -m` does,
with its own arguments, environment, working folder and output. Under mpirun each rank runs `warm_rank.py` for a Python,
which has such a child do its work, hands signals on to it, and ends as it ends. The child joins the namespaces of who
asked for it, such as a host of `cluster/namespace_hosts.py`. What concerns the start itself (signals during imports,
libraries that are loaded first), or who is whose parent, is tested with `support.job`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import support
from support import PATIENCE, ROOT, clean_environment, launcher

from mpitrain.early import without_collecting

MOST = 1 << 17  # bytes of a request
FORKS = (Path(sys.prefix) / "bin/ompi_info").exists()  # another MPI hands a rank its connection as an open file
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}  # flags of setns(2)


class Warm:
    """Process that has imported torch, and its forks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._place = f"{self._folder.name}/socket"
        self.python = Path(self._folder.name, "python")
        rank = (ROOT / "tests/warm_rank.py").read_text()
        first = f"#!{sys.executable} -S\n"
        if " " in sys.executable:  # the first line cannot hold it; to Python, the second line here is a string
            first = f"#!/bin/sh\n''''exec \"{sys.executable}\" -S \"$0\" \"$@\" # '''\n"
        self.python.write_text(first + rank.replace("PLACE", self._place))
        self.python.chmod(0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._place)
            listener.listen(64)
            command = [sys.executable, str(Path(__file__).resolve()), str(listener.fileno())]
            environment = clean_environment(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
            )

    def run(
        self, name: str, *arguments: object, cwd: Path | None = None, timeout: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m mpitrain.NAME ARGUMENTS`. name: or "benchmarks", or "-c", followed by code.

        timeout: seconds after which it is killed.
        """
        module = name if name == "benchmarks" else f"mpitrain.{name}"
        words = [*(["-c"] if name == "-c" else ["-m", module]), *map(str, arguments)]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as place:
                place.connect(self._place)
                request = [words, str(cwd or Path.cwd()), clean_environment(**environment), timeout * PATIENCE, [], []]
                socket.send_fds(place, [json.dumps(request).encode()], [nothing.fileno(), out.fileno(), err.fileno()])
                place.recv(64)  # its number
                code = int(place.recv(64))
            outputs = [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]
        return subprocess.CompletedProcess(words, code, *outputs)

    def launched(self, ranks: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a Python command on forked ranks."""
        return [*launcher(ranks), *self.replace_python(command)]

    def replace_python(self, command: Sequence[str]) -> list[str]:
        """Return a command whose Python is replaced by one whose work a fork does."""
        assert command[0] == sys.executable, command
        return [str(self.python) if FORKS else command[0], *command[1:]]

    def make_environment(self, folder: Path) -> str:
        """Make a Python environment for batch scripts whose Python is replaced; return its folder, for VENV."""
        if not FORKS:
            return sys.prefix
        commands = folder / "bin"
        commands.mkdir(parents=True)
        (commands / "python").symlink_to(self.python)
        (commands / "activate").write_text(f". {sys.prefix}/bin/activate\nPATH={commands}:$PATH\n")
        return str(folder)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self._folder.cleanup()


@functools.cache
def shared() -> Warm:
    """Return this process' `Warm`, which ends with it."""
    warm = Warm()
    atexit.register(warm.close)
    return warm


def command(
    name: str, *arguments: object, timeout: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m mpitrain.NAME`, which starts ranks itself; the ranks are forked as well."""
    path = f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"  # there mpirun is
    ranks = {"WARM_PYTHON": str(shared().python), "PATH": path} if FORKS else {}
    return shared().run(name, *arguments, timeout=timeout, **ranks, **environment)


def bench(*arguments: object, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks`."""
    return command("benchmarks", *arguments, timeout=timeout, **environment)


def job(
    ranks: int, command: Sequence[str], *, timeout: float = 90, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python command like `support.job`, but with forked ranks."""
    return support.job(0, shared().launched(ranks, command), timeout=timeout, cwd=cwd, **environment)


def _join_namespaces(process: int) -> None:
    """Join the namespaces of a process: its network, its host name and its mounts."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    for kind, flag in _NAMESPACES.items():
        theirs = f"/proc/{process}/ns/{kind}"
        if not os.path.samefile(theirs, f"/proc/self/ns/{kind}"):
            with open(theirs) as file:
                if setns(file.fileno(), flag):
                    raise OSError(ctypes.get_errno(), f"cannot join {theirs}")


def _become(
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    timeout: float,
    cores: list[int],
    blocked: list[int],
    outputs: list[int],
) -> None:
    """Run the command in the forked process, and exit."""
    for descriptor, output_descriptor in enumerate(outputs):
        os.dup2(output_descriptor, descriptor)
        os.close(output_descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # found already, in another environment
    del sys.modules["support"]  # which read the rank there
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    sys.executable = environment.get("WARM_PYTHON", sys.executable)
    if cores:
        os.sched_setaffinity(0, cores)
    if words[0] == "-":  # the code comes on standard input
        words = ["-c", sys.stdin.read(), *words[1:]]
    kind, name, *arguments = words if words[0].startswith("-") else ["", *words]
    first = cwd if kind else str(Path(cwd, name).parent)
    python_path = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = [first, *python_path]
    for place in python_path:
        if Path(place, "sitecustomize.py").exists():
            runpy.run_path(f"{place}/sitecustomize.py")
    sys.argv = [kind or name, *arguments]
    signal.alarm(int(timeout))  # whose answer is death
    if kind == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")
    sys.exit()


def _import_packages() -> None:
    import h5py  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401 - which some optimizers import

    import mpitrain.checkpoint
    import mpitrain.config.settings
    import mpitrain.data  # noqa: F401

    with suppress(ImportError):
        from transformers import AutoModelForCausalLM  # noqa: F401
    assert "mpi4py" not in sys.modules


def _serve(listener: socket.socket) -> None:
    with without_collecting():
        _import_packages()
    places = selectors.DefaultSelector()
    places.register(listener, selectors.EVENT_READ)
    places.register(sys.stdin, selectors.EVENT_READ)
    while True:
        key, _ = places.select()[0]
        if key.fileobj is sys.stdin:  # who started this has ended
            return
        if key.fileobj is listener:
            asking, _ = listener.accept()
            child = _fork(asking)
            _answer(asking, child)
            places.register(os.pidfd_open(child), selectors.EVENT_READ, (asking, child))
            places.register(asking, selectors.EVENT_READ, (asking, child))
            continue
        asking, child = key.data
        if key.fileobj is asking:  # who asked is dead
            places.unregister(asking)
            os.kill(child, signal.SIGKILL)
            continue
        _answer(asking, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        places.unregister(key.fd)
        os.close(key.fd)
        if asking in places.get_map():
            places.unregister(asking)
        asking.close()


def _fork(asking: socket.socket) -> int:
    """Fork a process that runs the requested command; return its process id."""
    request, outputs, _, _ = socket.recv_fds(asking, MOST, 3)
    child = os.fork()
    if child == 0:
        process, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        asking.close()
        _join_namespaces(process)
        _become(*json.loads(request), outputs)
    for descriptor in outputs:
        os.close(descriptor)
    return child


def _answer(asking: socket.socket, number: int) -> None:
    with suppress(OSError):  # who asked is dead
        asking.send(str(number).encode())


if __name__ == "__main__":
    if len(sys.argv) == 1:  # for a shell, which reads the path of the Python that is forked, and closes this input
        print(shared().python, flush=True)
        sys.stdin.read()
        sys.exit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
