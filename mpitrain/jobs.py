"""`python -m mpitrain.jobs --copy slurm | pbs`: copies of the job scripts, for people who installed with pip.

The scripts are written into the folder jobs/ of the current folder, as in a clone, so that the commands of the
documentation apply: `sbatch jobs/train.sbatch`. A file that exists already is never changed. Needs neither torch nor
MPI.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain.early import Parser
from mpitrain.errors import EXIT_DONE, InputError, echo, exit_code_of

SCRIPTS = Path(__file__).with_name("job_scripts")  # in a clone, a symbolic link to its folder jobs/
_SHARED = ("batch.sh", "shielded")
KINDS = {"slurm": ("train.sbatch", *_SHARED), "pbs": ("train.pbs", *_SHARED)}  # files of each batch system
_SUBMIT = {"slurm": "sbatch jobs/train.sbatch my_config.toml", "pbs": "qsub jobs/train.pbs"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return exit_code_of(lambda: _run(argv))


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("jobs", description="Copy the job scripts of a batch system into jobs/ of the current folder.")
    files = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in KINDS.items())
    parser.add_argument("--copy", choices=list(KINDS), required=True, help=f"batch system ({files})")
    return parser


def _run(argv: Sequence[str] | None) -> int:
    kind = make_parser().parse_args(argv).copy
    for path in copy(kind, Path("jobs")):
        echo(f"wrote {path}")
    echo(f"submit a job from this folder: {_SUBMIT[kind]}; the first lines of the script describe its options")
    return EXIT_DONE


def copy(kind: str, folder: Path) -> list[Path]:
    """Copy the scripts of a batch system into a folder, and return the paths of the files that were written.

    Files with the same content are left as they are.

    Args:
        kind: Name of the batch system, a key of `KINDS`.
        folder: Folder to copy into; it is created if it does not exist.

    Raises:
        InputError: A file with other content exists; nothing was written.
        OSError: The disk refuses an operation.
    """
    contents = {folder / name: (SCRIPTS / name).read_bytes() for name in KINDS[kind]}
    existing = [path for path in contents if os.path.lexists(path)]
    for path in existing:
        if not path.is_file() or path.read_bytes() != contents[path]:
            raise InputError(f"{path} exists already and differs; nothing was copied, so rename it and copy again")
    folder.mkdir(exist_ok=True)
    written = [path for path in contents if path not in existing]
    for path in written:
        with open(path, "xb", opener=_create_executable if contents[path].startswith(b"#!") else None) as file:
            file.write(contents[path])
    return written


def _create_executable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o777)  # less the umask


if __name__ == "__main__":
    sys.exit(main())
