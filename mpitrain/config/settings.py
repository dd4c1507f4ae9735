"""The validated configuration of a run: a TOML file, overridden by `--section.key value` arguments.

Each setting is declared once, in `run.py`, `training.py` or `parallel.py`, with its type, default, description and
range; the names that a setting can choose among come from `mpitrain.choices`. An unknown key is an error that suggests
the nearest name; no key is ignored silently. This module imports neither torch nor MPI.

An alias is a name of another tool for one of our settings. It is accepted in the section of that setting and in
[train], where other tools keep all of their settings. A name with a different meaning, such as a batch size per device,
is not an alias; the error about it contains a hint. A removed setting is ignored if it has its old default, because the
configuration files of earlier runs contain every setting of their version.
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
from mpitrain.config.preset import defaults_by_model, with_model_defaults
from mpitrain.config.run import CheckpointSection, DataSection, ElasticSection, MonitorSection, RunSection
from mpitrain.config.section import Section, Sections, declared, other_names
from mpitrain.config.toml_file import read_toml, toml_value
from mpitrain.config.training import EXCLUSIVE, ModelSection, OptimSection, TrainSection
from mpitrain.errors import InputError, refusal

COMMAND_LINE = "command line"
_NEAR = 0.6  # least similarity of a misspelled section name
_OWN_SECTION = 0.1  # bonus of a key in the same section over an equally similar key elsewhere
_SHOWN = 3  # most keys in one suggestion
_LONGEST = 100  # characters of a name that are compared
_SYNTAX_HINTS = {
    "dict_type": '; write {a = 1} or {"a": 1}',
    "list_type": "; write [{a = 1}]",
    "tuple_type": '; write ["a", "b"]',
}  # hints for values that are not text
# names of other tools whose meaning differs from that of the setting nearest to them
_DIFFERENT_MEANING = {
    "batch_size": "train.batch counts the samples of all ranks together, train.microbatch those of one rank at a time",
    "per_device_train_batch_size": "train.batch is the global batch, over all ranks and microbatches",
    "per_device_batch_size": "train.batch is the global batch, over all ranks and microbatches",
    "warmup_ratio": "optim.warmup counts steps",
    "dtype": "its values are fp32, bf16 and fp16",
    **dict.fromkeys(("amp", "use_amp", "autocast", "mixed_precision", "fp16", "bf16"), "set it to bf16 or fp16"),
}
# removed settings: (old default, which is still accepted; the replacement, for the error message)
REMOVED = {"parallel.recording": ("", "monitor.timeline records the same actions")}


class Config(Section):
    """The complete configuration of a run, with one attribute per TOML section."""

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
        return with_model_defaults(values) if isinstance(values, Mapping) else values

    @staticmethod
    def of(source: ConfigSource) -> Config:
        """Return the configuration for any form of settings that a caller may pass.

        Args:
            source: A `Config`, nested values, the path of a TOML file, a function that returns one of these, or None.

        Raises:
            InputError: A key or a value is wrong, or the file cannot be read.
        """
        if isinstance(source, Config):
            return source
        if callable(source):
            return Config.of(source())
        return Config.from_args([str(source)]) if isinstance(source, (str, Path)) else Config.from_dict(source or {})

    @staticmethod
    def from_dict(values: Mapping[str, Any], origin: str = "config") -> Config:
        """Create a configuration from nested values such as {"train": {"steps": 10}}.

        Args:
            values: Values by section and key. Aliases from other tools are accepted; a printed line names each.
            origin: Name of the source, for messages.

        Raises:
            InputError: A key or a value is wrong; the message names it and the fix.
        """
        return _validate(_with_our_names(values, origin), {}, origin)

    @staticmethod
    def from_args(arguments: Sequence[str]) -> Config:
        """Create a configuration from a command line, `[FILE.toml] [--section.key value | --section.key=value]...`.

        Flags override the file, and later flags override earlier ones; the position of the file does not matter. A flag
        also overrides the key of the file that it replaces: --train.epochs removes the file's train.steps.

        Args:
            arguments: Words of the command line.

        Raises:
            InputError: A key or a value is wrong, or the file cannot be read; the message names it and the fix.
        """
        file, flags = parse(arguments)
        values = {} if file is None else _with_our_names(read_toml(file), file)
        for key, other, _ in EXCLUSIVE:
            if (flagged := {key, other} & flags.get("train", {}).keys()) and "train" in values:
                for each in {key, other} - flagged:
                    values["train"].pop(each, None)
        for section, keys in flags.items():
            values.setdefault(section, {}).update(keys)
        by_flags = {f"{section}.{key}": COMMAND_LINE for section, keys in flags.items() for key in keys}
        return _validate(values, by_flags, file or COMMAND_LINE)

    def to_toml(self) -> str:
        """Return all settings as the text of a TOML file; reading it gives an equal configuration."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as nested values; `from_dict` of them gives an equal configuration.

        If train.epochs is set, train.steps is left out; if train.accumulation is set, train.microbatch is.
        """
        values = self.model_dump()
        for key, other, _ in EXCLUSIVE:
            if values["train"][key]:
                del values["train"][other]
        return values


# a Config, nested values, the path of a TOML file, a function that returns one of these, or None for the defaults
ConfigSource: TypeAlias = Config | Mapping[str, Any] | str | Path | Callable[[], Any] | None


def sections() -> Sections:
    """Return the declarations of all settings, by section and key."""
    return {name: field.annotation.model_fields for name, field in Config.model_fields.items()}  # type: ignore[union-attr]


def parse(arguments: Sequence[str]) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """Parse a command line, `[FILE.toml] [--section.key value | --section.key=value]...`, in any order.

    Args:
        arguments: Words of the command line.

    Returns:
        (file, flags): path of the configuration file or None, and the values of the flags as {section: {key: value}}.
        If a flag is repeated, the last one counts.

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
                raise refusal(f"{COMMAND_LINE}: {word} has no dashes; write --{name} {text if equals else 'VALUE'}")
            if file is not None:
                raise refusal(f"{COMMAND_LINE}: {file} and {word} are two configuration files; give one")
            file = word
            continue
        if not word.startswith("--") or not name:
            raise refusal(f"argument {word!r} is not understood; write --section.key value")
        if not dot:
            raise (_section_without_key if name in known else _unknown_key)(name, COMMAND_LINE)
        if (ours := our_name(section, key)) != (section, key):
            early.log(_alias_notice(COMMAND_LINE, name, ".".join(ours)))
            section, key = ours
        _check_names({section: {key: None}}, COMMAND_LINE)
        if not equals:
            if not words or words[0].startswith("--"):
                raise refusal(f"--{name} has no value; write --{name} VALUE")
            text = words.pop(0)
        values.setdefault(section, {})[key] = _value(text, known[section][key].annotation)
    return file, values


