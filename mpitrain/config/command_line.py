"""Reading a command line: `[FILE.toml] [--section.key value | --section.key=value]...`, in any order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from mpitrain import early
from mpitrain.config import by_model
from mpitrain.config.aliases import Say, our_name, renamed
from mpitrain.config.messages import COMMAND_LINE, check_names, not_a_key, unknown
from mpitrain.config.section import Sections
from mpitrain.config.toml_file import toml_value
from mpitrain.errors import refusal


def parse(
    arguments: Sequence[str], sections: Sections, say: Say = early.say
) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """Take a command line apart.

    Args:
        arguments: Words of the command line.
        sections: All settings.
        say: Called with a line for each name of other tools that was accepted.

    Returns:
        (the configuration file, if one is named; {section: {key: value}} of the flags, of which later ones win).

    Raises:
        InputError: A flag is unknown or lacks its value, or several files are named.
    """
    file: str | None = None
    values: dict[str, dict[str, Any]] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            _require_no_setting(word, sections)
            if file is not None:
                raise refusal(f"{COMMAND_LINE}: {file} and {word} are two configuration files; give one")
            file = word
            continue
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--") or not name:
            raise refusal(f"argument {word!r} is not understood; write --section.key value")
        section, dot, key = name.partition(".")
        if not dot:
            raise (not_a_key if name in sections else unknown)(name, sections, COMMAND_LINE)
        if (ours := our_name(section, key, sections)) != (section, key):
            say(renamed(COMMAND_LINE, name, ".".join(ours)))
            section, key = ours
        check_names({section: {key: None}}, sections, COMMAND_LINE)
        if not equals:
            if not words or words[0].startswith("--"):
                raise refusal(f"--{name} has no value; write --{name} VALUE")
            text = words.pop(0)
        values.setdefault(section, {})[key] = _value(text, sections[section][key].annotation)
    return file, values


def help_text(program: str, sections: Sections) -> str:
    """What --help prints: usage, and every key with its meaning, its choices and its default."""
    lines = [f"usage: mpirun -n N python -m {program} [CONFIG.toml] [--section.key value]...", "", "keys:"]
    for section, settings in sections.items():
        for key, field in settings.items():
            names = _choices(field.annotation)
            choices = f": {', '.join(map(str, names))}" if names else ""
            default = "none" if field.default in ([], (), {}) else json.dumps(field.default)
            default = "; ".join(filter(None, [default, by_model.told(section, key)]))
            lines.append(f"  --{section + '.' + key:24} {field.description}{choices} [{default}]")
    return "\n".join(lines)


def _require_no_setting(word: str, sections: Sections) -> None:
    """Raise InputError for train.steps=5, a setting that lacks its dashes."""
    name, equals, value = word.partition("=")
    section, dot, key = name.partition(".")
    if dot and key in sections.get(section, {}):
        raise refusal(f"{COMMAND_LINE}: {word} lacks its dashes; write --{name} {value if equals else 'VALUE'}")


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The names that a setting chooses among, where there are several; also beside something of one's own."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    several = [found for member in get_args(annotation) if len(found := _choices(member)) > 1]
    return several[0] if several else ()


def _value(text: str, annotation: Any) -> Any:
    """The TOML or JSON value the text spells, else, or where text is wanted, the text itself."""
    if annotation is str:
        return text
    for read in (toml_value, json.loads):
        try:
            return read(text)
        except (ValueError, RecursionError):
            continue
    return text
