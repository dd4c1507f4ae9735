import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support import one_line

from mpitrain.data.__main__ import main
from mpitrain.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tokens_set(tmp_path):
    """Return a maker of data sets of bytes 0 1 2 ... (modulo 251) in shards of `shard` bytes: (folder, bytes)."""

    def make(size, shard=1 << 20, held_out=0.0, name="tokens"):
        content = (np.arange(size) % 251 + 1).astype(np.uint8)
        source = tmp_path / f"{name}.txt"
        source.write_bytes(content.tobytes())
        folder = tmp_path / name
        prepare([str(source)], folder, held_out=held_out, shard_bytes=shard)
        return folder, content

    return make


@pytest.fixture
def arrays_set(tmp_path):
    """Return a function that makes a data set of the arrays x and y and returns its folder."""

    def make(x, y, name="arrays", **how):
        source = tmp_path / f"{name}-source"
        source.mkdir()
        np.save(source / "x.npy", x)
        np.save(source / "y.npy", y)
        folder = tmp_path / name
        prepare([str(source)], folder, **{"held_out": 0.0, **how})
        return folder

    return make


@pytest.fixture
def command(capsys):
    """Return a function that runs `python -m mpitrain.data ...` in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:  # argparse
            code = left.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(command, tmp_path):
    """Return a function that runs `prepare` on bad input, checks that no file is left, and returns the error line."""

    def run(*arguments, out=None):
        target = out or tmp_path / "refused"
        code, _, message = command("prepare", *arguments, "--out", target)
        refusal = one_line((code, message))
        if out is None:
            assert not [path for path in tmp_path.iterdir() if "refused" in path.name]
        return refusal

    return run


@pytest.fixture
def python():
    """Return a function that starts Python on a piece of code in a new process."""

    def start(code, *arguments, **how):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **how,
        )

    return start


@pytest.fixture
def open_folder():
    """Return a folder that any user may enter, unlike tmp_path."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)