def help_text(program: str) -> str:
    """Return the --help text of `python -m program`: its usage, and every setting with description and default."""
    lines = [f"usage: mpirun -n N python -m {program} [CONFIG.toml] [--section.key value]...", "", "keys:"]
    for section, settings in sections().items():
        for key, field in settings.items():
            names = choices_of(field.annotation)
            choices = f": {', '.join(map(str, names))}" if names else ""
            default = "none" if field.default in ([], (), {}) else json.dumps(field.default)
            default = "; ".join(filter(None, [default, defaults_by_model(section, key)]))
            lines.append(f"  --{section + '.' + key:24} {field.description}{choices} [{default}]")
    return "\n".join(lines)


def _validate(values: Mapping[str, Any], origin: Mapping[str, str], otherwise: str) -> Config:
    """Validate nested values and return them as a configuration.

    Args:
        values: Values by section and key; all names are known.
        origin: Source of single settings for error messages, by section.key.
        otherwise: Source of all other settings.

    Raises:
        InputError: A value has the wrong type or is out of range, or several settings contradict each other.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"][:2])
    where = origin.get(name, otherwise)
    if problem["type"] == "value_error":  # a check across keys, which names them itself
        raise refusal(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
    hint = _SYNTAX_HINTS.get(problem["type"], "")
    raise refusal(f"{where}: {name} = {problem['input']!r:.200} is wrong: {problem['msg'].lower()}{hint}")


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """Return the names that a setting can choose among, also in a union with other types; empty if it has none."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    several = [choices for member in get_args(annotation) if len(choices := choices_of(member)) > 1]
    return several[0] if several else ()


def _value(text: str, annotation: Any) -> Any:
    """Return the TOML or JSON value of a flag's text; the text itself if it is neither, or the setting is a text."""
    if annotation is str:
        return text
    for read in (toml_value, json.loads):
        with suppress(ValueError, RecursionError):
            return read(text)
    return text


def _check_names(values: Mapping[str, Any], origin: str) -> None:
    """Check that nested values contain only known sections and keys.

    Args:
        values: {section: {key: value}}.
        origin: Source of the values: path of a file, or `COMMAND_LINE`.

    Raises:
        InputError: A section or key does not exist; the message suggests the nearest name.
    """
    known = sections()
    for section, keys in values.items():
        if section not in known:
            raise _unknown_section(str(section), origin, [*map(str, keys)] if isinstance(keys, Mapping) else [])
        if not isinstance(keys, Mapping):
            raise _section_without_key(section, origin)
        for key in keys:
            if key not in known[section]:
                raise _unknown_key(f"{section}.{key}", origin)


