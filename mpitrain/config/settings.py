"""One validated configuration: a TOML file, then `--section.key value` arguments over it.

Each setting is declared once, in `run.py`, `training.py` or `parallel.py`, with its type, default, sentence and range;
names to choose among come from `mpitrain.choices`. An unknown key is an error that suggests the nearest name; nothing
is ignored in silence. Neither torch nor MPI is loaded.

An alias counts in the section of its setting and in [train], where other tools have all of their settings. A name whose
meaning differs, such as a batch size per device, is no alias: an error has a hint for it. A setting that is gone is
passed over where it asked for nothing: the settings of earlier runs name all that there were.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import ValidationError, model_validator

from mpitrain import early
from mpitrain.config.parallel import CommSection, ParallelSection
from mpitrain.config.preset import completed, defaults_by_model
from mpitrain.config.run import CheckpointSection, DataSection, ElasticSection, MonitorSection, RunSection
from mpitrain.config.section import Section, Sections, declared, other_names
from mpitrain.config.toml_file import read_toml, toml_value
from mpitrain.config.training import INSTEAD, ModelSection, OptimSection, TrainSection
from mpitrain.errors import InputError, refusal

COMMAND_LINE = "command line"
_NEAR = 0.6  # of a section's name
_OWN_SECTION = 0.1  # how much likelier a key of the same section is meant than one spelled alike elsewhere
_SHOWN = 3  # keys in one answer
_LONGEST = 100  # characters of a name that are compared
_SPELLED = {
    "dict_type": '; write {a = 1} or {"a": 1}',
    "list_type": "; write [{a = 1}]",
    "tuple_type": '; write ["a", "b"]',
}  # what is no text
# names of other tools whose meaning differs from that of the setting nearest to them
_DIFFERENT = {
    "batch_size": "train.batch counts the samples of all ranks together, train.microbatch those of one rank at a time",
    "per_device_train_batch_size": "train.batch is the global batch, over all ranks and microbatches",
    "per_device_batch_size": "train.batch is the global batch, over all ranks and microbatches",
    "warmup_ratio": "optim.warmup counts steps",
    "dtype": "its values are fp32, bf16 and fp16",
    **dict.fromkeys(("amp", "use_amp", "autocast", "mixed_precision", "fp16", "bf16"), "set it to bf16 or fp16"),
}
# settings of earlier versions: their value where nothing was asked for, as older files have it, and what replaces them
REMOVED = {"parallel.recording": ("", "monitor.timeline records the same actions")}


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
    def from_dict(values: Mapping[str, Any], origin: str = "config") -> Config:
        """Check nested values ({"train": {"steps": 10}}).

        Args:
            values: The settings; names of other tools that mean the same are accepted, and a line says each.
            origin: Name of the source, for messages.

        Raises:
            InputError: A key or a value is wrong; the message names it and the mend.
        """
        return _checked(_by_our_names(values, origin), {}, origin)

    @staticmethod
    def from_args(arguments: Sequence[str]) -> Config:
        """Read a command line, `[FILE.toml] [--section.key value | --section.key=value]...`.

        Flags win over the file, and later flags over earlier ones, wherever the file is named: --train.epochs over
        train.steps as well.

        Args:
            arguments: Words of the command line.

        Raises:
            InputError: As `from_dict`, or the file cannot be read.
        """
        file, given = parse(arguments)
        values = {} if file is None else _by_our_names(read_toml(file), file)
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


def parse(arguments: Sequence[str]) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """Take a command line apart: `[FILE.toml] [--section.key value | --section.key=value]...`, in any order.

    Args:
        arguments: Words of the command line.

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
        name, equals, text = word.removeprefix("--").partition("=")
        section, dot, key = name.partition(".")
        if not word.startswith("-"):
            if dot and key in known.get(section, {}):
                raise refusal(f"{COMMAND_LINE}: {word} lacks its dashes; write --{name} {text if equals else 'VALUE'}")
            if file is not None:
                raise refusal(f"{COMMAND_LINE}: {file} and {word} are two configuration files; give one")
            file = word
            continue
        if not word.startswith("--") or not name:
            raise refusal(f"argument {word!r} is not understood; write --section.key value")
        if not dot:
            raise (_not_a_key if name in known else _unknown)(name, COMMAND_LINE)
        if (ours := our_name(section, key)) != (section, key):
            early.say(_renamed(COMMAND_LINE, name, ".".join(ours)))
            section, key = ours
        _check_names({section: {key: None}}, COMMAND_LINE)
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
    """Return the settings. Raises InputError for a value of the wrong type or out of range.

    Args:
        values: The settings, by section and key.
        origin: Where single keys come from, by section.key.
        otherwise: Where all others come from.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"][:2])
    where = origin.get(name, otherwise)
    if problem["type"] == "value_error":  # a check across keys, which names them itself
        raise refusal(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
    mend = _SPELLED.get(problem["type"], "")
    raise refusal(f"{where}: {name} = {problem['input']!r:.200} is wrong: {problem['msg'].lower()}{mend}")


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
        with suppress(ValueError, RecursionError):
            return read(text)
    return text


def _check_names(values: Mapping[str, Any], origin: str) -> None:
    """Check that nested values have known sections and keys only.

    Args:
        values: {section: {key: value}}.
        origin: Where the values come from: a file's path, or `COMMAND_LINE`.

    Raises:
        InputError: There is no such section or key; the message names what is most likely meant.
    """
    known = sections()
    for section, keys in values.items():
        if section not in known:
            raise _wrong_name(str(section), origin, [*map(str, keys)] if isinstance(keys, Mapping) else [])
        if not isinstance(keys, Mapping):
            raise _not_a_key(section, origin)
        for key in keys:
            if key not in known[section]:
                raise _unknown(f"{section}.{key}", origin)


def _unknown(name: str, origin: str) -> InputError:
    """The error for a name that is no section.key, with the keys that it may stand for."""
    section, dot, key = name.partition(".")
    if not dot:
        return _wrong_name(name, origin, [])
    if name in REMOVED:
        return refusal(f"{origin}: {name} is gone: {REMOVED[name][1]}")
    if key in sections().get(section, {}):
        return refusal(
            f"{origin}: {name!r} is key {key!r} of section {section!r}; write [{section}] and {key} under it"
        )
    _, found = _nearest(section, key)
    return _mistaken(name, found, origin)


def _not_a_key(section: str, origin: str) -> InputError:
    """The error for a value given to a whole section."""
    example = next(iter(sections()[section]))
    in_file, as_flag = f"[{section}] and its keys, as {example}, under it", f"--{section}.KEY VALUE"
    mend = f"{as_flag}, as --{section}.{example}" if origin == COMMAND_LINE else in_file
    return refusal(f"{origin}: {section} is a section; write {mend}")


def _wrong_name(name: str, origin: str, keys: list[str]) -> InputError:
    """The error for what should be a section. keys: what was given in it."""
    if "." in name:
        return _unknown(name, origin)
    sure, found = _nearest(name, keys[0]) if keys else _nearest("", name)
    near = difflib.get_close_matches(name[:_LONGEST], sections(), n=1, cutoff=_NEAR)
    if keys and near and (sure < 1 or keys[0] in sections()[near[0]]):  # else the key alone says what is meant
        return _mistaken(name, near, origin)
    if keys:
        return _mistaken(f"{name}.{keys[0]}", found, origin)
    if near and _alike(name, near[0]) >= sure:
        return _mistaken(name, near, origin)
    if sure < _NEAR:
        return refusal(f"{origin}: unknown key {name!r:.200}; see --help for the list")
    return _mistaken(name, found, origin)


def _mistaken(name: str, found: list[str], origin: str) -> InputError:
    meant = " or ".join(map(repr, found))
    different = _DIFFERENT.get(name.rpartition(".")[2].replace("-", "_"))
    hint = f" ({different})" if different else ""
    return refusal(f"{origin}: unknown key {name!r:.200}; did you mean {meant}?{hint}")


def _nearest(section: str, key: str) -> tuple[float, list[str]]:
    """The settings most likely meant by a key in a section, and how likely (about 1: it is spelled like that)."""
    scores = {
        f"{of}.{name}": max(_alike(key, word) for word in (name, *other_names(field))) + _OWN_SECTION * (of == section)
        for of, settings in sections().items()
        for name, field in settings.items()
    }
    best = max(scores.values())
    return best, [name for name, score in scores.items() if score > best - 1e-9][:_SHOWN]


def _alike(one: str, other: str) -> float:
    """1 for the same word, 0 for words without a common letter."""
    return difflib.SequenceMatcher(None, one[:_LONGEST].lower().replace("-", "_"), other).ratio()


def our_name(section: str, key: str) -> tuple[str, str]:
    """Return the (section, key) that a name stands for: the setting it is an alias of, or itself."""
    known = sections()
    if section in known and key not in known[section]:
        for of in known if section == "train" else (section,):  # where other tools have all
            for name, field in known[of].items():
                if key in declared(field, "alias"):
                    return of, name
    return section, key


def _by_our_names(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return nested values with each alias replaced by our name, and without removed settings that ask for nothing.

    Args:
        values: {section: {key: value}}, unchecked.
        origin: Source of the values: a file's path, or the command line.

    Raises:
        InputError: A setting was given under two names, or there is no such section or key.
    """
    found = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in values.items()}
    for section, keys in values.items():
        for key in keys if isinstance(keys, Mapping) else ():
            of, name = our_name(section, key)
            target = found.setdefault(of, {})
            if f"{section}.{key}" in REMOVED and keys[key] == REMOVED[f"{section}.{key}"][0]:
                del found[section][key]
            if (of, name) == (section, key) or not isinstance(target, dict):
                continue
            if name in target:
                raise refusal(f"{origin}: {section}.{key} and {of}.{name} are the same setting; give one of them")
            target[name] = found[section].pop(key)
            early.say(_renamed(origin, f"{section}.{key}", f"{of}.{name}"))
    _check_names(found, origin)
    return found


def _renamed(origin: str, theirs: str, ours: str) -> str:
    """Return the line that says our name of a setting."""
    return f"{origin}: {theirs} is called {ours} here"
