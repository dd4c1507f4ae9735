"""The command `mpitrain`: `mpitrain train ARGUMENTS` does the same as `python -m mpitrain.train ARGUMENTS`.

It imports no package outside the standard library before it knows which command to run, because each rank of a job
starts with it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from mpitrain import early
from mpitrain.errors import EXIT_BAD_INPUT, EXIT_DONE, echo, exit_code_of

COMMANDS = {
    "train": "train a model; under mpirun or srun, on all ranks",
    "evaluate": "compute the metrics of a checkpoint",
    "generate": "generate text with a trained model",
    "predict": "compute the predictions of a trained model for samples",
    "data": "make and describe data sets",
    "checkpoint": "list, verify, compare, export and import checkpoints",
    "adapters": "export adapters trained with model.lora",
    "report": "show what a run did or does, as text or charts",
    "plan": "find the fastest layout for a number of nodes",
    "doctor": "check the MPI installation and the nodes",
    "run": "train by an unchanged script written for one process; under mpirun or srun, on all ranks",
    "backend": "run a script written for torchrun over MPI",
    "jobs": "copy the job scripts for Slurm or PBS into this folder",
}
_SHELLS = ("bash", "zsh", "tcsh")
_USAGE = f"""\
usage: mpitrain COMMAND [ARGUMENTS...]

commands (mpitrain COMMAND --help describes each; python -m mpitrain.COMMAND does the same):
{{commands}}

options:
  -h, --help                  show this text
  --version                   show the version
  --print-completion SHELL    print a script that makes a shell complete these commands ({", ".join(_SHELLS)})
  --print-schema              print the JSON schema of the configuration, for editors of TOML files"""


def main() -> int:
    """Run the command line, and return the exit code. A command that runs as a module may exit by itself."""
    early.report_errors(early.missing_package)
    arguments = sys.argv[1:]
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in COMMANDS:
        module = f"mpitrain.{command}"
        sys.argv = ["-m", *rest]  # these three are what `python -m` does
        sys.orig_argv = [sys.executable, "-m", module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return EXIT_DONE
    early.print_help([command], usage)
    if command == "--print-schema" and not rest:
        from mpitrain.config.schema import FILE

        print(FILE.read_text(encoding="utf-8"), end="")
        return EXIT_DONE
    if command == "--print-completion" and len(rest) == 1 and rest[0] in _SHELLS:
        return exit_code_of(lambda: _print_completion(rest[0]))
    early.log(_mistake(command, rest))
    return EXIT_BAD_INPUT


def usage() -> str:
    """Return the text of --help, which lists the commands."""
    width = max(map(len, COMMANDS))
    return _USAGE.format(commands="\n".join(f"  {name:{width}}  {about}" for name, about in COMMANDS.items()))


def _print_completion(shell: str) -> int:
    from mpitrain.completion import script

    echo(script(shell, COMMANDS))
    return EXIT_DONE


def _mistake(command: str, rest: Sequence[str]) -> str:
    """Return the message for a command line that is not understood."""
    if command == "--print-completion":
        return f"--print-completion takes one of {', '.join(_SHELLS)}"
    if command.startswith("-"):
        return f"{' '.join([command, *rest])!r:.200} is not understood; see mpitrain --help"
    import difflib

    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see mpitrain --help for the list"
    return f"there is no command {command!r:.200}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
