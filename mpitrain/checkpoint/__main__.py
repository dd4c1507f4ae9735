"""`python -m mpitrain.checkpoint ls | show | verify | diff | export | import | prune`, which runs without MPI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mpitrain.checkpoint import contents, convert, folders
from mpitrain.checkpoint.manifest import was_finite
from mpitrain.early import VERSION
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, InputError, echo, exit_code_of
from mpitrain.storage import locks
from mpitrain.storage.run_folder import CONFIG
from mpitrain.storage.text import counted


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = make_parser()
    arguments, settings = parser.parse_known_args(argv)
    if settings and arguments.act is not _import:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    arguments.settings = settings
    return exit_code_of(lambda: arguments.act(arguments) or EXIT_DONE)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain.checkpoint",
        description="inspect, verify and convert checkpoints. PATH is one step-... folder, or a run folder, of "
        "which the newest complete checkpoint is used.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, act: Callable[[argparse.Namespace], int | None], text: str, **paths: str
    ) -> argparse.ArgumentParser:
        """Declare a subcommand, and return its parser.

        Args:
            name: Name of the subcommand.
            act: Function that runs it; it returns the exit code, or None for success.
            text: Description in the help.
            paths: Name of each path argument, mapped to its name in the help.
        """
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.set_defaults(act=act)
        for path, shown in paths.items():
            subparser.add_argument(path, type=Path, metavar=shown)
        return subparser

    command("ls", lambda args: echo(*contents.listing(args.path)), "list the checkpoints of a run", path="PATH")
    show = command("show", _show, "show the contents of a checkpoint", path="PATH")
    show.add_argument(
        "--tensors", default="*", metavar="PATTERN", help="show only these names, such as 'model/*weight' [*]"
    )
    verify = command("verify", _verify, "check all hashes; if any place is damaged, print it and exit with code 1")
    verify.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a run folder to verify all")
    command("diff", _diff, "compare two checkpoints; exit code 1 if they are not bitwise the same", a="PATH", b="PATH")
    out = "write the model's weights to a .safetensors or .pt (torch.load) file, or to a Hugging Face folder"
    give = command("export", _export, out, path="PATH", out="OUT")
    give.add_argument("--shard-size", default="5GB", metavar="SIZE", help="largest file with --format hf [5GB]")
    of_weights = "make a checkpoint of step 0 from weights in a .safetensors or torch.save file, or in a Hugging "
    of_weights += "Face folder; further arguments are settings as for mpitrain.train, which must match the weights"
    take = command("import", _import, of_weights, file="SOURCE")
    take.add_argument("run", type=Path, metavar="RUN", help="new run folder; then train with --run.dir RUN")
    for each in (give, take):
        each.add_argument(
            "--format",
            choices=["file", "hf"],
            default="file",
            help="hf: a folder with config.json, for GPT-2, Llama, Mistral, Qwen2 or Qwen3; export also accepts any "
            "model that was trained with model.factory hf:FOLDER",
        )
    but_newest = "remove all but the newest checkpoints, never the last one that verifies or the best"
    prune = command("prune", _prune, but_newest, path="RUN")
    prune.add_argument("--keep", type=int, required=True, metavar="N")
    return parser


def _show(arguments: argparse.Namespace) -> None:
    echo(*contents.description(contents.resolve(arguments.path), arguments.tensors))


def _verify(arguments: argparse.Namespace) -> int:
    bad = 0
    for folder in folders.require(arguments.path):
        problems = list(contents.damaged_places(folder))
        echo(f"{folder}: {counted(len(problems), 'damaged place') if problems else 'all right'}")
        for problem in problems:
            echo(f"  {problem}")
        bad += bool(problems)
    return EXIT_FAILED if bad else EXIT_DONE


def _diff(arguments: argparse.Namespace) -> int:
    count = 0
    for line in contents.differences(contents.resolve(arguments.a), contents.resolve(arguments.b)):
        echo(line)
        count += 1
    print(f"{counted(count, 'tensor')} not the same" if count else "bitwise the same")
    return EXIT_FAILED if count else EXIT_DONE


def _export(arguments: argparse.Namespace) -> None:
    folder = contents.resolve(arguments.path)
    if arguments.format == "hf":
        from mpitrain.trainer.weights import export_folder

        count = export_folder(folder, arguments.out, arguments.shard_size)
    else:
        count = convert.export(folder, arguments.out)
    echo(f"{arguments.out}: {count} tensors of {folder}")


def _import(arguments: argparse.Namespace) -> None:
    arguments.run.mkdir(parents=True, exist_ok=True)
    with _locked(arguments.run):
        from mpitrain.trainer.weights import import_folder, import_plain

        take = import_folder if arguments.format == "hf" else import_plain
        folder = take(arguments.file, arguments.run, arguments.settings)
    settings = arguments.run / CONFIG
    how = f"python -m mpitrain.train {settings}" if settings.exists() else f"--run.dir {arguments.run}"
    echo(f"{folder}; continue training with {how}")


def _prune(arguments: argparse.Namespace) -> None:
    if arguments.keep < 1:
        raise InputError(f"--keep {arguments.keep} would remove every checkpoint; use 1 or more")
    listed = folders.require(arguments.path)
    root = listed[0].parent
    if listed == [arguments.path]:
        raise InputError(f"{arguments.path} is one checkpoint; give its run folder")

    def finite(step: int) -> bool:
        return was_finite(root / folders.folder_name(step))

    with _locked(*folders.locked_with(root)):
        verified: list[int] = []
        unusable: set[int] = set()
        steps = folders.finished_steps(root)
        for step in steps:
            if any(contents.damaged_places(root / folders.folder_name(step))):
                unusable.add(step)
                continue
            verified.append(step)
            if finite(step):
                break
        if not verified:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {root} passes verification; nothing was removed"
            )
        for step in folders.steps_to_remove(steps, arguments.keep, verified, unusable, finite, folders.best_step(root)):
            name = folders.folder_name(step)
            if folders.is_checkpoint(root / name):
                folders.discard(root / name)
                echo(f"removed {name}")
            else:
                echo(f"kept {name}, which is not a checkpoint")
    left = counted(len(folders.finished_steps(root)), "checkpoint")
    print(f"{left} left; {folders.folder_name(verified[0])} passes verification")


@contextmanager
def _locked(*locked: Path) -> Iterator[None]:
    """Hold the locks of these folders, as a job does. Raises InputError if a job holds one."""
    with ExitStack() as stack:
        for folder in locked:
            try:
                stack.callback(locks.take(folder / locks.LOCK).close)
            except locks.LockHeld:
                raise InputError(f"run folder {folder} is in use by a job; wait until it has ended") from None
        yield


if __name__ == "__main__":
    sys.exit(main())
