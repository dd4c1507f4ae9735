"""Reading of HDF5, NetCDF and Zarr files in a process of its own, because a damaged file can crash or stall a library.

    prepare     > {"act": "rows", "path": "a.nc", "arguments": ["t2m", 0, [[0, 64], ...]]}     a line of JSON
    process     > {"value": null, "dtype": "<f4", "shape": [64, 8, 16]}               a line of JSON, then the array

`FileReader` starts `python -m mpitrain.data.sources.file_reader`. Where that process dies, the file is refused in one
line; a request that takes more than some seconds of processor time ends it, too.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mpitrain.data.sources.variables import ChunkTable, Variable, chunk_table, list_variables, open_variable, reading
from mpitrain.errors import InputError, MpitrainError
from mpitrain.storage.hdf5 import bytes_of_array

_SECONDS = 60  # of processor time for a request
_OPEN = 32  # variables that the process keeps open
_Answer = tuple[Any, npt.NDArray[Any]]


class FileReader:
    """Reader of variables of user files, for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def variables(self, path: Path) -> dict[str, Variable]:
        """Return the variables of a file by name; see `list_variables`."""
        described, _ = self._ask("variables", path)
        variables = [
            Variable(
                path, name, tuple(dims), tuple(shape), np.dtype(dtype), chunk and tuple(chunk), attributes, problem
            )
            for name, dims, shape, dtype, chunk, attributes, problem in described
        ]
        return {variable.name: variable for variable in variables}

    def rows(self, variable: Variable, axis: int, first: int, stop: int) -> npt.NDArray[Any]:
        """Return a range of an axis of a variable, as stored; that axis comes first in the result.

        Args:
            variable: The variable.
            axis: Axis of the rows.
            first: First row.
            stop: Row after the last one.

        Raises:
            InputError: The file is damaged, or was changed.
        """
        begins = variable.origin or (0,) * len(variable.shape)
        ends = [begin + length for begin, length in zip(begins, variable.shape, strict=True)]
        bounds = list(zip(begins, ends, strict=True))
        bounds[axis] = (begins[axis] + first, begins[axis] + stop)
        _, values = self._ask("rows", variable.path, variable.name, axis, bounds)
        shape = (stop - first, *variable.shape[:axis], *variable.shape[axis + 1 :])
        if values.shape != shape or values.dtype != variable.dtype:
            raise InputError(f"{variable.label} was changed while it was read; prepare it again")
        return values

    def chunk_table(self, variable: Variable) -> ChunkTable:
        """Return the place of the chunks of a variable; see `chunk_table`."""
        (chunk, filters), places = self._ask("chunk_table", variable.path, variable.name)
        return ChunkTable(tuple(chunk), filters and tuple(filters), places)

    def _ask(self, act: str, path: Path, *arguments: Any) -> _Answer:
        if self._process is None:
            command = [sys.executable, "-m", "mpitrain.data.sources.file_reader"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
            weakref.finalize(self, _end, self._process)
        process = self._process
        assert process is not None and process.stdin and process.stdout
        try:
            question = {"act": act, "path": str(path), "arguments": arguments}
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if "error" in answer:
                raise InputError(answer["error"])
            values = np.empty(answer["shape"], np.dtype(answer["dtype"]))
            if cast(BufferedReader, process.stdout).readinto(bytes_of_array(values)) != values.nbytes:
                raise BrokenPipeError
            return answer["value"], values
        except (BrokenPipeError, ValueError):
            self._process = None  # a later request starts another one
            stalled = process.wait() == -signal.SIGXCPU
            what = f"is busy for {_SECONDS} s" if stalled else "crashes"
            raise InputError(f"source {path} is damaged: the library that reads it {what}; restore it") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin and process.stdout
    with suppress(OSError):
        process.stdin.close()  # at which it ends
    process.stdout.close()
    process.wait()


class _Files:
    """Acts of the process, by their names in requests."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Path, str], Any] = OrderedDict()

    def variables(self, path: Path) -> _Answer:
        each = list_variables(path).values()
        return [(v.name, v.dimensions, v.shape, v.dtype.str, v.chunk, v.attributes, v.problem) for v in each], np.empty(
            0
        )

    def chunk_table(self, path: Path, name: str) -> _Answer:
        table = chunk_table(path, name)
        return (table.chunk, table.filters), table.places

    def rows(self, path: Path, name: str, axis: int, bounds: list[list[int]]) -> _Answer:
        array = self._open.pop((path, name), None)
        array = self._open[path, name] = open_variable(path, name) if array is None else array
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)
        with reading(path):
            values = np.asarray(array[tuple(slice(*each) for each in bounds)])
        return None, np.ascontiguousarray(np.moveaxis(values, axis, 0))


def main() -> None:
    """Answer the requests on standard input until its end."""
    files, hard = _Files(), resource.getrlimit(resource.RLIMIT_CPU)[1]
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints must not mix with the answers
        for line in sys.stdin:
            request = json.loads(line)
            soon = math.ceil(time.process_time()) + _SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (soon if hard == resource.RLIM_INFINITY else min(soon, hard), hard))
            try:
                value, array = getattr(files, request["act"])(Path(request["path"]), *request["arguments"])
                answer = {"value": value, "dtype": array.dtype.str, "shape": array.shape}
            except MpitrainError as error:
                array, answer = np.empty(0), {"error": str(error)}
            answers.write(json.dumps(answer).encode() + b"\n" + bytes_of_array(array))
            answers.flush()


if __name__ == "__main__":
    main()
