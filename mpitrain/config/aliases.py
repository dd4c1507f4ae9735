"""Names that are accepted though they are no keys: other tools' for settings that mean the same, of which ours is said.

An alias counts in the section of its setting and in [train], where other tools have all of their settings. A name whose
meaning differs, such as a batch size per device, is no alias: `messages` has a hint for it. A setting that is gone is
passed over where it asked for nothing: the settings of earlier runs name all that there were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpitrain.config.messages import REMOVED
from mpitrain.config.section import Sections, aliases
from mpitrain.errors import refusal

Say = Callable[[str], object]
_ALL_IN_ONE = "train"


def our_name(section: str, key: str, sections: Sections) -> tuple[str, str]:
    """Return the (section, key) that a name stands for: the setting it is an alias of, or itself."""
    if section in sections and key not in sections[section]:
        for of in sections if section == _ALL_IN_ONE else (section,):
            for name, field in sections[of].items():
                if key in aliases(field):
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
