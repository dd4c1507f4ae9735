"""One validated configuration: a TOML file, then `--section.key value` arguments over it.

Each setting is declared once, in `run.py`, `training.py` or `parallel.py`, with its type, default, sentence and range;
names to choose among come from `mpitrain.choices`. An unknown key is an error that suggests the nearest name; nothing
is ignored in silence. Neither torch nor MPI is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import ValidationError, model_validator

from mpitrain import early
from mpitrain.config.messages import (
    COMMAND_LINE,
    Say,
    by_our_names,
    check_names,
    not_a_key,
    our_name,
    renamed,
    unknown,
    wrong_value,
)
from mpitrain.config.parallel import CommSection, ParallelSection
from mpitrain.config.preset import completed, defaults_by_model
from mpitrain.config.run import CheckpointSection, DataSection, ElasticSection, MonitorSection, RunSection
from mpitrain.config.section import Section, Sections
from mpitrain.config.toml_file import read_toml, toml_value
from mpitrain.config.training import INSTEAD, ModelSection, OptimSection, TrainSection
from mpitrain.errors import refusal


class Config(Section):
    """The whole configuration of a run. Attributes are the TOML sections."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    monitor: MonitorSection = MonitorSection()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        return completed(values) if isinstance(values, Mapping) else values

    @staticmethod
    def of(given: Given) -> Config:
        """Return settings as a caller may give them. Raises InputError where they are wrong."""
        if isinstance(given, Config):
            return given
        if callable(given):
            return Config.of(given())
        return Config.from_args([str(given)]) if isinstance(given, (str, Path)) else Config.from_dict(given or {})

    @staticmethod
    def from_dict(values: Mapping[str, Any], origin: str = "config", say: Say = early.say) -> Config:
        """Check nested values ({"train": {"steps": 10}}).

        Args:
            values: The settings; names of other tools that mean the same are accepted.
            origin: Name of the source, for messages.
            say: Called with a line for each such name.

        Raises:
            InputError: A key or a value is wrong; the message names it and the mend.
        """
        values = by_our_names(values, sections(), origin, say)
        check_names(values, sections(), origin)
        return _checked(values, {}, origin)

    @staticmethod
    def from_args(arguments: Sequence[str], say: Say = early.say) -> Config:
        """Read a command line, `[FILE.toml] [--section.key value | --section.key=value]...`.

        Flags win over the file, and later flags over earlier ones, wherever the file is named: --train.epochs over
        train.steps as well.

        Args:
            arguments: Words of the command line.
            say: Called with a line for each name of other tools that was accepted.

        Raises:
            InputError: As `from_dict`, or the file cannot be read.
        """
        file, given = parse(arguments, say)
        values = {} if file is None else by_our_names(read_toml(file), sections(), file, say)
        check_names(values, sections(), file or COMMAND_LINE)
        for key, other, _ in INSTEAD:
            if (flagged := {key, other} & given.get("train", {}).keys()) and "train" in values:
                for each in {key, other} - flagged:
                    values["train"].pop(each, None)
        for section, keys in given.items():
            values.setdefault(section, {}).update(keys)
        by_flags = {f"{section}.{key}": COMMAND_LINE for section, keys in given.items() for key in keys}
        return _checked(values, by_flags, file or COMMAND_LINE)

    def to_toml(self) -> str:
        """All settings as the text of a TOML file that reads back as this configuration."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as nested values that read back as this configuration.

        Without train.steps where it follows from train.epochs, and likewise without train.microbatch.
        """
        values = self.model_dump()
        for key, other, _ in INSTEAD:
            if values["train"][key]:
                del values["train"][other]
        return values


# settings, nested values of them, the path of a TOML file, a function that returns one of these, or nothing
Given: TypeAlias = Config | Mapping[str, Any] | str | Path | Callable[[], Any] | None


def sections() -> Sections:
    """Every setting there is, by section and key."""
    return {name: field.annotation.model_fields for name, field in Config.model_fields.items()}  # type: ignore[union-attr]


def parse(arguments: Sequence[str], say: Say = early.say) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """Take a command line apart: `[FILE.toml] [--section.key value | --section.key=value]...`, in any order.

    Args:
        arguments: Words of the command line.
        say: Called with a line for each name of other tools that was accepted.

    Returns:
        (the configuration file, if one is named; {section: {key: value}} of the flags, of which later ones win).

    Raises:
        InputError: A flag is unknown or lacks its value, or several files are named.
    """
    file: str | None = None
    values: dict[str, dict[str, Any]] = {}
    words, known = list(arguments), sections()
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            _require_no_setting(word, known)
            if file is not None:
                raise refusal(f"{COMMAND_LINE}: {file} and {word} are two configuration files; give one")
            file = word
            continue
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--") or not name:
            raise refusal(f"argument {word!r} is not understood; write --section.key value")
        section, dot, key = name.partition(".")
        if not dot:
            raise (not_a_key if name in known else unknown)(name, known, COMMAND_LINE)
        if (ours := our_name(section, key, known)) != (section, key):
            say(renamed(COMMAND_LINE, name, ".".join(ours)))
            section, key = ours
        check_names({section: {key: None}}, known, COMMAND_LINE)
        if not equals:
            if not words or words[0].startswith("--"):
                raise refusal(f"--{name} has no value; write --{name} VALUE")
            text = words.pop(0)
        values.setdefault(section, {})[key] = _value(text, known[section][key].annotation)
    return file, values


def help_text(program: str) -> str:
    """Return the --help of a command that takes a whole configuration: usage, and every key with its default."""
    lines = [f"usage: mpirun -n N python -m {program} [CONFIG.toml] [--section.key value]...", "", "keys:"]
    for section, settings in sections().items():
        for key, field in settings.items():
            names = _choices(field.annotation)
            choices = f": {', '.join(map(str, names))}" if names else ""
            default = "none" if field.default in ([], (), {}) else json.dumps(field.default)
            default = "; ".join(filter(None, [default, defaults_by_model(section, key)]))
            lines.append(f"  --{section + '.' + key:24} {field.description}{choices} [{default}]")
    return "\n".join(lines)


def _checked(values: Mapping[str, Any], origin: Mapping[str, str], otherwise: str) -> Config:
    """origin: where single keys come from, by section.key. otherwise: where all others do."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise wrong_value(error, origin, otherwise) from None


def _require_no_setting(word: str, known: Sections) -> None:
    """Raise InputError for train.steps=5, a setting that lacks its dashes."""
    name, equals, value = word.partition("=")
    section, dot, key = name.partition(".")
    if dot and key in known.get(section, {}):
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
