"""`python -m mpitrain.bench NAME [options]`: one of the benchmarks of this folder."""

from __future__ import annotations

import ast
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain import early
from mpitrain.bench.jobs import is_first, launched
from mpitrain.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, MpitrainError

_USAGE = """\
usage: python -m mpitrain.bench NAME [options]
       python -m mpitrain.bench NAME --help
       mpirun -n N python -m mpitrain.bench NAME [options]     at N ranks only; also under srun

Measures mpitrain side by side with its peers on this machine. Started plainly, it starts itself under mpirun at the
rank counts of --ranks. Results (a table, a JSON file, a plot) are written into bench-results/.

benchmarks:
"""

_EXAMPLES = """
examples:
  python -m mpitrain.bench collectives --quick            seconds: does it work here?
  python -m mpitrain.bench collectives                    minutes, on an otherwise idle machine
  python -m mpitrain.bench collectives --tune             find and keep the fastest algorithms for this machine
  python -m mpitrain.bench collectives --device auto      on the memory of an accelerator, by each way of carrying it
  python -m mpitrain.bench data                           loaders side by side, and the share of a step they take
  python -m mpitrain.bench generate                       a minute: tokens a second beside transformers
  python -m mpitrain.bench machine --folder /scratch/me   a minute: machine.toml, from which mpitrain.plan predicts
  python -m mpitrain.bench step --device auto --ranks 1   tokens a second and the share of an accelerator's peak
  python -m mpitrain.bench waiting                        minutes: one slow rank, with servers and without
  python -m mpitrain.bench recording                      a minute: what a step costs that monitor.timeline records
  python -m mpitrain.bench strategies --ranks 4           minutes: one model by DDP, ZeRO, pipeline, tensor and peers
  python -m mpitrain.bench step                           a quarter of an hour, with the memory of each contender
"""


def main(arguments: Sequence[str]) -> int:
    """The command.

    Args:
        arguments: The benchmark's name, and its own arguments.

    Returns:
        The exit code.
    """
    early.answer(arguments[:1], usage)
    if not arguments:
        print(usage())
        return EXIT_BAD_INPUT
    name, rest = arguments[0], list(arguments[1:])
    if name not in names():
        if is_first():
            print(f"mpitrain: there is no benchmark {name!r}; there are {', '.join(names())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if not launched():
        os.environ["MPI4PY_RC_INITIALIZE"] = "0"  # a process that is an MPI job of its own could not start mpirun
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and ends what it started
    try:
        return int(importlib.import_module(f"mpitrain.bench.{name}").main(rest))
    except MpitrainError as error:
        if not launched():
            print(f"mpitrain: {error}", file=sys.stderr)
            return error.exit_code
        raise
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def names() -> list[str]:
    """The benchmarks there are: this folder's modules that define `main`."""
    return sorted(_modules())


def usage() -> str:
    """What --help shows."""
    found = _modules()
    width = max(map(len, found))
    return _USAGE + "".join(f"  {name:{width}}  {found[name]}\n" for name in sorted(found)) + _EXAMPLES.rstrip()


def _modules() -> dict[str, str]:
    """Name and first line of the docstring of each benchmark; read, not imported."""
    found = {}
    for path in Path(__file__).parent.glob("[!_]*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
