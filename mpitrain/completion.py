"""Scripts that make a shell complete the command line of `mpitrain`, written by shtab from the commands' own parsers.

The subcommands, options and values of every command are completed, the settings too, and elsewhere names of files.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from mpitrain import early
from mpitrain.config.settings import choices_of, sections
from mpitrain.errors import InputError

_WITH_SETTINGS = ("train", "evaluate", "plan")  # commands that accept --section.key value
_FOLDERS = ("data", "checkpoint", "run")  # commands that are folders, whose module is __main__


def script(shell: str, commands: Mapping[str, str]) -> str:
    """Return the completion script of a shell.

    Args:
        shell: bash, zsh or tcsh.
        commands: Descriptions of the commands, by name.

    Raises:
        InputError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise InputError(
            'completion scripts need the package shtab; pip install shtab, or "mpitrain[completion]"'
        ) from None
    parser = _make_parser(commands)
    _complete_files(parser, shtab.FILE)
    return str(shtab.complete(parser, shell))


def _make_parser(described: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser of all commands with their subcommands, options and settings. It is only read, never run."""
    parser = argparse.ArgumentParser("mpitrain", description="MPI-native training of PyTorch models.")
    parser.add_argument("--version", action="version", version=early.VERSION)
    parser.add_argument("--print-completion", choices=("bash", "zsh", "tcsh"), help="print a script for a shell")
    parser.add_argument("--print-schema", action="store_true", help="print the JSON schema of the configuration")
    commands = parser.add_subparsers()
    for name, about in described.items():
        command = commands.add_parser(
            name, help=about, parents=[_parser_of(name)], add_help=False, conflict_handler="resolve"
        )
        if name in _WITH_SETTINGS:
            _add_settings(command)
    return parser


def _parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, without settings."""
    if name == "train":
        parser = early.rehearsal_parser()
        parser.add_argument("config", type=Path, nargs="?", help="file of settings")
        return parser
    if name == "backend":
        parser = early.Parser(name)
        parser.add_argument("script", type=Path, nargs="*", help="script, and its arguments")
        return parser
    parser = import_module(f"mpitrain.{name}" + (".__main__" if name in _FOLDERS else "")).make_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings")
    for section, settings in sections().items():
        for key, field in settings.items():
            values = [str(value) for value in choices_of(field.annotation)] or None
            description = (field.description or "").replace("%", "%%")
            group.add_argument(f"--{section}.{key}", choices=values, help=description)


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Mark the arguments that are paths, in all subcommands, so that the shell completes names of files there."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.type is Path:
            action.complete = files  # type: ignore[attr-defined]