def _unknown_key(name: str, origin: str) -> InputError:
    """Return the error for an unknown section.key, with the settings that were probably meant."""
    section, dot, key = name.partition(".")
    if not dot:
        return _unknown_section(name, origin, [])
    if name in REMOVED:
        return refusal(f"{origin}: {name} was removed: {REMOVED[name][1]}")
    if key in sections().get(section, {}):
        return refusal(
            f"{origin}: {name!r} is key {key!r} of section {section!r}; write [{section}] and {key} under it"
        )
    _, nearest = _nearest(section, key)
    return _misspelled(name, nearest, origin)


def _section_without_key(section: str, origin: str) -> InputError:
    """Return the error for a section that was given a value instead of keys."""
    example = next(iter(sections()[section]))
    in_file, as_flag = f"[{section}] and under it its keys, such as {example}", f"--{section}.KEY VALUE"
    fix = f"{as_flag}, such as --{section}.{example}" if origin == COMMAND_LINE else in_file
    return refusal(f"{origin}: {section} is a section; write {fix}")


def _unknown_section(name: str, origin: str, keys: list[str]) -> InputError:
    """Return the error for an unknown section `name` in which `keys` were set."""
    if "." in name:
        return _unknown_key(name, origin)
    sure, nearest = _nearest(name, keys[0]) if keys else _nearest("", name)
    near = difflib.get_close_matches(name[:_LONGEST], sections(), n=1, cutoff=_NEAR)
    if keys and near and (sure < 1 or keys[0] in sections()[near[0]]):  # else only the key decides
        return _misspelled(name, near, origin)
    if keys:
        return _misspelled(f"{name}.{keys[0]}", nearest, origin)
    if near and _similarity(name, near[0]) >= sure:
        return _misspelled(name, near, origin)
    if sure < _NEAR:
        return refusal(f"{origin}: unknown key {name!r:.200}; see --help for the list")
    return _misspelled(name, nearest, origin)


def _misspelled(name: str, candidates: list[str], origin: str) -> InputError:
    suggestions = " or ".join(map(repr, candidates))
    different = _DIFFERENT_MEANING.get(name.rpartition(".")[2].replace("-", "_"))
    hint = f" ({different})" if different else ""
    return refusal(f"{origin}: unknown key {name!r:.200}; did you mean {suggestions}?{hint}")


def _nearest(section: str, key: str) -> tuple[float, list[str]]:
    """Return the settings that are spelled most like `section.key`.

    Returns:
        (similarity, names): similarity is about 1 for an exact match of the key or an alias, and higher if the section
        matches as well; names has up to three settings as section.key.
    """
    scores = {
        f"{of}.{name}": max(_similarity(key, word) for word in (name, *other_names(field)))
        + _OWN_SECTION * (of == section)
        for of, settings in sections().items()
        for name, field in settings.items()
    }
    best = max(scores.values())
    return best, [name for name, score in scores.items() if score > best - 1e-9][:_SHOWN]


def _similarity(one: str, other: str) -> float:
    """Return the similarity of two words, 0 to 1: 1 if they are equal, 0 if they have no letter in common."""
    return difflib.SequenceMatcher(None, one[:_LONGEST].lower().replace("-", "_"), other).ratio()


def our_name(section: str, key: str) -> tuple[str, str]:
    """Return the (section, key) of the setting that a name refers to.

    Args:
        section: Section in which the name was used.
        key: Our key, or an alias from another tool.

    Returns:
        The setting of which the name is an alias; (section, key) unchanged if it is none.
    """
    known = sections()
    if section in known and key not in known[section]:
        for of in known if section == "train" else (section,):  # other tools keep all settings there
            for name, field in known[of].items():
                if key in declared(field, "alias"):
                    return of, name
    return section, key


def _with_our_names(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return nested values with each alias replaced by our name. Removed settings at their old default are dropped.

    Args:
        values: {section: {key: value}}, unchecked.
        origin: Source of the values: path of a file, or `COMMAND_LINE`.

    Raises:
        InputError: A setting was given under two names, or a section or key does not exist.
    """
    result = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in values.items()}
    for section, keys in values.items():
        for key in keys if isinstance(keys, Mapping) else ():
            of, name = our_name(section, key)
            target = result.setdefault(of, {})
            if f"{section}.{key}" in REMOVED and keys[key] == REMOVED[f"{section}.{key}"][0]:
                del result[section][key]
            if (of, name) == (section, key) or not isinstance(target, dict):
                continue
            if name in target:
                raise refusal(f"{origin}: {section}.{key} and {of}.{name} are the same setting; give one of them")
            target[name] = result[section].pop(key)
            early.log(_alias_notice(origin, f"{section}.{key}", f"{of}.{name}"))
    _check_names(result, origin)
    return result


def _alias_notice(origin: str, theirs: str, ours: str) -> str:
    """Return the line that tells the user our name for a setting of another tool."""
    return f"{origin}: {theirs} is called {ours} here"
