"""Examination of HDF5 files in a process of its own, because a damaged file can crash or stall the HDF5 library.

`require_readable` starts `python -m mpitrain.data.sources.examination`, which opens each file as `prepare` will: it
lists the variables, visits all chunks, and reads the first and the last row. If it is killed or does not end, the file
is refused. Errors that the library reports itself are left to `prepare`, which meets them again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.data.sources.variables import list_variables, open_variable, read_rows
from mpitrain.errors import InputError, MpitrainError

_LIMIT, _EACH = 60.0, 5.0  # seconds for all files, and more for each of them


def require_readable(files: Sequence[Path]) -> None:
    """Raise InputError for a file that crashes the HDF5 library, or that it never finishes to read.

    Args:
        files: HDF5 and NetCDF files.
    """
    names = json.dumps([str(path.resolve()) for path in files])
    command = [sys.executable, "-m", "mpitrain.data.sources.examination"]
    try:
        limit = _LIMIT + _EACH * len(files)
        done = subprocess.run(command, input=names, capture_output=True, text=True, errors="replace", timeout=limit)
        seen, failed, problem = done.stdout, done.returncode < 0, "crashes the HDF5 library"
    except subprocess.TimeoutExpired as ended:
        seen, failed = (ended.stdout or b"").decode(errors="replace"), True
        problem = f"was not read by the HDF5 library within {limit:.0f} s"
    if failed:
        path = files[min(seen.count("\n"), len(files) - 1)]
        raise InputError(f"source {path} is damaged: it {problem}; restore it")


def main() -> None:
    """Examine the files whose names come as JSON on standard input, and print a line after each."""
    for name in json.load(sys.stdin):
        with suppress(MpitrainError):
            for variable in list_variables(Path(name)).values():
                with suppress(Exception):  # of numbers that `prepare` perhaps never reads
                    dataset = open_variable(variable)
                    if variable.chunk:
                        dataset.id.chunk_iter(lambda info: None)
                    for row in (0, variable.shape[0] - 1) if variable.shape else ():
                        read_rows(dataset, 0, row, row + 1)
        print(flush=True)


if __name__ == "__main__":
    main()
