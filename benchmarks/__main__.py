"""Command line `python -m benchmarks NAME [options]`, which runs one benchmark of this folder."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain import early
from mpitrain.errors import EXIT_BAD_INPUT
from mpitrain.measuring import self_start

_USAGE = """\
usage: python -m benchmarks NAME [options]
       python -m benchmarks NAME --help
       mpirun -n N python -m benchmarks NAME [options]     with N ranks only; also under srun

Compare mpitrain with other libraries on this machine. Without mpirun, the command starts itself under mpirun with each
number of ranks in --ranks. Results (a table, a JSON file, a plot) are written into bench-results/.

benchmarks:
"""


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code.

    Args:
        arguments: Name of the benchmark, then its options.
    """
    early.print_help(arguments[:1], usage)
    if not arguments:
        print(usage())
        return EXIT_BAD_INPUT
    name, rest = arguments[0], list(arguments[1:])
    modules = _modules()
    if name not in modules:
        if early.is_first_rank():
            print(f"mpitrain: there is no benchmark {name!r}; use one of {', '.join(sorted(modules))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return self_start.run_command(lambda: int(importlib.import_module(modules[name][0]).main(rest)))


def names() -> list[str]:
    """Return the names of all benchmarks: the modules in this folder that define `main`."""
    return sorted(_modules())


def usage() -> str:
    """Return the text of `--help`."""
    modules = _modules()
    width = max(map(len, modules))
    lines = (f"  {name:{width}}  {modules[name][1]}\n" for name in sorted(modules))
    return (_USAGE + "".join(lines)).rstrip()


def _modules() -> dict[str, tuple[str, str]]:
    """Return (module, first line of its docstring) of each benchmark, by name, without importing the modules."""
    modules = {}
    here = Path(__file__).parent
    for path in here.rglob("[!_]*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in tree.body):
            module = ".".join((here.name, *path.relative_to(here).with_suffix("").parts))
            modules[path.stem] = module, (ast.get_docstring(tree) or "").partition("\n")[0]
    return modules


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
