"""Names in a configuration: those of other tools that mean the same, and one line for what is wrong.

An alias counts in the section of its setting and in [train], where other tools have all of their settings. A name whose
meaning differs, such as a batch size per device, is no alias: an error has a hint for it. A setting that is gone is
passed over where it asked for nothing: the settings of earlier runs name all that there were.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from mpitrain.config.section import Sections, declared, other_names
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


def check_names(values: Mapping[str, Any], sections: Sections, origin: str) -> None:
    """Check that nested values have known sections and keys only.

    Args:
        values: {section: {key: value}}.
        sections: What there is.
        origin: Where the values come from: a file's path, or `COMMAND_LINE`.

    Raises:
        InputError: There is no such section or key; the message names what is most likely meant.
    """
    for section, keys in values.items():
        if section not in sections:
            raise _wrong_name(str(section), sections, origin, [*map(str, keys)] if isinstance(keys, Mapping) else [])
        if not isinstance(keys, Mapping):
            raise not_a_key(section, sections, origin)
        for key in keys:
            if key not in sections[section]:
                raise unknown(f"{section}.{key}", sections, origin)


def unknown(name: str, sections: Sections, origin: str) -> InputError:
    """The error for a name that is no section.key, with the keys that it may stand for."""
    section, dot, key = name.partition(".")
    if not dot:
        return _wrong_name(name, sections, origin, [])
    if name in REMOVED:
        return refusal(f"{origin}: {name} is gone: {REMOVED[name][1]}")
    if key in sections.get(section, {}):
        return refusal(
            f"{origin}: {name!r} is key {key!r} of section {section!r}; write [{section}] and {key} under it"
        )
    _, found = _nearest(section, key, sections)
    return _mistaken(name, found, origin)


def not_a_key(section: str, sections: Sections, origin: str) -> InputError:
    """The error for a value given to a whole section."""
    example = next(iter(sections[section]))
    in_file, as_flag = f"[{section}] and its keys, as {example}, under it", f"--{section}.KEY VALUE"
    mend = f"{as_flag}, as --{section}.{example}" if origin == COMMAND_LINE else in_file
    return refusal(f"{origin}: {section} is a section; write {mend}")


def wrong_value(error: ValidationError, origin: Mapping[str, str], otherwise: str) -> InputError:
    """The error for a value of the wrong type or out of range.

    Args:
        origin: Where single keys come from, by section.key.
        otherwise: Where all others come from.
    """
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"][:2])
    where = origin.get(name, otherwise)
    if problem["type"] == "value_error":  # a check across keys, which names them itself
        return refusal(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
    mend = _SPELLED.get(problem["type"], "")
    return refusal(f"{where}: {name} = {problem['input']!r:.200} is wrong: {problem['msg'].lower()}{mend}")


def _wrong_name(name: str, sections: Sections, origin: str, keys: list[str]) -> InputError:
    """The error for what should be a section. keys: what was given in it."""
    if "." in name:
        return unknown(name, sections, origin)
    sure, found = _nearest(name, keys[0], sections) if keys else _nearest("", name, sections)
    near = difflib.get_close_matches(name[:_LONGEST], sections, n=1, cutoff=_NEAR)
    if keys and near and (sure < 1 or keys[0] in sections[near[0]]):  # else the key alone says what is meant
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


def _nearest(section: str, key: str, sections: Sections) -> tuple[float, list[str]]:
    """The settings most likely meant by a key in a section, and how likely (about 1: it is spelled like that)."""
    scores = {
        f"{of}.{name}": max(_alike(key, word) for word in (name, *other_names(field))) + _OWN_SECTION * (of == section)
        for of, settings in sections.items()
        for name, field in settings.items()
    }
    best = max(scores.values())
    return best, [name for name, score in scores.items() if score > best - 1e-9][:_SHOWN]


def _alike(one: str, other: str) -> float:
    """1 for the same word, 0 for words without a common letter."""
    return difflib.SequenceMatcher(None, one[:_LONGEST].lower().replace("-", "_"), other).ratio()


Say = Callable[[str], object]
_ALL_IN_ONE = "train"


def our_name(section: str, key: str, sections: Sections) -> tuple[str, str]:
    """Return the (section, key) that a name stands for: the setting it is an alias of, or itself."""
    if section in sections and key not in sections[section]:
        for of in sections if section == _ALL_IN_ONE else (section,):
            for name, field in sections[of].items():
                if key in declared(field, "alias"):
                    return of, name
    return section, key


def by_our_names(values: Mapping[str, Any], sections: Sections, origin: str, say: Say) -> dict[str, Any]:
    """Return nested values with each alias replaced by our name, and without removed settings that ask for nothing.

    Args:
        values: {section: {key: value}}, unchecked.
        sections: All settings.
        origin: Source of the values: a file's path, or the command line.
        say: Called with a line for each alias.

    Raises:
        InputError: A setting was given under two names.
    """
    found = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in values.items()}
    for section, keys in values.items():
        for key in keys if isinstance(keys, Mapping) else ():
            of, name = our_name(section, key, sections)
            target = found.setdefault(of, {})
            if f"{section}.{key}" in REMOVED and keys[key] == REMOVED[f"{section}.{key}"][0]:
                del found[section][key]
            if (of, name) == (section, key) or not isinstance(target, dict):
                continue
            if name in target:
                raise refusal(f"{origin}: {section}.{key} and {of}.{name} are the same setting; give one of them")
            target[name] = found[section].pop(key)
            say(renamed(origin, f"{section}.{key}", f"{of}.{name}"))
    return found


def renamed(origin: str, theirs: str, ours: str) -> str:
    """Return the line that says our name of a setting."""
    return f"{origin}: {theirs} is called {ours} here"
